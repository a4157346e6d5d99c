"""HTTP archives, as browsers and mitmproxy write them: http://www.softwareishard.com/blog/har-12-spec/

A HAR has no times of single events, and none of the first token: `wait` ends at the response's head.
"""

import base64
from collections.abc import Iterator
from typing import BinaryIO
from urllib.parse import urlsplit

import msgspec

from tracer.captures import Captured, Reject, Rejected
from tracer.captures.answers import Answer, facts_of
from tracer.captures.documents import members, nothing
from tracer.captures.headers import credential_of, has_secrets, lower_cased, session_of
from tracer.captures.stamps import wall_ns
from tracer.wire import endpoint_of

NAME = "har"
_ENTRIES = b'"entries"'


class _Header(msgspec.Struct):
    name: str
    value: str = ""


class _PostData(msgspec.Struct):
    text: str | None = None
    encoding: str | None = None


class _Request(msgspec.Struct, rename="camel"):
    method: str
    url: str
    headers: list[_Header] = []
    post_data: _PostData | None = None
    body_size: float | None = None


class _Content(msgspec.Struct, rename="camel"):
    text: str | None = None
    encoding: str | None = None
    mime_type: str | None = None


class _Response(msgspec.Struct, rename={"body_size": "bodySize", "error": "_error"}):
    status: int = 0
    headers: list[_Header] = []
    content: _Content | None = None
    body_size: float | None = None
    error: str | None = None


class _Entry(msgspec.Struct, rename={"started": "startedDateTime"}):
    started: str
    request: _Request
    response: _Response
    time: float | None = None
    timings: dict[str, float | str | None] = {}


def looks_like(head: bytes) -> bool:
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"{") and b'"log"' in head[:200]


def read(file: BinaryIO, reject: Reject) -> Iterator[Captured]:
    data = file.read()
    try:
        log = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=dict[str, dict[str, msgspec.Raw]])["log"]
        entries, head = bytes(log["entries"]), bytes(log.get("creator", b""))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        at = data.find(b"[", data.find(_ENTRIES))
        if _ENTRIES not in data or at < 0:
            raise nothing('a HAR: {"log": {"entries": [...]}}') from None
        entries, head = data[at:], data[:at]
    is_mitmproxy = b"mitmproxy" in head
    for number, raw in enumerate(members(entries, reject), 1):
        try:
            entry = msgspec.json.decode(raw, type=_Entry)
            captured = _captured(entry, is_mitmproxy, reject, f"entry {number}")
        except (msgspec.DecodeError, ValueError, RecursionError):
            reject(Rejected(f"entry {number}", "not a HAR entry that can be read"))
            continue
        if captured is not None:
            yield captured


def _captured(entry: _Entry, is_mitmproxy: bool, reject: Reject, place: str) -> Captured | None:
    request = entry.request
    url = urlsplit(request.url)
    endpoint = endpoint_of(url.path) if request.method == "POST" else None
    if endpoint is None:
        reject(Rejected(place, "not an endpoint that is recorded", "passed_through", is_fault=False))
        return None
    headers = lower_cased((header.name, header.value) for header in request.headers)
    posted = request.post_data or _PostData()
    body = _bytes(posted.text, posted.encoding)
    answer = _answer(entry, body, is_mitmproxy)
    if body is None:
        reject(Rejected(place, "the capture does not hold its request body", "requests_not_stored", is_fault=False))
    elif answer.body is None and answer.broken is None:
        reject(Rejected(place, "the capture does not hold its answer", "answers_not_stored", is_fault=False))
    return Captured(
        arrival_ns=wall_ns(entry.started),
        endpoint=endpoint,
        body=body or b"",
        facts=facts_of(endpoint, answer),
        credential=credential_of(headers),
        has_secrets=has_secrets(headers),
        session=session_of(headers),
        upstream=_host(url.scheme, url.hostname, url.port),
    )


def _host(scheme: str, hostname: str | None, port: int | None) -> str:
    if not hostname:
        return ""
    return f"{f'[{hostname}]' if ':' in hostname else hostname}:{port or (443 if scheme == 'https' else 80)}"


def _answer(entry: _Entry, body: bytes | None, is_mitmproxy: bool) -> Answer:
    response = entry.response
    headers = lower_cased((header.name, header.value) for header in response.headers)
    content = response.content or _Content()
    # An empty text stands for an answer that was empty, and for one that was not kept.
    held = _bytes(content.text, content.encoding) or None
    broken = None
    if not response.status:
        broken = "client_abort" if "Client disconnected" in (response.error or "") else "connection_lost"
    return Answer(
        status=response.status or None,
        body=held,  # decoded: `content` is the message after its Content-Encoding
        content_type=headers.get("content-type", content.mime_type or ""),
        bytes_in=_size(entry.request.body_size, body),
        bytes_out=_size(response.body_size, held),
        end_ns=_end_ns(entry, is_mitmproxy),
        broken=broken,
    )


def _size(told: float | None, held: bytes | None) -> int | None:
    """On the wire. 0 where something is held (a browser's cache), or -1, says nothing."""
    return int(told) if told is not None and (0 < told < 2**62 or (told == 0 and held == b"")) else None


def _end_ns(entry: _Entry, is_mitmproxy: bool) -> int | None:
    """mitmproxy counts from the request's first byte, so what it adds for connecting lies before that, or is in `wait`."""
    total_ms = entry.time
    if is_mitmproxy:
        parts = [entry.timings.get(name) for name in ("send", "wait", "receive")]
        total_ms = sum(part for part in parts if isinstance(part, int | float) and part > 0)
    return round(total_ms * 1e6) if total_ms is not None and 0 < total_ms < 1e12 else None


def _bytes(text: str | None, encoding: str | None) -> bytes | None:
    if text is None:
        return None
    return base64.b64decode(text) if encoding == "base64" else text.encode("utf-8", "surrogatepass")
