"""One request through the proxy as a state machine: time stamps and bytes in, facts out. Pure, bounded memory.

All `*_ns` facts count from the arrival of the request head. Text in the facts goes to the worker's memory, never to disk.
"""

import zlib
from array import array
from collections.abc import Callable

import msgspec

from tracer.wire import APIS, CHAT
from tracer.wire.facts import ChunkFacts, StreamFacts, Usage
from tracer.wire.sse import SseParser

MAX_EVENT_BYTES = 4 << 20
MAX_BODY_BYTES = 16 << 20  # of an answer that is not streamed
MAX_ANSWER_BYTES = 8 << 20  # of a streamed one, decoded
MAX_CHUNKS = 1 << 18
_MAX_US = 2**31 - 1

Decoder = Callable[[bytes], bytes]


class ExchangeFacts(msgspec.Struct, kw_only=True, omit_defaults=True):
    dispatch_ns: int | None = None
    ttft_ns: int | None = None  # None for an answer that is not streamed: its first token cannot be seen
    end_ns: int | None = None
    client_abort_ns: int | None = None
    http_status: int | None = None
    error_kind: str | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    tool_calls: int = 0
    text: str = ""
    reasoning: str = ""
    tool_text: str = ""
    token_ids: list[int] | None = None  # only if every token came with its id
    prompt_token_ids: list[int] | None = None
    response_id: str | None = None  # a later request may name it to continue
    chunk_delta_us: bytes = b""  # int32 each: gap before each token-bearing chunk, the first since arrival
    chunk_tokens: bytes | None = None  # int32 each; None where the server does not say
    bytes_in: int | None = None
    bytes_out: int | None = 0  # None: a capture does not tell
    is_truncated: bool = False  # a bound above was hit: the answer's text or chunk times are not whole


