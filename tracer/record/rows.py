"""A request and the facts of its exchange become the row that may be written.

An allow-list: every value below is a number, a digest, or a word checked against a short list. Text stops here.
"""

import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tracer.record.exchange import ExchangeFacts, decoder
from tracer.record.messages import Ended, Row, Started
from tracer.record.privacy import Hasher, Tokens, as_tokens
from tracer.record.prompts import ChatOutlines, Part, PromptEncoder, sized
from tracer.record.states import TailIndex, chat_extends, chat_states
from tracer.record.texts import TextWriter
from tracer.schema import BASE_BLOCK_TOKENS, ItlSummary
from tracer.tokens import Tokenizer, media_kinds
from tracer.wire import APIS, COMPLETIONS
from tracer.wire.openai import RequestBody, text_prompt, token_prompt

if TYPE_CHECKING:
    from tracer.record.server_tokens import Question, ServerTokens, TokensToCome

LOCAL_INPUT_TOKENS = "tokenizer_input_tokens"  # in source_extra, where the server counts otherwise
_INT32 = 2**31 - 1
_MODEL_CHARS = 200
_FINISH_REASON = re.compile(r"[a-z_]{1,32}")
_RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_TOOL_CHOICES = ("auto", "none", "required")


class Pending(msgspec.Struct, kw_only=True):
    """What stays in memory of a request until its answer is complete."""

    asked: dict[str, object] = {}
    tokens: int | None = None  # local count
    root: bytes = b""
    input_hashes: list[bytes] = []
    input_tail: bytes | None = None
    rest: Tokens | None = None  # tokens of the partial last block
    chat: bytes | None = None  # digest of all its messages
    parts: list[Part] = []
    extends: list[bytes] = []
    session: bytes | None = None
    client: bytes | None = None
    body: bytes | None = None
    tokenizer: Any = None  # a Tokenizer
    question: "Question | None" = None  # where the upstream is the tokenizer
    prompt_to_come: "TokensToCome | None" = None
    answer_to_come: "TokensToCome | None" = None


