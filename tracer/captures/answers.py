"""Captured answers to facts, by the state machine of live recording."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tracer.record.exchange import Exchange, ExchangeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a capture holds of a response. None: it does not say. `*_ns` count from the request's arrival."""

    status: int | None = None
    body: bytes | None = None
    content_type: str = ""
    encoding: str = ""
    bytes_in: int | None = None
    bytes_out: int | None = None
    dispatch_ns: int | None = None
    ttft_ns: int | None = None
    end_ns: int | None = None
    broken: str | None = None  # error kind of an exchange that was cut
    is_told: bool = False  # `body` was put together from a log: it need not look like a server's


def facts_of(endpoint: str, answer: Answer) -> ExchangeFacts:
    """A status that is none, and times before the arrival, count as unknown."""
    answer = replace(
        answer,
        status=answer.status if answer.status is not None and 100 <= answer.status <= 999 else None,
        dispatch_ns=_later(answer.dispatch_ns),
        ttft_ns=_later(answer.ttft_ns),
        end_ns=_later(answer.end_ns),
    )
    exchange = Exchange(0, endpoint)
    if answer.status is not None:
        exchange.answered(answer.status, answer.content_type, answer.encoding)
    elif answer.content_type:
        exchange.answered(200, answer.content_type, answer.encoding)
    if answer.body:
        exchange.received(0, answer.body)
    end_ns = answer.end_ns or 0
    facts = exchange.broke(end_ns, answer.broken) if answer.broken else exchange.ended(end_ns)
    return msgspec.structs.replace(
        facts,
        http_status=answer.status,
        error_kind=_error_kind(answer, facts.error_kind),
        dispatch_ns=answer.dispatch_ns,
        ttft_ns=answer.ttft_ns,
        end_ns=answer.end_ns,
        client_abort_ns=facts.client_abort_ns if answer.end_ns is not None else None,
        chunk_delta_us=b"",  # the bytes came at once here, whenever they came there
        chunk_tokens=None,
        bytes_in=answer.bytes_in,
        bytes_out=answer.bytes_out,
    )


def _later(ns: int | None) -> int | None:
    return ns if ns is not None and ns >= 0 else None


def _error_kind(answer: Answer, seen: str | None) -> str | None:
    """An answer that was not kept, or that a log tells in its own words, is no proof that the server's was bad."""
    is_told = (answer.is_told or answer.status is None) and seen in ("no_tokens", "bad_response")
    is_unseen = answer.body is None and (answer.status is None or answer.status < 400)
    return answer.broken if is_told or is_unseen else seen


def chat_body(message: Mapping[str, Any], finish_reason: Any = None, usage: Mapping[str, Any] | None = None) -> bytes:
    """An answer that a log holds in parts, as the server's body would have told it."""
    return _body({"message": message, "finish_reason": finish_reason}, usage)


def completion_body(text: str, finish_reason: Any = None, usage: Mapping[str, Any] | None = None, **more: Any) -> bytes:
    return _body({"text": text, "finish_reason": finish_reason, **more}, usage)


def _body(choice: dict[str, Any], usage: Mapping[str, Any] | None) -> bytes:
    if not isinstance(choice["finish_reason"], str):
        del choice["finish_reason"]
    return msgspec.json.encode({"choices": [choice], "usage": usage})


def usage_of(prompt: Any, completion: Any, cached: Any = None, reasoning: Any = None) -> dict[str, Any]:
    """Usage as OpenAI writes it; what is no count is left out."""
    usage: dict[str, Any] = {"prompt_tokens": _count(prompt), "completion_tokens": _count(completion)}
    if _count(cached) is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": _count(cached)}
    if _count(reasoning) is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": _count(reasoning)}
    return usage


def _count(value: Any) -> int | None:
    """Some logs keep counts as text or as floats."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 18:
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if type(value) is int and value >= 0 else None
