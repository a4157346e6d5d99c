"""CSV of a gateway's requests: `request_json` and a time stamp; `response_json`, `status` and `duration_ms` where there."""

import csv
from collections.abc import Iterator
from typing import BinaryIO

from tracer.captures import Captured, Reject, Rejected
from tracer.captures.documents import nothing
from tracer.captures.openai_jsonl import captured_of
from tracer.captures.stamps import BadStamp

NAME = "gateway_csv"
MAX_FIELD_CHARS = 512 << 20
_RENAMED = {"request_json": "request", "response_json": "response"}


def looks_like(head: bytes) -> bool:
    first = head.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0].lower()
    return not first.startswith(b"{") and b"request_json" in first and b"," in first


def read(file: BinaryIO, reject: Reject) -> Iterator[Captured]:
    csv.field_size_limit(MAX_FIELD_CHARS)  # 128 KiB by default: prompts are longer
    rows = csv.reader(line.decode("utf-8", "replace") for line in file)
    names = _names(rows)
    for number, row in _numbered(rows, reject):
        entry = {name: value for name, value in zip(names, row, strict=False) if value}
        try:
            captured = captured_of(entry) if "request" in entry else None
        except BadStamp as error:
            reject(Rejected(f"row {number}", str(error)))
            continue
        if captured is None:
            reject(Rejected(f"row {number}", "no request of a known API in it"))
        else:
            yield captured


def _names(rows: Iterator[list[str]]) -> list[str]:
    try:
        head = [name.strip().lower().removeprefix("\ufeff") for name in next(rows, [])]
    except csv.Error:
        head = []
    if "request_json" not in head:
        raise nothing("a CSV with a column request_json in its first line")
    return [_RENAMED.get(name, name) for name in head]


def _numbered(rows: Iterator[list[str]], reject: Reject) -> Iterator[tuple[int, list[str]]]:
    number = 1
    while True:
        number += 1
        try:
            row = next(rows, None)
        except csv.Error:
            reject(Rejected(f"row {number}", "not a CSV row that can be read"))
            continue
        if row is None:
            return
        if row:
            yield number, row
