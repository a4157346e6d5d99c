"""GoReplay files (.gor): raw HTTP messages between separators, https://github.com/buger/goreplay/wiki/Capturing-and-replaying-traffic

    TYPE ID START_NS DURATION_NS LF raw HTTP message LF separator LF         type 1: request, 2: response, 3: replayed response

Responses are there only if it ran with --input-raw-track-response.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from tracer.captures import Captured, Reject, Rejected
from tracer.captures.answers import Answer, facts_of
from tracer.captures.headers import credential_of, has_secrets, lower_cased, session_of
from tracer.captures.stamps import MAX_NS
from tracer.wire import endpoint_of

NAME = "goreplay"
MAX_WAITING = 10_000  # requests whose response may yet come
_SEPARATOR = "\n🐵🙈🙉\n".encode()
_READ_BYTES = 1 << 20
_MAX_RECORD_BYTES = 512 << 20
_META = re.compile(rb"([123]) ([0-9a-zA-Z]{1,64}) (\d{1,19})(?: (-?\d{1,19}))?\r?")
_START = re.compile(rb"(?:([A-Z]{1,20}) ([^ ]+) HTTP/1\.[01]|HTTP/1\.[01] (\d{3})[^\r\n]*)")


@dataclass(frozen=True, slots=True)
class _Message:
    method: bytes | None
    path: str
    status: int | None
    headers: dict[str, str]
    body: bytes
    is_whole: bool
    start_ns: int
    took_ns: int | None  # None: an old release that tells none of requests


def looks_like(head: bytes) -> bool:
    first, _, rest = head.partition(b"\n")
    return _META.fullmatch(first) is not None and _START.match(rest) is not None


def read(file: BinaryIO, reject: Reject) -> Iterator[Captured]:
    waiting: dict[bytes, tuple[str, _Message]] = {}
    for number, record in enumerate(_records(file), 1):
        place = f"record {number}"
        if not record.strip():
            continue
        meta, _, raw = record.lstrip(b"\n").partition(b"\n")
        found = _META.fullmatch(meta)
        message = _message(raw, found) if found else None
        if found is None or message is None:
            reject(Rejected(place, "not a GoReplay record that can be read, or cut off"))
        elif found[1] == b"1":
            endpoint = endpoint_of(message.path) if message.method == b"POST" else None
            if endpoint is None:
                reject(Rejected(place, "not an endpoint that is recorded", "passed_through", is_fault=False))
                continue
            waiting[found[2]] = endpoint, message
            if len(waiting) > MAX_WAITING:
                yield _unanswered(*waiting.pop(next(iter(waiting))), reject, place)
        elif found[1] == b"2" and found[2] in waiting:
            yield _captured(*waiting.pop(found[2]), message)
    for endpoint, request in waiting.values():
        yield _unanswered(endpoint, request, reject, "end")


def _unanswered(endpoint: str, request: _Message, reject: Reject, place: str) -> Captured:
    reject(Rejected(place, "the capture does not hold its answer", "answers_not_stored", is_fault=False))
    return _captured(endpoint, request, None)


def _captured(endpoint: str, request: _Message, response: _Message | None) -> Captured:
    return Captured(
        arrival_ns=request.start_ns,
        endpoint=endpoint,
        body=request.body,
        encoding=request.headers.get("content-encoding", ""),
        facts=facts_of(endpoint, _answer(request, response)),
        credential=credential_of(request.headers),
        has_secrets=has_secrets(request.headers),
        session=session_of(request.headers),
    )


def _answer(request: _Message, response: _Message | None) -> Answer:
    dispatch_ns = request.took_ns
    if response is None:
        return Answer(bytes_in=len(request.body), dispatch_ns=dispatch_ns)
    return Answer(
        status=response.status,
        body=response.body,
        content_type=response.headers.get("content-type", ""),
        encoding=response.headers.get("content-encoding", ""),
        bytes_in=len(request.body),
        bytes_out=len(response.body),
        dispatch_ns=dispatch_ns,
        end_ns=_end_ns(request, response),
        broken=None if response.is_whole else "connection_lost",
    )


def _end_ns(request: _Message, response: _Message) -> int | None:
    """A response's duration is its own; that of old releases counts from the request."""
    if response.took_ns is None:
        return None
    start_ns = response.start_ns if request.took_ns is not None else request.start_ns
    end_ns = start_ns + response.took_ns - request.start_ns
    return end_ns if end_ns >= 0 else None


def _message(raw: bytes, meta: re.Match[bytes]) -> _Message | None:
    start, took = int(meta[3]), int(meta[4]) if meta[4] is not None else -1
    head, separator, body = raw.partition(b"\r\n\r\n")
    first, _, rest = head.partition(b"\r\n")
    found = _START.fullmatch(first)
    if found is None or not separator or not start < MAX_NS:
        return None
    pairs = (line.partition(b":") for line in rest.split(b"\r\n") if line)
    headers = lower_cased((_text(name), _text(value)) for name, _, value in pairs)
    body, is_whole = _unframed(headers, body)
    return _Message(
        method=found[1],
        path=_text(found[2] or b""),
        status=int(found[3]) if found[3] else None,
        headers=headers,
        body=body,
        is_whole=is_whole,
        start_ns=start,
        took_ns=took if 0 <= took < MAX_NS else None,
    )


def _text(value: bytes) -> str:
    return value.strip().decode("utf-8", "surrogateescape")


def _unframed(headers: dict[str, str], body: bytes) -> tuple[bytes, bool]:
    """(the body, is it all there?)."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return _joined(body)
    length = headers.get("content-length", "")
    if length.isascii() and length.isdecimal() and len(length) < 16:
        return body[: int(length)], len(body) >= int(length)
    return body, True


def _joined(chunked: bytes) -> tuple[bytes, bool]:
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = chunked.find(b"\r\n", at)
        try:
            size = int(chunked[at:line_end].partition(b";")[0], 16) if line_end >= 0 else -1
        except ValueError:
            size = -1
        if size <= 0:
            return b"".join(parts), size == 0
        parts.append(chunked[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2


def _records(file: BinaryIO) -> Iterator[bytes]:
    held = b""
    while data := file.read(_READ_BYTES):
        held += data
        *records, held = held.split(_SEPARATOR)
        yield from records
        if len(held) > _MAX_RECORD_BYTES:
            held = b""  # no separator in half a gigabyte: what follows is a record that cannot be read
    if held:
        yield held
