"""OpenAI request bodies in, response bytes out, as vLLM shapes them. Pure: tokenizer and generator are passed in.

Accepted and without effect: `stop`, sampling parameters, `logprobs` and `echo`, since the answer is made up anyway.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from numpy.random import Generator

from replay.sim.engine import FinishReason
from tracer.tokens import Tokenizer, encode_chat

Kind = Literal["chat", "completion"]


class ApiError(Exception):
    """A request that is refused, in OpenAI's error shape."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> bytes:
        error = {
            "message": str(self),
            "type": "NotFoundError" if self.status == 404 else "BadRequestError",
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Body(msgspec.Struct):
    """What the server reads of either endpoint's body; other fields are ignored, as by vLLM."""

    model: str | None = None
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = False
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False


_BODY = msgspec.json.Decoder(Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A valid request. `max_tokens` None: not given."""

    kind: Kind
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


def read_body(raw: bytes) -> Body:
    try:
        return _BODY.decode(raw)
    except msgspec.MsgspecError as error:
        raise ApiError(f"The request body cannot be used: {error}") from error


def read_ask(body: Body, kind: Kind, model: str) -> Ask:
    if body.model is not None and body.model != model:
        raise ApiError(f"The model `{body.model}` does not exist; this server has `{model}`.", status=404, param="model")
    if (body.n or 1) != 1 or (body.best_of or 1) != 1:
        raise ApiError(f"This server gives one answer a request: n = {body.n}, want 1.", param="n")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    if min_tokens < 0 or (max_tokens is not None and min_tokens > max_tokens):
        raise ApiError(f"min_tokens must be between 0 and max_tokens={max_tokens}, got {min_tokens}.", param="min_tokens")
    if body.stream_options is not None and not body.stream:
        raise ApiError("Stream options can only be defined when `stream=True`.", param="stream_options")
    options = body.stream_options or StreamOptions()
    return Ask(
        kind=kind,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
    )


def prompt_tokens(body: Body, kind: Kind, tokenizer: Tokenizer, vocabulary: int) -> "array[int]":
    """Token ids of the prompt. Token ids must lie below `vocabulary`."""
    if kind == "chat":
        if not body.messages:
            raise ApiError("`messages` must hold at least one message.", param="messages")
        return array("I", [token for part in encode_chat(tokenizer, body.messages, body.tools) for token in part])
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) != 1:
            raise ApiError(f"This server takes one prompt a request, got {len(prompt)}.", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = array("I", tokenizer.encode(prompt))
    else:
        ids = _token_ids(prompt)
    if not ids:
        raise ApiError("The prompt is empty.", param="prompt")
    if max(ids) >= vocabulary:
        raise ApiError(f"Token id {max(ids)} is out of vocabulary ({vocabulary} ids).", param="prompt")
    return ids


def _token_ids(prompt: Any) -> "array[int]":
    try:
        return array("I", prompt if isinstance(prompt, list) else [None])
    except (TypeError, OverflowError) as error:
        raise ApiError("`prompt` must be a text or a list of token ids.", param="prompt") from error


def plan_answer(ask: Ask, room: int, median_tokens: int, rng: Generator) -> tuple[int, FinishReason]:
    """(tokens, finish reason) of an answer that may have at most `room` tokens.

    With `ignore_eos` the answer runs to the limit. Otherwise it ends by itself at a log-normal length (sigma 0.8, in
    the range of the fits to public chat traces), or at the limit if that comes first.
    """
    limit = room if ask.max_tokens is None else ask.max_tokens
    if ask.ignore_eos:
        return limit, "length"
    natural = int(median_tokens * rng.lognormal(0.0, 0.8))
    wanted = max(natural, ask.min_tokens, 1)
    return (limit, "length") if wanted >= limit else (wanted, "stop")


class Answer:
    """Renders one answer, token by token or whole. `words[i]` is the text of answer token i, plain JSON-safe ASCII."""

    def __init__(
        self, ask: Ask, *, answer_id: str, created_s: int, model: str, prompt: Sequence[int], words: list[bytes]
    ) -> None:
        self.ask = ask
        self.prompt = prompt
        self.words = words
        chat = ask.kind == "chat"
        name = "chat.completion" if chat else "text_completion"
        head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + answer_id,
            "object": name,
            "created": created_s,
            "model": model,
        }
        self._whole_head = msgspec.json.encode(head)[:-1]
        if chat:
            head["object"] = "chat.completion.chunk"
        self._head = b"data: " + msgspec.json.encode(head)[:-1]
        # One chunk is: _open, the word, _close (or its last form), the usage if asked, the end.
        self._open = self._head + b',"choices":[{"index":0,' + (b'"delta":{"content":"' if chat else b'"text":"')
        self._after_text = b'"},"logprobs":null,"finish_reason":' if chat else b'","logprobs":null,"finish_reason":'
        self._sent = 0

    def first(self) -> bytes:
        """What precedes the first token: for chat, the role with empty content, as vLLM sends it."""
        if self.ask.kind != "chat":
            return b""
        ids = _ids_field(b"prompt_token_ids", self.prompt) if self.ask.return_token_ids else b""
        choice = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        usage = b',"usage":' + self._usage(0) if self.ask.continuous_usage else b""
        return self._head + b',"choices":[{"index":0,' + choice + b"}]" + ids + usage + b"}\n\n"

    def token(self, token_id: int, finish_reason: str | None) -> bytes:
        """The event of the next token."""
        ask = self.ask
        word = self.words[self._sent]
        self._sent += 1
        end = b"null" if finish_reason is None else b'"%b","stop_reason":null' % finish_reason.encode()
        if ask.return_token_ids:
            end += b',"token_ids":[%d]' % token_id
            if self._sent == 1 and ask.kind == "completion":
                end += _ids_field(b"prompt_token_ids", self.prompt)
        if ask.continuous_usage:
            return b'%b%b%b%b}],"usage":%b}\n\n' % (self._open, word, self._after_text, end, self._usage(self._sent))
        return b"%b%b%b%b}]}\n\n" % (self._open, word, self._after_text, end)

    def last(self, cached_tokens: int) -> bytes:
        """What follows the last token: usage with empty choices if asked, and the end mark."""
        if not self.ask.include_usage:
            return b"data: [DONE]\n\n"
        usage = self._usage(self._sent, cached_tokens)
        return self._head + b',"choices":[],"usage":' + usage + b"}\n\ndata: [DONE]\n\n"

    def whole(self, answer: Sequence[int], finish_reason: str, cached_tokens: int) -> bytes:
        """The body of an answer that is not streamed."""
        text = b"".join(self.words)
        chat = self.ask.kind == "chat"
        content = b'"message":{"role":"assistant","content":"%b"}' if chat else b'"text":"%b"'
        choice = content % text + b',"logprobs":null,"finish_reason":"%b","stop_reason":null' % finish_reason.encode()
        ids = b""
        if self.ask.return_token_ids:
            choice += _ids_field(b"token_ids", answer)
            ids = _ids_field(b"prompt_token_ids", self.prompt)
        if not chat:
            choice, ids = choice + ids, b""
        usage = self._usage(len(self.words), cached_tokens)
        return self._whole_head + b',"choices":[{"index":0,' + choice + b"}]" + ids + b',"usage":' + usage + b"}"

    def _usage(self, answered: int, cached_tokens: int | None = None) -> bytes:
        count = len(self.prompt)
        details = b""
        if cached_tokens is not None:
            details = b',"prompt_tokens_details":{"cached_tokens":%d}' % cached_tokens
        return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}' % (
            count,
            count + answered,
            answered,
            details,
        )


def _ids_field(name: bytes, ids: Sequence[int]) -> bytes:
    return b',"%b":%b' % (name, msgspec.json.encode(list(ids)))
