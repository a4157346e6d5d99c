"""OpenAI's Responses API (`/v1/responses`): bodies and stream events to facts. Never raises on what a server sent.

Events: https://platform.openai.com/docs/api-reference/responses-streaming. Usage stands in the last event, be it
`response.completed`, `.incomplete` or `.failed`, beside a copy of the whole answer that must not count again.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from tracer.wire.facts import ChunkFacts, Usage, error_text
from tracer.wire.openai import Details, RequestBody


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Details | None = None
    output_tokens_details: Details | None = None


class _Item(msgspec.Struct):
    type: str = ""
    name: str | None = None
    arguments: Any = None
    content: Any = None  # parts, in `message` and `reasoning`
    summary: Any = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    id: str | None = None
    status: str | None = None
    output: list[_Item] | None = None
    usage: _Usage | None = None
    incomplete_details: _Incomplete | None = None
    error: Any = None


class _Event(msgspec.Struct):
    type: str = ""
    delta: Any = None
    item: _Item | None = None
    response: _Response | None = None
    message: Any = None
    error: Any = None


class _Format(msgspec.Struct):
    format: Any = None


class _Request(msgspec.Struct):
    model: str | None = None
    instructions: Any = None
    input: Any = None
    tools: list[Any] | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: Any = None
    text: _Format | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None  # an id, or an object that has one


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_response = msgspec.json.Decoder(_Response).decode
_decode_request = msgspec.json.Decoder(_Request).decode
_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TEXT = ("response.output_text.delta", "response.refusal.delta")
_REASONING = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta", "response.reasoning.delta")
_ARGUMENTS = (
    "response.function_call_arguments.delta",
    "response.custom_tool_call_input.delta",
    "response.mcp_call_arguments.delta",
)
_LAST = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_CALLS = ("function_call", "custom_tool_call", "mcp_call")


def parse_chunk(data: bytes) -> ChunkFacts:
    """Facts of one stream event; its `type` stands in the payload too, so the SSE event name is not needed."""
    if data.strip() == b"[DONE]":  # not in the API, but some servers end every stream so
        return ChunkFacts(is_done=True)
    try:
        raw = _decode_event(data)
    except _FAULTS:
        return ChunkFacts(is_parsed=False)
    delta = raw.delta if isinstance(raw.delta, str) else ""
    if raw.type in _TEXT:
        return ChunkFacts(text=delta)
    if raw.type in _REASONING:
        return ChunkFacts(reasoning=delta)
    if raw.type in _ARGUMENTS:
        return ChunkFacts(tool_text=delta)
    if raw.type == "response.output_item.added" and raw.item is not None and raw.item.type in _CALLS:
        return ChunkFacts(tool_calls=1, tool_text=raw.item.name or "")
    if raw.type in _LAST and raw.response is not None:
        return _result(raw.response)
    if raw.type == "error" or (not raw.type and raw.error is not None):
        return ChunkFacts(error=error_text(raw.error if raw.error is not None else raw.message))
    return ChunkFacts()


def parse_chunks(payloads: list[bytes]) -> list[ChunkFacts]:
    return [parse_chunk(one) for one in payloads]


def parse_response(body: bytes) -> ChunkFacts:
    """Facts of a whole JSON body. What is no such body has `is_parsed` False."""
    try:
        raw = _decode_response(body)
    except _FAULTS:
        return ChunkFacts(is_parsed=False)
    items = raw.output or []
    calls = [item for item in items if item.type in _CALLS]
    return msgspec.structs.replace(
        _result(raw),
        text="".join(_text(item.content) for item in items if item.type == "message"),
        reasoning="".join(_text(item.content) or _text(item.summary) for item in items if item.type == "reasoning"),
        tool_calls=len(calls),
        tool_text="".join((call.name or "") + _argument_text(call.arguments) for call in calls),
    )


def parse_request(body: bytes) -> RequestBody:
    """As the chat request it amounts to: instructions first, then a message per input item. Raises msgspec.DecodeError."""
    raw = _decode_request(body)
    messages: list[dict[str, Any]] = []
    if raw.instructions:
        messages.append({"role": "system", "content": raw.instructions})
    messages += [{"role": "user", "content": raw.input}] if isinstance(raw.input, str) else _messages(raw.input)
    return RequestBody(
        model=raw.model,
        messages=messages,
        tools=raw.tools,
        stream=raw.stream,
        max_tokens=raw.max_output_tokens,
        temperature=raw.temperature,
        top_p=raw.top_p,
        tool_choice=raw.tool_choice,
        response_format=raw.text.format if raw.text is not None else None,
        user=raw.user or raw.safety_identifier,
        prompt_cache_key=raw.prompt_cache_key,
        cache_salt=raw.cache_salt,
        previous_response_id=raw.previous_response_id,
        conversation=_conversation(raw.conversation),
    )


def _conversation(given: Any) -> str | None:
    found = given.get("id") if isinstance(given, dict) else given
    return found if isinstance(found, str) else None


def _messages(items: Any) -> Iterator[dict[str, Any]]:
    """Ids and states of items are left out: they differ each time and are no part of what the model sees."""
    for item in items if isinstance(items, list) else []:
        if not isinstance(item, dict):
            continue
        kind = item.get("type", "message")
        if kind in _CALLS:
            call = {"function": {"name": item.get("name"), "arguments": item.get("arguments", item.get("input"))}}
            yield {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind in ("function_call_output", "custom_tool_call_output"):
            yield {"role": "tool", "content": item.get("output")}
        elif kind == "reasoning":
            yield {"role": "assistant", "content": item.get("content") or item.get("summary")}
        else:
            yield {"role": item.get("role", kind), "content": item.get("content", item if kind != "message" else None)}


def _result(response: _Response) -> ChunkFacts:
    """Without the answer itself, which a stream's last event repeats."""
    reason = "stop" if response.status == "completed" else None
    if response.incomplete_details is not None:
        reason = response.incomplete_details.reason
    return ChunkFacts(
        finish_reason=reason,
        usage=_usage(response.usage),
        error=error_text(response.error) if response.error is not None else None,
        response_id=response.id,
        is_done=True,
    )


def _usage(raw: _Usage | None) -> Usage | None:
    if raw is None:
        return None
    prompt, completion = raw.input_tokens_details, raw.output_tokens_details
    return Usage(
        prompt_tokens=raw.input_tokens,
        completion_tokens=raw.output_tokens,
        cached_tokens=prompt.cached_tokens if prompt else None,
        reasoning_tokens=completion.reasoning_tokens if completion else None,
    )


def _text(parts: Any) -> str:
    if not isinstance(parts, list):
        return parts if isinstance(parts, str) else ""
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in parts if isinstance(part, dict))


def _argument_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else ""