class RowBuilder:
    """Stateful only for speed and links: message tokens seen before, ends of raw prompts seen before."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        hasher: Hasher,
        *,
        chunk_times: bool,
        by_model: Mapping[str, Tokenizer | None] | None = None,
        server: "ServerTokens | None" = None,
        texts: TextWriter | None = None,
    ) -> None:
        """`by_model`: tokenizers of models that have one of their own, by the name that requests give. None: the server."""
        self.counts: Counter[str] = Counter()
        self._hasher = hasher
        self.server = server
        self.texts = texts
        self._prompts = PromptEncoder(tokenizer, hasher) if tokenizer is not None else None
        self._by_model = {
            model: PromptEncoder(one, hasher) if one is not None else None for model, one in (by_model or {}).items()
        }
        self._outlines = ChatOutlines(hasher)
        self._tails = TailIndex()
        self._chunk_times = chunk_times

    def start(self, started: Started) -> Pending:
        pending = Pending()
        if started.body is None:
            return pending
        pending.body = self._hasher.message(b"body", started.credential, started.body)
        try:
            body = APIS[started.endpoint].parse_request(_plain(started.body, started.encoding))
        except Exception:  # anything a client can send; the row then has times and sizes only
            self.counts["requests_unreadable"] += 1
            return pending
        if self.texts is not None:
            self.texts.asked(started, body)
        pending.asked = _asked(body)
        user = (body.user or "").encode()
        if started.credential or user:
            pending.client = self._hasher.client(started.credential, user)
        pending.session = self._session(started, body, user)
        pending.root = self._hasher.root(body.model, body.cache_salt)
        try:
            self._tokenize(pending, started, body)
        except Exception:
            self.counts["prompts_unreadable"] += 1
        return pending

    def end(self, pending: Pending | None, ended: Ended) -> Row:
        facts = ended.facts
        pending = pending or Pending()
        if self.texts is not None:
            self.texts.answered(ended)
        self._take_prompt(pending)
        if pending.tokens is None and facts.prompt_token_ids and pending.root:
            self._hash_prompt(pending, as_tokens(facts.prompt_token_ids))
        answer = self._answer_tokens(pending, facts) if pending.rest is not None else None
        output_hashes, output_tail = self._hash_answer(pending, answer)
        self._count_drift(pending, facts)
        row: dict[str, object] = {
            "kind": APIS[ended.endpoint].kind,
            "endpoint": ended.endpoint,
            "upstream": ended.upstream,
            **pending.asked,
            **_sizes(pending, facts, answer),
            **_result(facts),
            **self._times(facts),
        }
        return Row(
            flow=ended.flow,
            arrival_ns=ended.arrival_ns,
            row={name: value for name, value in row.items() if value is not None},
            input_hashes=b"".join(pending.input_hashes),
            input_tail=pending.input_tail or b"",
            output_hashes=b"".join(output_hashes),
            client=pending.client,
            session=pending.session,
            leaves=self._leaves(pending, answer, output_hashes, output_tail, facts),
            extends=pending.extends,
            parts=pending.parts,
            body=pending.body,
        )

    def _session(self, started: Started, body: RequestBody, user: bytes) -> bytes | None:
        if started.session_header:
            return self._hasher.session(b"header", started.session_header, user)
        if body.conversation:  # before the cache key, which many conversations may share
            return self._hasher.session(b"conversation", body.conversation.encode())
        if body.prompt_cache_key:
            return self._hasher.session(b"key", body.prompt_cache_key.encode(), user)
        return None

    def _response(self, response_id: str) -> bytes:
        return self._hasher.message(b"response", response_id.encode())

    def awaits(self, pending: Pending, facts: ExchangeFacts) -> bool:
        """Whether tokens are still to come from the server, which now also has to say those of the answer."""
        if pending.question is None:
            return False
        if pending.answer_to_come is None and facts.token_ids is None and (text := _answer_text(facts)):
            pending.answer_to_come = pending.question.answer(text)
        return any(one is not None and not one.done() for one in (pending.prompt_to_come, pending.answer_to_come))

    def _tokenize(self, pending: Pending, started: Started, body: RequestBody) -> None:
        if body.previous_response_id or body.conversation:
            pending.extends = [self._response(body.previous_response_id)] if body.previous_response_id else []
            self.counts["prompts_held_by_server"] += 1
            return
        prompts = self._by_model.get(body.model or "", self._prompts)
        if prompts is None:
            self._ask_server(pending, started, body)
            return
        pending.tokenizer = prompts.tokenizer
        if started.endpoint != COMPLETIONS:
            tokens, digests, pending.parts = prompts.chat(body)
            pending.chat, pending.extends = chat_extends(self._hasher, body.messages or [], digests)
        else:
            found = prompts.raw(body)
            if found is None:
                self.counts["prompts_of_several"] += body.prompt is not None
                return
            tokens = found
        self._hash_prompt(pending, tokens)

    def _ask_server(self, pending: Pending, started: Started, body: RequestBody) -> None:
        assert self.server is not None
        question = pending.question = self.server.question(started.upstream, body.model, started.credential)
        size = len(started.body or b"")
        if started.endpoint != COMPLETIONS:
            digests, pending.parts = self._outlines.of(body)
            pending.chat, pending.extends = chat_extends(self._hasher, body.messages or [], digests)
            pending.prompt_to_come = question.chat(started.endpoint, body, size) if question is not None else None
        elif (ids := token_prompt(body.prompt)) is not None:
            self._hash_prompt(pending, as_tokens(ids))
            return
        elif (text := text_prompt(body.prompt)) is not None:
            pending.prompt_to_come = question.prompt(text) if question is not None else None
        else:
            self.counts["prompts_of_several"] += body.prompt is not None
            return
        if pending.prompt_to_come is None:
            self.counts["prompts_not_tokenized"] += 1
            pending.parts = []

    def _take_prompt(self, pending: Pending) -> None:
        """What the server has said of it; without, the row has no blocks."""
        if pending.prompt_to_come is None:
            return
        try:
            tokens = pending.prompt_to_come.result(timeout=0)
        except Exception:  # whatever a server and a network can do
            self.counts["prompts_not_tokenized"] += 1
            pending.parts = []
            return
        self._hash_prompt(pending, tokens)
        pending.parts = sized(pending.parts, len(tokens))

    def _hash_prompt(self, pending: Pending, tokens: Tokens) -> None:
        pending.tokens = len(tokens)
        pending.input_hashes = self._hasher.chain(pending.root, tokens)
        last = _last(pending, [])
        pending.rest = tokens[len(pending.input_hashes) * BASE_BLOCK_TOKENS :].copy()
        pending.input_tail = self._hasher.tail(last, tokens)
        if pending.chat is None:
            pending.extends = self._tails.extended(self._hasher, pending.root, pending.input_hashes, tokens)

    def _answer_tokens(self, pending: Pending, facts: ExchangeFacts) -> Tokens | None:
        """The server's own ids, else our tokens of its text; None where an error or a bound left us without."""
        if facts.token_ids is not None:
            return as_tokens(facts.token_ids)
        if not (text := _answer_text(facts)):
            return None
        tokenizer = pending.tokenizer or (self._prompts.tokenizer if self._prompts is not None else None)
        if pending.question is None and tokenizer is not None:
            return as_tokens(tokenizer.encode(text))
        try:
            return pending.answer_to_come.result(timeout=0) if pending.answer_to_come is not None else None
        except Exception:  # whatever a server and a network can do
            self.counts["answers_not_tokenized"] += 1
            return None

    def _hash_answer(self, pending: Pending, answer: Tokens | None) -> tuple[list[bytes], bytes | None]:
        if answer is None or pending.rest is None:
            return [], None
        last = _last(pending, [])
        tokens = np.concatenate([pending.rest, answer])
        hashes = self._hasher.chain(last, tokens)
        return hashes, self._hasher.tail(hashes[-1] if hashes else last, tokens)

    def _count_drift(self, pending: Pending, facts: ExchangeFacts) -> None:
        reported = facts.usage.prompt_tokens if facts.usage else None
        if reported is not None and pending.tokens is not None and reported != pending.tokens:
            self.counts["token_drift"] += 1

    def _times(self, facts: ExchangeFacts) -> dict[str, object]:
        gaps = array("i", facts.chunk_delta_us)
        tokens = array("i", facts.chunk_tokens) if facts.chunk_tokens is not None else None
        times: dict[str, object] = {"itl_summary": itl_summary(gaps, tokens)}
        if self._chunk_times and gaps:
            times["chunk_delta_us"] = list(gaps)
            times["chunk_tokens"] = list(tokens) if tokens is not None else None
        return times

    def _leaves(
        self, pending: Pending, answer: Tokens | None, output: list[bytes], output_tail: bytes | None, facts: ExchangeFacts
    ) -> list[bytes]:
        """Names of the states that this exchange leaves its conversation in, see sessions.py."""
        named = [self._response(facts.response_id)] if facts.response_id is not None else []
        if pending.chat is not None:
            return named + chat_states(self._hasher, pending.chat, facts.text)
        if pending.rest is None:
            return named
        ends = []
        if answer is not None:
            ends.append((_last(pending, output), (len(pending.rest) + len(answer)) % BASE_BLOCK_TOKENS, output_tail))
            if output and output_tail is not None:
                ends.append((output[-1], 0, None))
        ends.append((_last(pending, []), len(pending.rest), pending.input_tail))
        for last, rest, _ in ends:
            self._tails.add(last, rest)
        return [tail or last for last, _, tail in ends]


