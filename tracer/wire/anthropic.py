"""Anthropic's Messages API (`/v1/messages`): bodies and stream events to facts. Never raises on what a server sent.

Events: https://docs.anthropic.com/en/api/messages-streaming. `usage.input_tokens` leaves out cached tokens, so a prompt is
the sum of three counts; counts in `message_delta` are cumulative, not additions to those in `message_start`.
"""

from typing import Any

import msgspec

from tracer.wire.facts import ChunkFacts, Usage, error_text
from tracer.wire.openai import RequestBody


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None


class _Block(msgspec.Struct):
    type: str = ""
    text: str | None = None
    thinking: str | None = None
    name: str | None = None
    input: Any = None
    partial_json: str | None = None
    stop_reason: str | None = None  # in the delta of `message_delta`


class _Message(msgspec.Struct):
    content: list[_Block] | None = None
    stop_reason: str | None = None
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str = ""
    message: Any = None  # an object in `message_start`; some servers put an error's text here
    content_block: _Block | None = None
    delta: _Block | None = None
    usage: _Usage | None = None
    content: list[_Block] | None = None  # of a whole body
    stop_reason: str | None = None
    error: Any = None


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _Request(msgspec.Struct):
    model: str | None = None
    system: Any = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Any = None
    tool_choice: Any = None
    metadata: _Metadata | None = None
    cache_salt: str | None = None  # vLLM's


_decode = msgspec.json.Decoder(_Event).decode
_decode_request = msgspec.json.Decoder(_Request).decode
_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TOOL_BLOCKS = ("tool_use", "server_tool_use", "mcp_tool_use")
_TOOL_CHOICES = {"any": "required"}  # the others are called alike in both APIs


def parse_chunk(data: bytes) -> ChunkFacts:
    """Facts of one stream event; its `type` stands in the payload too, so the SSE event name is not needed."""
    try:
        raw = _decode(data)
    except _FAULTS:
        return ChunkFacts(is_parsed=False)
    match raw.type:
        case "content_block_delta" if raw.delta is not None:
            delta = raw.delta
            return ChunkFacts(text=delta.text or "", reasoning=delta.thinking or "", tool_text=delta.partial_json or "")
        case "content_block_start" if raw.content_block is not None:
            return _blocks([raw.content_block], ChunkFacts())
        case "message_start":
            return _started(raw.message)
        case "message_delta":
            reason = raw.delta.stop_reason if raw.delta is not None else None
            return ChunkFacts(finish_reason=reason, usage=_usage(raw.usage))
        case "message_stop":
            return ChunkFacts(is_done=True)
        case "error":
            return ChunkFacts(error=error_text(raw.error))
    return ChunkFacts()


def parse_chunks(payloads: list[bytes]) -> list[ChunkFacts]:
    return [parse_chunk(one) for one in payloads]


def parse_response(body: bytes) -> ChunkFacts:
    """Facts of a whole JSON body. What is no such body has `is_parsed` False."""
    try:
        raw = _decode(body)
    except _FAULTS:
        return ChunkFacts(is_parsed=False)
    if raw.error is not None or raw.type == "error":
        return ChunkFacts(error=error_text(raw.error))
    return _blocks(raw.content or [], ChunkFacts(finish_reason=raw.stop_reason, usage=_usage(raw.usage)))


def parse_request(body: bytes) -> RequestBody:
    """As the chat request it amounts to: the system prompt becomes the first message. Raises msgspec.DecodeError."""
    raw = _decode_request(body)
    messages = raw.messages or []
    if raw.system:
        messages = [{"role": "system", "content": raw.system}, *messages]
    return RequestBody(
        model=raw.model,
        messages=messages,
        tools=raw.tools,
        stream=raw.stream,
        max_tokens=raw.max_tokens,
        temperature=raw.temperature,
        top_p=raw.top_p,
        top_k=raw.top_k,
        stop=raw.stop_sequences,
        tool_choice=_tool_choice(raw.tool_choice),
        user=raw.metadata.user_id if raw.metadata is not None else None,
        cache_salt=raw.cache_salt,
    )


def _started(message: Any) -> ChunkFacts:
    try:
        return ChunkFacts(usage=_usage(msgspec.convert(message, _Message).usage))
    except msgspec.ValidationError:
        return ChunkFacts(is_parsed=False)


def _blocks(blocks: list[_Block], facts: ChunkFacts) -> ChunkFacts:
    """`facts` with what content blocks hold. A block's start in a stream is empty but for a tool's name."""
    calls = [block for block in blocks if block.type in _TOOL_BLOCKS]
    return msgspec.structs.replace(
        facts,
        text="".join(block.text or "" for block in blocks),
        reasoning="".join(block.thinking or "" for block in blocks),
        tool_calls=len(calls),
        tool_text="".join((call.name or "") + _arguments(call.input) for call in calls),
    )


def _arguments(given: Any) -> str:
    """Empty for the start of a streamed call, whose arguments come in pieces."""
    return msgspec.json.encode(given).decode() if given else ""


def _usage(raw: _Usage | None) -> Usage | None:
    if raw is None:
        return None
    prompt = None
    if raw.input_tokens is not None:
        prompt = raw.input_tokens + (raw.cache_read_input_tokens or 0) + (raw.cache_creation_input_tokens or 0)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=raw.output_tokens,
        cached_tokens=raw.cache_read_input_tokens,
        cache_write_tokens=raw.cache_creation_input_tokens,
    )


def _tool_choice(choice: Any) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return _TOOL_CHOICES.get(kind, kind) if isinstance(kind, str) else kind
