"""Messages as OpenTelemetry's conventions hold them, to messages as the API had them."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

MAX_INDEXED = 100_000  # attributes of one span


def messages_of(value: Any) -> list[dict[str, Any]]:
    """From [{"role": ..., "parts": [...]}, ...], or messages with `content`; empty where it is neither."""
    if not isinstance(value, list):
        return []
    return [message for one in value if isinstance(one, dict) and "role" in one for message in _messages(one)]


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _messages(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message whose parts are answers of several tools was one message each."""
    parts = one.get("parts")
    if not isinstance(parts, list):
        if one.get("content") is not None or one.get("tool_calls"):
            yield {name: one[name] for name in ("role", "content", "tool_calls", "finish_reason") if one.get(name) is not None}
        return
    texts, reasoning, calls = [], [], []
    for part in parts:
        match part:
            case {"type": "text", "content": str(text)}:
                texts.append(text)
            case {"type": "reasoning", "content": str(text)}:
                reasoning.append(text)
            case {"type": "tool_call"}:
                calls.append(_call(part))
            case {"type": "tool_call_response"}:
                answer = part.get("response", part.get("result"))
                yield {"role": "tool", "tool_call_id": part.get("id"), "content": _as_text(answer)}
    if texts or reasoning or calls:
        message: dict[str, Any] = {"role": one["role"], "content": "".join(texts) if texts else None}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning_content"] = "".join(reasoning)
        if isinstance(one.get("finish_reason"), str):
            message["finish_reason"] = one["finish_reason"]
        yield message


def _call(part: Mapping[str, Any]) -> dict[str, Any]:
    name = part.get("name")
    function = {"name": name if isinstance(name, str) else "", "arguments": _as_text(part.get("arguments"))}
    return {"id": str(part.get("id", "")), "type": "function", "function": function}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode() if value is not None else ""


def indexed(found: Mapping[str, Any], prefix: str, infix: str) -> list[dict[str, Any]]:
    """From attributes PREFIX.0.INFIXrole, PREFIX.0.INFIXcontent, PREFIX.1...., as OpenLLMetry and OpenInference write them."""
    messages = []
    for number in range(MAX_INDEXED):
        at = f"{prefix}.{number}.{infix}"
        message = {name: found[at + name] for name in ("role", "content", "finish_reason") if at + name in found}
        if not message:
            break
        messages.append(message)
    return messages
