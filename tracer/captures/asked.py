"""Requests that a log holds in parts, as the client's body would have told them."""

from collections.abc import Mapping
from typing import Any

import msgspec

_COUNTS = ("max_tokens", "max_completion_tokens", "n", "top_k", "seed")
_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_TEXTS = ("user", "prompt_cache_key", "cache_salt")
_AS_THEY_ARE = ("tool_choice", "response_format")
_TRUTH = {"true": True, "True": True, "false": False, "False": False}


def body_of(model: Any, parameters: Mapping[str, Any], **parts: Any) -> bytes:
    """`parts`: messages, prompt, ... Parameters that are none of an API are left out; loggers write some of them as text."""
    body: dict[str, Any] = {"model": model} if isinstance(model, str) else {}
    for name in _COUNTS:
        body[name] = _whole(_number(parameters.get(name)))
    for name in _NUMBERS:
        body[name] = _number(parameters.get(name))
    for name in _TEXTS:
        body[name] = parameters[name] if isinstance(parameters.get(name), str) else None
    for name in _AS_THEY_ARE:
        body[name] = parameters.get(name)
    body["tools"] = parameters["tools"] if isinstance(parameters.get("tools"), list) else None
    body["stream"] = truth(parameters.get("stream"))
    body |= parts
    return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


def messages_in(value: Any) -> list[dict[str, Any]] | None:
    """Messages of a chat, if it is that and nothing else."""
    if isinstance(value, dict) and "role" in value:
        value = [value]
    is_chat = isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value)
    return value if is_chat else None


def first_of(entry: Mapping[str, Any], *names: str) -> Any:
    """The first value that is there; None and empty text count as absent."""
    return next((entry[name] for name in names if entry.get(name) not in (None, "")), None)


def unpacked(value: Any) -> Any:
    """A JSON object or array that was logged as text; all else as it is."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def mapping(value: Any) -> dict[str, Any]:
    value = unpacked(value)
    return value if isinstance(value, dict) else {}


def truth(value: Any) -> bool | None:
    return _TRUTH.get(value) if isinstance(value, str) else value if isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
    return value if is_number else None


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and value == int(value) else None
