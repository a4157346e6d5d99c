"""OpenAI-compatible chat and completions: bodies and stream events to facts. Never raises on what a server or client sent.

Fields beyond OpenAI's own are vLLM's: `token_ids` (with `return_token_ids`), `reasoning` / `reasoning_content`.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # None: the server does not say; 0: it says none
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFacts:
    """What one stream event, or one whole body, says about the first choice."""

    text: str = ""
    reasoning: str = ""
    tool_calls: int = 0
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None  # the server's own words
    is_done: bool = False
    is_parsed: bool = True

    @property
    def has_token(self) -> bool:
        """A token of reasoning, answer or tool call: not a role, not an empty chunk, not usage alone."""
        return bool(self.text or self.reasoning or self.tool_calls or self.token_ids)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    content: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Body).decode
_DONE = ChunkFacts(is_done=True)


def parse_chunk(data: bytes) -> ChunkFacts:
    """Facts of one SSE payload."""
    if data.strip() == b"[DONE]":
        return _DONE
    return parse_response(data)


def parse_response(body: bytes) -> ChunkFacts:
    """Facts of a whole JSON body (or one event's). What is no such body has `is_parsed` False."""
    try:
        raw = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ChunkFacts(is_parsed=False)
    text, reasoning, calls, ids, finish = "", "", 0, None, None
    for choice in raw.choices:
        message = choice.delta or choice.message
        if choice.text:
            text += choice.text
        if message is not None:
            if isinstance(message.content, str):
                text += message.content
            reasoning += message.reasoning or message.reasoning_content or ""
            calls += len(message.tool_calls or ())
        ids = tuple(choice.token_ids) if choice.token_ids is not None else ids
        finish = choice.finish_reason or finish
    return ChunkFacts(
        text=text,
        reasoning=reasoning,
        tool_calls=calls,
        token_ids=ids,
        finish_reason=finish,
        usage=_usage(raw.usage) if raw.usage is not None else None,
        error=_error_text(raw.error) if raw.error is not None else None,
    )


def _usage(raw: _Usage) -> Usage:
    prompt, completion = raw.prompt_tokens_details, raw.completion_tokens_details
    return Usage(
        prompt_tokens=raw.prompt_tokens,
        completion_tokens=raw.completion_tokens,
        cached_tokens=prompt.cached_tokens if prompt else None,
        reasoning_tokens=completion.reasoning_tokens if completion else None,
    )


def _error_text(error: Any) -> str:
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return str(error)


class RequestBody(msgspec.Struct):
    """The fields of a request that a trace or a simulated server needs; all others are passed over."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: Any = None
    tools: list[Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Any = None
    tool_choice: Any = None
    response_format: Any = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


_decode_request = msgspec.json.Decoder(RequestBody).decode


def parse_request(body: bytes) -> RequestBody:
    """Raises msgspec.DecodeError (or its ValidationError) with the place of the fault, for whoever must answer 400."""
    return _decode_request(body)


def token_prompt(prompt: Any) -> list[int] | None:
    """The ids if the prompt is one list of token ids (bare, or the only member of a list), else None."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    return None


def text_prompt(prompt: Any) -> str | None:
    """The text if the prompt is one string (bare, or the only member of a list), else None."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else None


@dataclass(slots=True)
class StreamFacts:
    """Folds the facts of a stream's events into those of its answer; usage is cumulative, so the last one wins."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    has_all_token_ids: bool = True  # every token-bearing event carried its ids
    tool_calls: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    is_done: bool = False

    def add(self, facts: ChunkFacts) -> None:
        if facts.text:
            self.text.append(facts.text)
        if facts.token_ids is not None:
            self.token_ids.extend(facts.token_ids)
        elif facts.has_token:
            self.has_all_token_ids = False
        self.tool_calls += facts.tool_calls
        self.finish_reason = facts.finish_reason or self.finish_reason
        self.usage = facts.usage or self.usage
        self.error = facts.error or self.error
        self.is_done = self.is_done or facts.is_done
