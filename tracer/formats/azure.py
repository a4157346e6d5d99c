"""Azure LLM inference CSV (2023, 2024, multimodal): time stamps and lengths, no prefixes. Pure.

    TIMESTAMP,ContextTokens,GeneratedTokens[,NumImages]
    2023-11-16 18:15:46.6805900,374,44

Stamps carry up to seven digits (100 ns); 2023 has local-looking ones, 2024 may carry +00:00.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime

import msgspec

from tracer.formats import BadRow, Detected
from tracer.schema import Footer, Request

NAME = "azure"
_COLUMNS = [b"TIMESTAMP", b"ContextTokens", b"GeneratedTokens"]
_STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")


def looks_like(head: bytes) -> bool:
    return head.removeprefix(b"\xef\xbb\xbf").startswith(b",".join(_COLUMNS))


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order; `arrival_ns` counts from the first row, whose time is `found.epoch_ns`."""
    found.time_unit_ns = 100
    has_images = False
    epoch_ns: int | None = None
    for number, line in enumerate(lines, 1):
        cells = line.rstrip(b"\r\n").split(b",")
        if number == 1:
            has_images = len(cells) > 3
            found.notes |= {"line_end": "crlf" if line.endswith(b"\r\n") else "lf", "images": str(has_images).lower()}
            continue
        found.notes["last_line_end"] = str(line.endswith(b"\n")).lower()
        if not line.strip():
            continue
        try:
            if len(cells) != 3 + has_images:
                raise ValueError(f"{len(cells)} columns, wanted {3 + has_images}")
            stamp_ns, digits, zone, separator = parse_stamp(cells[0].decode())
            context, generated = (_count(cell) for cell in cells[1:3])
        except ValueError as error:
            bad(BadRow(number, str(error), line.decode("utf-8", "replace").rstrip("\r\n")))
            continue
        if epoch_ns is None:
            epoch_ns = found.epoch_ns = stamp_ns
            found.notes |= {"digits": str(digits), "zone": zone, "separator": separator}
        request: Request = {
            "arrival_ns": stamp_ns - epoch_ns,
            "input_tokens": context,
            "input_tokens_count_source": "import",
            "output_tokens": generated,
            "output_tokens_count_source": "import",
        }
        if has_images:
            request["media"] = ["image"] * _count(cells[3])
        if (str(digits), zone, separator) != tuple(found.notes[key] for key in ("digits", "zone", "separator")):
            request["source_extra"] = msgspec.json.encode({"stamp": cells[0].decode()}).decode()
        yield request


def _count(cell: bytes) -> int:
    if not cell.isdigit() or int(cell) >= 2**31:
        raise ValueError(f"{cell.decode('utf-8', 'replace')!r} is no token count")
    return int(cell)


def parse_stamp(text: str) -> tuple[int, int, str, str]:
    """(ns since 1970, fraction digits, zone as written, separator). Raises ValueError."""
    match = _STAMP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no time stamp like 2023-11-16 18:15:46.6805900")
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    fraction, zone = match[7] or "", match[8] or ""
    seconds = int(datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp())
    if zone not in ("", "Z"):
        offset = int(zone[1:3]) * 3600 + int(zone[4:6]) * 60
        seconds -= offset if zone[0] == "+" else -offset
    return seconds * 10**9 + int((fraction or "0").ljust(9, "0")), len(fraction), zone, text[10]


def format_stamp(ns: int, digits: int, zone: str, separator: str) -> str:
    if zone not in ("", "Z"):
        offset = int(zone[1:3]) * 3600 + int(zone[4:6]) * 60
        ns += (offset if zone[0] == "+" else -offset) * 10**9
    whole = datetime.fromtimestamp(ns // 10**9, UTC).strftime(f"%Y-%m-%d{separator}%H:%M:%S")
    return whole + (f".{ns % 10**9:09d}"[: digits + 1] if digits else "") + zone


def write(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """Lines with the source's digits, zone and line ends where the trace came from such a file."""
    notes = footer.notes
    end = b"\r\n" if notes.get("line_end") == "crlf" else b"\n"
    has_images = notes.get("images") == "true"
    digits, zone, separator = int(notes.get("digits", 7)), notes.get("zone", ""), notes.get("separator", " ")
    before = b",".join(_COLUMNS) + (b",NumImages" if has_images else b"")
    for row in rows:
        yield before + end
        extra = msgspec.json.decode(row.get("source_extra") or "{}")
        stamp = extra.get("stamp") or format_stamp((footer.epoch_ns or 0) + row["arrival_ns"], digits, zone, separator)
        before = f"{stamp},{row.get('input_tokens') or 0},{row.get('output_tokens') or 0}".encode()
        if has_images:
            before += b",%d" % len(row.get("media") or [])
    yield before + (end if notes.get("last_line_end", "true") == "true" else b"")
