"""Azure LLM inference CSV (2023, 2024, multimodal): time stamps and lengths, no prefixes. Pure.

    TIMESTAMP,ContextTokens,GeneratedTokens[,NumImages]
    2023-11-16 18:15:46.6805900,374,44

Stamps carry up to seven digits (100 ns); 2023 has local-looking ones, 2024 may carry +00:00.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

import msgspec

from tracer.formats import BadRow, Detected, source_extra
from tracer.schema import Footer, Request

NAME = "azure"
HOLDS = frozenset({"input_tokens", "output_tokens", "media"})
STEP_NS = 100
HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
IMAGES = b",NumImages"
MAX_COUNT = 2**31 - 1
MAX_IMAGES = 10_000  # they become a list in the row
YEARS = range(1970, 2262)  # what int64 nanoseconds since 1970 hold
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)([ T])(\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class StampStyle:
    """How a source writes its time stamps."""

    digits: int = 7
    zone: str = ""  # as written: nothing, Z or +00:00
    separator: str = " "


def looks_like(head: bytes) -> bool:
    return _header(head.split(b"\n", 1)[0]) is not None


def _header(line: bytes) -> bool | None:
    """Does the header name images? None if it is no header."""
    text = line.removeprefix(b"\xef\xbb\xbf").strip()
    return {HEADER: False, HEADER + IMAGES: True}.get(text)


def read(lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
    """Rows in file order; `arrival_ns` counts from the first row, whose time is `found.epoch_ns`."""
    has_images, style = False, StampStyle()
    for number, line in enumerate(lines, 1):
        text = line.rstrip(b"\r\n").decode("utf-8", "replace")
        if number == 1:
            header = _header(line)
            if header is None:
                bad(BadRow(1, f"no header, wanted {HEADER.decode()}[{IMAGES.decode()}]", text))
            has_images = bool(header)
            found.notes |= {"line_end": "crlf" if line.endswith(b"\r\n") else "lf", "images": str(has_images).lower()}
            continue
        found.notes["last_line_end"] = str(line.endswith(b"\n")).lower()
        if not text.strip():
            continue
        try:
            stamp, stamp_ns, own_style, counts = _values(text, has_images)
        except ValueError as error:
            bad(BadRow(number, str(error), text))
            continue
        if found.epoch_ns is None:
            found.epoch_ns, style = stamp_ns, own_style
            found.time_unit_ns = 10 ** (9 - style.digits)
            found.notes |= {"digits": str(style.digits), "zone": style.zone, "separator": style.separator}
        request: Request = {
            "arrival_ns": stamp_ns - found.epoch_ns,
            "input_tokens": counts[0],
            "input_tokens_count_source": "import",
            "output_tokens": counts[1],
            "output_tokens_count_source": "import",
        }
        if has_images:
            request["media"] = ["image"] * counts[2]
        if own_style != style:
            request["source_extra"] = msgspec.json.encode({"stamp": stamp}).decode()
        yield request


def _values(text: str, has_images: bool) -> tuple[str, int, StampStyle, list[int]]:
    """Stamp as written, its time and style, and the counts. Raises ValueError."""
    stamp, *cells = text.split(",")
    if len(cells) != 2 + has_images:
        raise ValueError(f"{1 + len(cells)} columns, wanted {3 + has_images}")
    counts = [_count(cell) for cell in cells]
    if has_images and counts[2] > MAX_IMAGES:
        raise ValueError(f"{counts[2]} images, wanted at most {MAX_IMAGES}")
    return stamp, *parse_stamp(stamp), counts


def _count(cell: str) -> int:
    if not (cell.isascii() and cell.isdigit() and len(cell) <= 10 and int(cell) <= MAX_COUNT):
        raise ValueError(f"{cell[:40]!r} is no count, wanted 0 .. {MAX_COUNT}")
    return int(cell)


def parse_stamp(text: str) -> tuple[int, StampStyle]:
    """(ns since 1970, how it was written); a stamp without a zone is taken as UTC. Raises ValueError."""
    match = _STAMP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no time stamp like 2023-11-16 18:15:46.6805900")
    day, separator, clock, fraction, zone = match.groups(default="")
    ns = (_epoch_s(day, clock) - _offset_s(zone)) * 10**9 + int(fraction.ljust(9, "0"))
    return ns, _style(len(fraction), zone, separator)


@lru_cache(maxsize=1024)
def _epoch_s(day: str, clock: str) -> int:
    """A busy server has many rows in a second."""
    year, month, date = (int(part) for part in day.split("-"))
    if year not in YEARS:
        raise ValueError(f"year {day[:4]}, wanted {YEARS.start} .. {YEARS.stop - 1}")
    hour, minute, second = (int(part) for part in clock.split(":"))
    return int(datetime(year, month, date, hour, minute, second, tzinfo=UTC).timestamp())


_style = lru_cache(maxsize=64)(StampStyle)


def format_stamp(ns: int, style: StampStyle) -> str:
    """The inverse of `parse_stamp`; digits finer than the style's are cut."""
    seconds, fraction = divmod(ns, 10**9)
    moment = datetime.fromtimestamp(seconds + _offset_s(style.zone), UTC).replace(tzinfo=None)
    text = moment.isoformat(sep=style.separator, timespec="seconds")
    return text + (f".{fraction:09d}"[: style.digits + 1] if style.digits else "") + style.zone


def _offset_s(zone: str) -> int:
    if zone in ("", "Z"):
        return 0
    offset = int(zone[1:3]) * 3600 + int(zone[4:6]) * 60
    return -offset if zone[0] == "-" else offset


def write(rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
    """The header and one line a row, with the source's digits, zone and line ends where it was such a file."""
    notes = footer.notes if footer.source_format == NAME else {}
    end = b"\r\n" if notes.get("line_end") == "crlf" else b"\n"
    has_images = notes.get("images") == "true"
    style = StampStyle(int(notes.get("digits", 7)), notes.get("zone", ""), notes.get("separator", " "))
    before = HEADER + (IMAGES if has_images else b"")
    for row in rows:
        yield before + end
        stamp = source_extra(row).get("stamp") if notes else None
        stamp = stamp or format_stamp((footer.epoch_ns or 0) + row["arrival_ns"], style)
        before = f"{stamp},{row.get('input_tokens') or 0},{row.get('output_tokens') or 0}".encode()
        if has_images:
            before += b",%d" % len(row.get("media") or [])
    yield before + (end if notes.get("last_line_end", "true") == "true" else b"")
