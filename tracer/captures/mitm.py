"""mitmproxy flow dumps: one tnetstring per flow, https://docs.mitmproxy.org/stable/overview/features/#saving-and-replaying

Flows of a proxy that streams have no content unless it ran with `store_streamed_bodies`.
"""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from tracer.captures import Captured, Reject, Rejected
from tracer.captures.answers import Answer, facts_of
from tracer.captures.headers import credential_of, has_secrets, lower_cased, session_of
from tracer.captures.stamps import MAX_NS
from tracer.record.exchange import ExchangeFacts
from tracer.wire import endpoint_of

NAME = "mitm"
MAX_FLOW_BYTES = 512 << 20
_HEAD = re.compile(rb"\d{1,12}:\d{1,4}:")  # of the flow, of its first key


class BadNetstring(ValueError):
    """Cut short, or not one at all."""


def looks_like(head: bytes) -> bool:
    return _HEAD.match(head) is not None


def read(file: BinaryIO, reject: Reject) -> Iterator[Captured]:
    number = 0
    while True:
        number += 1
        try:
            flow = _next(file)
        except (BadNetstring, RecursionError):
            reject(Rejected(f"flow {number}", "cut or damaged here; what follows cannot be read", "torn_captures"))
            return
        if flow is None:
            return
        try:
            captured = _captured(flow, reject, f"flow {number}")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            reject(Rejected(f"flow {number}", "not a flow that can be read"))
            continue
        if captured is not None:
            yield captured


def _captured(flow: dict[str, Any], reject: Reject, place: str) -> Captured | None:
    request: dict[str, Any] = flow.get("request") or {}  # other protocols have none
    response = flow.get("response")
    endpoint = endpoint_of(_text(request["path"])) if request and _text(request["method"]) == "POST" else None
    if endpoint is None:
        reject(Rejected(place, "not an endpoint that is recorded", "passed_through", is_fault=False))
        return None
    headers = _headers(request)
    if request["content"] is None:
        reject(Rejected(place, "the capture does not hold its request body", "requests_not_stored", is_fault=False))
    elif response and response["content"] is None:
        reject(Rejected(place, "the capture does not hold its answer", "answers_not_stored", is_fault=False))
    arrival_ns = _ns(request["timestamp_start"])
    return Captured(
        arrival_ns=arrival_ns,
        endpoint=endpoint,
        body=request["content"] or b"",
        encoding=headers.get("content-encoding", ""),
        facts=_facts(endpoint, flow, arrival_ns),
        credential=credential_of(headers),
        has_secrets=has_secrets(headers),
        session=session_of(headers),
        upstream=f"{_text(request['host'])}:{int(request['port'])}",
    )


def _facts(endpoint: str, flow: dict[str, Any], arrival_ns: int) -> ExchangeFacts:
    request, response = flow["request"], flow.get("response")
    sent_ns, content = request.get("timestamp_end"), request["content"]
    answer = Answer(
        bytes_in=len(content) if content is not None else None,
        dispatch_ns=_ns(sent_ns) - arrival_ns if sent_ns is not None else None,
        **(_response(response, arrival_ns) if response else {}),
        **(_break(flow, arrival_ns) if flow.get("error") or not response else {}),
    )
    return facts_of(endpoint, answer)


def _response(response: dict[str, Any], arrival_ns: int) -> dict[str, Any]:
    headers, content, end = _headers(response), response["content"], response.get("timestamp_end")
    return {
        "status": int(response["status_code"]),
        "body": content,
        "content_type": headers.get("content-type", ""),
        "encoding": headers.get("content-encoding", ""),
        "bytes_out": len(content) if content is not None else None,
        **({"end_ns": _ns(end) - arrival_ns} if end is not None else {}),
    }


def _break(flow: dict[str, Any], arrival_ns: int) -> dict[str, Any]:
    """The kinds of live recording, see record/addon.py."""
    error = flow.get("error")
    if not error:
        return {"broken": "recorder_stopped"}  # dumped while it was under way
    at: dict[str, Any] = {}
    if not (flow.get("response") and flow["response"].get("timestamp_end") is not None):
        at["end_ns"] = _ns(error["timestamp"]) - arrival_ns
    if "Client disconnected" in _text(error["msg"]):
        return {"broken": "client_abort", **at}
    if flow.get("response"):
        return {"broken": "connection_lost", **at}
    has_connected = (flow.get("server_conn") or {}).get("timestamp_tcp_setup") is not None
    return {"broken": "connection_lost" if has_connected else "connect", "status": 502, **at}


def _headers(message: dict[str, Any]) -> dict[str, str]:
    return lower_cased((_text(name), _text(value)) for name, value in message["headers"])


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _ns(stamp_s: float) -> int:
    """A double of today's seconds is good for a quarter of a microsecond."""
    ns = round(stamp_s * 1e6) * 1000
    if not 0 <= ns < MAX_NS:
        raise ValueError("time stamp out of range")
    return ns


def _next(file: BinaryIO) -> dict[str, Any] | None:
    """The next flow; None at the end of the file."""
    size = b""
    while (one := file.read(1)).isdigit() and len(size) < 12:
        size += one
    if not size and not one:
        return None
    if one != b":" or not size or int(size) > MAX_FLOW_BYTES:
        raise BadNetstring
    data = file.read(int(size) + 1)
    if len(data) != int(size) + 1:
        raise BadNetstring
    value = _value(data[-1:], data, 0, int(size))
    if not isinstance(value, dict):
        raise BadNetstring
    return value


def _value(kind: bytes, data: bytes, start: int, end: int) -> Any:
    match kind:
        case b",":
            return data[start:end]
        case b"]":
            return list(_items(data, start, end))
        case b"}":
            items = list(_items(data, start, end))
            if len(items) % 2 or any(isinstance(name, list | dict) for name in items[::2]):
                raise BadNetstring
            return {_text(name): value for name, value in zip(items[::2], items[1::2], strict=True)}
    text = data[start:end]
    try:
        match kind:
            case b";":
                return text.decode("utf-8", "surrogateescape")
            case b"#":
                return int(text)
            case b"^":
                return float(text)
    except ValueError:
        raise BadNetstring from None
    if kind == b"~" and not text:
        return None
    if kind == b"!" and text in (b"true", b"false"):
        return text == b"true"
    raise BadNetstring


def _items(data: bytes, at: int, end: int) -> Iterator[Any]:
    while at < end:
        colon = data.find(b":", at, min(end, at + 13))
        if colon < 0 or not data[at:colon].isdigit():
            raise BadNetstring
        stop = colon + 1 + int(data[at:colon])
        if stop >= end:
            raise BadNetstring
        yield _value(data[stop : stop + 1], data, colon + 1, stop)
        at = stop + 1