class Exchange:
    """Call `answered`, `received`... in their order and `dispatched` at any time, then `ended` or `broke` once."""

    def __init__(self, arrival_ns: int, endpoint: str = CHAT) -> None:
        self._arrival_ns = arrival_ns
        self._api = APIS[endpoint]
        self._facts = ExchangeFacts()
        self._answer = StreamFacts()
        self._parser: SseParser | None = None
        self._body: list[bytes] = []
        self._decode: Decoder | None = None
        self._bytes_out = 0  # as they came
        self._answer_bytes = 0  # decoded
        self._bad_encoding = False
        self._deltas_us = array("i")
        self._tokens = array("i")
        self._counts_tokens = True
        self._tokens_seen = 0
        self._last_ns = arrival_ns

    def dispatched(self, now_ns: int, body_bytes: int) -> None:
        """The request's body is in and goes to the server."""
        self._facts.dispatch_ns = now_ns - self._arrival_ns
        self._facts.bytes_in = body_bytes

    def answered(self, status: int, content_type: str = "", content_encoding: str = "") -> None:
        """The response's head is in."""
        self.told(status)
        if "event-stream" in content_type:
            self._parser = SseParser(max_event_bytes=MAX_EVENT_BYTES)
        if content_encoding not in ("", "identity"):
            self._decode = decoder(content_encoding)
            self._bad_encoding = self._decode is None

    def told(self, status: int) -> None:
        """The client has this status, from the server or in its place."""
        self._facts.http_status = status

    def received(self, now_ns: int, data: bytes) -> None:
        """Some bytes of the response's body, as they came."""
        self._bytes_out += len(data)
        if self._bad_encoding:
            return
        if self._decode is not None:
            try:
                data = self._decode(data)
            except Exception:  # each codec has its own error class; forwarding goes on, only our copy is lost
                self._bad_encoding = True
                return
        if self._parser is not None:
            for event in self._parser.feed(data):
                self._event(now_ns, self._api.parse_chunk(event.data))
        elif self._fits(len(data), MAX_BODY_BYTES):
            self._body.append(data)

    @property
    def bytes_out(self) -> int:
        """Received so far."""
        return self._bytes_out

    def lost_pieces(self, bytes_out: int) -> None:
        """Of the `bytes_out` bytes that went by, some never came here: the rest is no answer, and its times say nothing."""
        whole = self._answer
        self._answer = StreamFacts(usage=whole.usage, finish_reason=whole.finish_reason, error=whole.error)
        self._parser, self._body, self._facts.ttft_ns = None, [], None
        self._deltas_us, self._tokens = array("i"), array("i")
        self._facts.is_truncated, self._bytes_out = True, bytes_out

    def ended(self, now_ns: int) -> ExchangeFacts:
        """The response is complete."""
        return self._finish(now_ns, None)

    def broke(self, now_ns: int, kind: str) -> ExchangeFacts:
        """It will never be complete: `connect`, `connection_lost`, `client_abort`, ..."""
        if kind == "client_abort":
            self._facts.client_abort_ns = now_ns - self._arrival_ns
        return self._finish(now_ns, kind)

    def _fits(self, size: int, limit: int) -> bool:
        self._answer_bytes += size
        if self._answer_bytes > limit:
            self._facts.is_truncated = True
        return self._answer_bytes <= limit

    def _event(self, now_ns: int, chunk: ChunkFacts) -> None:
        if chunk.has_token:
            self._token_chunk(now_ns, chunk)
            size = len(chunk.text) + len(chunk.reasoning) + len(chunk.tool_text) + 8 * len(chunk.token_ids or ())
            if not self._fits(size, MAX_ANSWER_BYTES):
                chunk = ChunkFacts(finish_reason=chunk.finish_reason, usage=chunk.usage)
        self._answer.add(chunk)

    def _token_chunk(self, now_ns: int, chunk: ChunkFacts) -> None:
        if self._facts.ttft_ns is None:
            self._facts.ttft_ns = now_ns - self._arrival_ns
        if len(self._deltas_us) >= MAX_CHUNKS:
            self._facts.is_truncated = True
            return
        self._deltas_us.append(min((now_ns - self._last_ns) // 1000, _MAX_US))
        self._last_ns = now_ns
        count = self._count_tokens(chunk)
        if count is None:
            self._counts_tokens = False
        elif self._counts_tokens:
            self._tokens.append(count)
            self._tokens_seen += count

    def _count_tokens(self, chunk: ChunkFacts) -> int | None:
        """By the ids, or by how far the running usage moved (which spans all choices of a request)."""
        if chunk.token_ids is not None:
            return len(chunk.token_ids)
        if chunk.usage is None or chunk.usage.completion_tokens is None:
            return None
        return min(max(chunk.usage.completion_tokens - self._tokens_seen, 0), _MAX_US)

    def _finish(self, now_ns: int, broken: str | None) -> ExchangeFacts:
        facts, answer = self._facts, self._answer
        facts.end_ns, facts.bytes_out = now_ns - self._arrival_ns, self._bytes_out
        is_whole_json = True
        if self._parser is not None:
            for event in self._parser.finish():
                self._event(now_ns, self._api.parse_chunk(event.data))
            facts.is_truncated |= self._parser.events_dropped > 0
        elif self._body and not facts.is_truncated:
            whole = self._api.parse_response(b"".join(self._body))
            is_whole_json = whole.is_parsed
            answer.add(whole)
        facts.is_truncated |= self._bad_encoding
        facts.error_kind = broken or self._fault(is_whole_json)
        facts.finish_reason, facts.usage, facts.tool_calls = answer.finish_reason, answer.usage, answer.tool_calls
        facts.text, facts.reasoning = "".join(answer.text), "".join(answer.reasoning)
        facts.tool_text = "".join(answer.tool_text)
        has_all_ids = answer.has_all_token_ids and not facts.is_truncated
        facts.token_ids = answer.token_ids if answer.token_ids and has_all_ids else None
        facts.prompt_token_ids, facts.response_id = answer.prompt_token_ids, answer.response_id
        facts.chunk_delta_us = self._deltas_us.tobytes()
        if self._counts_tokens and self._tokens:
            facts.chunk_tokens = self._tokens.tobytes()
        return facts

    def _fault(self, is_whole_json: bool) -> str | None:
        """What is wrong with a response that came to its end."""
        facts, answer = self._facts, self._answer
        if facts.http_status is not None and facts.http_status >= 400:
            return "http_status"
        if answer.error is not None:
            return "stream_error"
        if facts.is_truncated:
            return None
        if not is_whole_json:
            return "bad_response"
        if answer.is_done or answer.finish_reason is not None:
            return None
        return "connection_lost" if facts.ttft_ns is not None else "no_tokens"


def decoder(encoding: str) -> Decoder | None:
    """Incremental decoder of one Content-Encoding, or None for one that we do not know."""
    match encoding.strip().lower():
        case "gzip" | "x-gzip":
            return zlib.decompressobj(31).decompress
        case "deflate":
            return zlib.decompressobj().decompress
        case "br":
            import brotli  # type: ignore[import-untyped, unused-ignore]  # comes with mitmproxy

            return brotli.Decompressor().process  # type: ignore[no-any-return, unused-ignore]
        case "zstd":
            import zstandard

            return zstandard.ZstdDecompressor().decompressobj().decompress
    return None
