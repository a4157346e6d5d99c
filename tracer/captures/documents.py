"""Files of JSON values: one a line, or one array, or one value; each comes with its place."""

import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from tracer.captures import Reject, Rejected
from tracer.errors import TraceError

_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder().decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


def values(file: BinaryIO, reject: Reject) -> Iterator[tuple[str, dict[str, Any]]]:
    """JSON objects. What is none is rejected; an array that is cut gives its whole members."""
    first = _first_line(file)
    if not first:
        return
    is_lines = first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") and _parsed(first.removeprefix(b"\xef\xbb\xbf")) is not None
    if is_lines:
        yield from _lines(first, file, reject)
    else:
        yield from _document(first + file.read(), reject)


def _first_line(file: BinaryIO) -> bytes:
    line = file.readline()
    while line and not line.strip():
        line = file.readline()
    return line


def _lines(first: bytes, file: BinaryIO, reject: Reject) -> Iterator[tuple[str, dict[str, Any]]]:
    line, number = first.removeprefix(b"\xef\xbb\xbf"), 1
    while line:
        if line.strip():
            yield from _one(line, f"line {number}", reject)
        line = file.readline()
        number += 1


def _document(data: bytes, reject: Reject) -> Iterator[tuple[str, dict[str, Any]]]:
    data = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not data.startswith(b"["):
        if _parsed(data) is not None:
            yield from _one(data, "document", reject)
        else:  # lines, the first of which is damaged
            file = io.BytesIO(data)
            yield from _lines(file.readline(), file, reject)
        return
    for number, member in enumerate(members(data, reject), 1):
        yield from _one(member, f"entry {number}", reject)


def _one(data: bytes | msgspec.Raw, place: str, reject: Reject) -> Iterator[tuple[str, dict[str, Any]]]:
    value = _parsed(data)
    if isinstance(value, dict):
        yield place, value
    else:
        reject(Rejected(place, "not a JSON object" if value is not None else "not JSON, or cut off"))


def _parsed(data: bytes | msgspec.Raw) -> Any:
    try:
        return _decode(data)
    except _FAULTS:
        return None


def members(data: bytes, reject: Reject) -> Iterator[bytes | msgspec.Raw]:
    """Of the JSON array that `data` is, or is the beginning of."""
    try:
        yield from _decode_array(data)
        return
    except _FAULTS:
        text = data.decode("utf-8", "replace")
    scan, at, count = json.JSONDecoder().raw_decode, 1, 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if text[at : at + 1] == "]":
            return
        start = at
        try:
            _, at = scan(text, at)
        except (ValueError, RecursionError):
            reject(Rejected(f"entry {count + 1}", "cut or damaged here; what follows cannot be read", "torn_captures"))
            return
        count += 1
        yield text[start:at].encode()


def nothing(wanted: str) -> TraceError:
    return TraceError("nothing to import here", wanted=wanted, next_step="Name another format with --format, or check the file")
