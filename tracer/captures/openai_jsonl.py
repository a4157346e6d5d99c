"""JSON lines of plain request logs: an OpenAI-style request body with a time stamp among its fields, or
{"timestamp": ..., "request" or "body": {...}, "response": {...}}, also with `url`, `status`, `duration_ms`, `session_id`.

The response is a body, or {"status_code": ..., "body": ...} as in OpenAI's batch files; text that holds SSE is taken as such.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from tracer.captures import Captured, Reject, Rejected
from tracer.captures.answers import Answer, facts_of
from tracer.captures.documents import values
from tracer.captures.stamps import BadStamp, duration_ns, since, stamp_in
from tracer.wire import CHAT, COMPLETIONS, RESPONSES, endpoint_of

NAME = "openai_jsonl"
_END_NAMES = ("end_timestamp", "end_time", "endTime", "finished_at", "completed_at")


def looks_like(head: bytes) -> bool:
    head = head.lstrip(b"\xef\xbb\xbf \t\r\n[")
    return head.startswith(b"{") and any(
        b'"%s"' % name in head for name in (b"messages", b"prompt", b"body", b"request", b"input")
    )


def read(file: BinaryIO, reject: Reject) -> Iterator[Captured]:
    for place, entry in values(file, reject):
        try:
            captured = captured_of(entry)
        except BadStamp as error:
            reject(Rejected(place, str(error)))
            continue
        if captured is None:
            reject(Rejected(place, "no request of a known API in it"))
        else:
            yield captured


def captured_of(entry: dict[str, Any]) -> Captured | None:
    """Raises BadStamp. None where no request of a known API is found."""
    request = as_object(entry.get("request", entry.get("body", entry)))
    if request is not None and isinstance(request.get("body"), dict | str):  # {"request": {"url": ..., "body": ...}}
        entry = {**request, **entry}
        request = as_object(request["body"])
    endpoint = endpoint_in(entry, request) if request is not None else None
    if request is None or endpoint is None:
        return None
    arrival_ns = stamp_in(entry if _has_stamp(entry) else request)
    session = entry.get("session_id")
    return Captured(
        arrival_ns=arrival_ns,
        endpoint=endpoint,
        body=msgspec.json.encode(request),
        facts=facts_of(endpoint, _answer(entry, arrival_ns)),
        session=str(session).encode() if isinstance(session, str | int) and session != "" else b"",
    )


def endpoint_in(entry: dict[str, Any], request: dict[str, Any]) -> str | None:
    """By the path that the log tells, else by what only one API has."""
    for name in ("endpoint", "url", "path"):
        if isinstance(entry.get(name), str):
            return endpoint_of(entry[name])
    if isinstance(request.get("messages"), list):
        return CHAT
    if request.get("prompt") is not None:
        return COMPLETIONS
    return RESPONSES if "input" in request and "model" in request else None


def as_object(value: Any) -> dict[str, Any] | None:
    """A JSON object, also one that was logged as text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def response_bytes(response: Any) -> tuple[bytes | None, str]:
    """(body, content type)."""
    if isinstance(response, str) and response:
        is_sse = response.lstrip().startswith(("data:", "event:", ":"))
        return response.encode("utf-8", "surrogatepass"), "text/event-stream" if is_sse else ""
    return (msgspec.json.encode(response), "") if isinstance(response, dict) else (None, "")


def _has_stamp(entry: dict[str, Any]) -> bool:
    try:
        stamp_in(entry)
    except BadStamp:
        return False
    return True


def _answer(entry: dict[str, Any], arrival_ns: int) -> Answer:
    response, status = entry.get("response"), entry.get("status_code", entry.get("status"))
    if isinstance(response, dict) and "body" in response:
        status = response.get("status_code", response.get("status", status))
        response = response["body"]
    body, content_type = response_bytes(response)
    end_ns = duration_ns(entry)
    if end_ns is None:
        end_ns = next((found for name in _END_NAMES if (found := since(arrival_ns, entry.get(name))) is not None), None)
    return Answer(status=status_of(status), body=body, content_type=content_type, end_ns=end_ns)


def status_of(value: Any) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) == 3:
        value = int(value)
    return value if type(value) is int and 100 <= value <= 599 else None