def _answer_text(facts: ExchangeFacts) -> str:
    return "" if facts.is_truncated else facts.reasoning + facts.text + facts.tool_text


def _last(pending: Pending, output: list[bytes]) -> bytes:
    return (output or pending.input_hashes or [pending.root])[-1]


def _plain(body: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return body
    decode = decoder(encoding)
    if decode is None:
        raise ValueError("unknown encoding")
    return decode(body)


def _asked(body: RequestBody) -> dict[str, object]:
    return {
        "model": body.model[:_MODEL_CHARS] if body.model is not None else None,
        "stream": bool(body.stream),
        "max_tokens": _int32(body.output_limit),
        "n": _int32(body.n),
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": _int32(body.top_k),
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "seed_set": body.seed is not None,
        "tools_count": len(body.tools) if body.tools else None,
        "tool_choice": _tool_choice(body.tool_choice),
        "response_format": _response_format(body.response_format),
        "media": media_kinds(body.messages or []) or None,
    }


def _tool_choice(choice: Any) -> str | None:
    if choice is None:
        return None
    return choice if isinstance(choice, str) and choice in _TOOL_CHOICES else "named"


def _response_format(wanted: Any) -> str | None:
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    return kind if isinstance(kind, str) and kind in _RESPONSE_FORMATS else "other"


def _sizes(pending: Pending, facts: ExchangeFacts, answer: Tokens | None) -> dict[str, object]:
    usage = facts.usage
    sizes: dict[str, object] = {"bytes_in": facts.bytes_in, "bytes_out": facts.bytes_out}
    reported = _int32(usage.prompt_tokens) if usage else None
    local = pending.tokens
    sizes["input_tokens"] = reported if reported is not None else local
    sizes["input_tokens_count_source"] = _source(reported, local)
    if reported is not None and local is not None and reported != local:
        sizes["source_extra"] = msgspec.json.encode({LOCAL_INPUT_TOKENS: local}).decode()  # the drift can be studied later
    reported = _int32(usage.completion_tokens) if usage else None
    local = len(answer) if answer is not None else None
    sizes["output_tokens"] = reported if reported is not None else local
    sizes["output_tokens_count_source"] = _source(reported, local)
    sizes["cached_tokens"] = _int32(usage.cached_tokens) if usage else None
    sizes["cache_write_tokens"] = _int32(usage.cache_write_tokens) if usage else None
    sizes["reasoning_tokens"] = _int32(usage.reasoning_tokens) if usage else None
    return sizes


def _source(reported: int | None, local: int | None) -> str | None:
    if reported is not None:
        return "usage"
    return "tokenizer" if local is not None else None


def _result(facts: ExchangeFacts) -> dict[str, object]:
    reason = facts.finish_reason
    return {
        "dispatch_ns": facts.dispatch_ns,
        "ttft_ns": facts.ttft_ns,
        "end_ns": facts.end_ns,
        "client_abort_ns": facts.client_abort_ns,
        "http_status": facts.http_status,
        "error_kind": facts.error_kind,
        "finish_reason": reason if reason is None or _FINISH_REASON.fullmatch(reason) else "other",
        "tool_calls_out": facts.tool_calls or None,
    }


def itl_summary(gaps_us: Sequence[int], tokens: Sequence[int] | None) -> ItlSummary | None:
    """Gaps after the first chunk. Where token counts are known, the gap before a chunk of k tokens counts as k gaps of
    gap / k: its tokens were made in that time. Percentiles are nearest rank.
    """
    gaps = np.asarray(gaps_us, dtype=np.float64)[1:]
    if not len(gaps):
        return None
    if tokens is not None:
        counts = np.maximum(np.asarray(tokens, dtype=np.int64)[1:], 1)
        gaps = np.repeat(gaps / counts, counts)
    p50, p90, p99 = (float(value) for value in np.percentile(gaps, [50, 90, 99], method="inverted_cdf"))
    return ItlSummary(
        unit="chunk" if tokens is None else "token",
        count=len(gaps),
        mean_us=float(gaps.mean()),
        p50_us=p50,
        p90_us=p90,
        p99_us=p99,
        max_us=float(gaps.max()),
    )


def _int32(value: int | None) -> int | None:
    """Clients and servers send what they like; what no column can hold is absent."""
    return value if value is not None and -_INT32 <= value <= _INT32 else None
