"""What JSON lines do not say of themselves: how many tokens a block id covers, and the unit of time. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import msgspec

from tracer.schema import Footer

HEAD_ROWS = 1000  # enough to see the layout
SIZES = (*(2**k for k in range(2, 17)), *range(48, 2049, 16))
TOO_SLOW_S = 20.0  # no trace of a busy server has a request only every 20 s: such stamps are milliseconds


def peek(lines: Iterable[bytes]) -> tuple[list[bytes], Iterator[bytes]]:
    """The first lines, and all of them."""
    rest = iter(lines)
    head = list(islice(rest, HEAD_ROWS))
    return head, chain(head, rest)


def objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Those lines that are JSON objects."""
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            continue


def is_count(tokens: int, ids: int, block_tokens: int) -> bool:
    """Can so many ids name a prompt of so many tokens, with or without an id for a partial last block?"""
    full, rest = divmod(tokens, block_tokens)
    return ids == full or (rest > 0 and ids == full + 1)


def block_tokens_of(counts: Sequence[tuple[int, int]], default: int) -> int:
    """Block size that explains most (tokens, ids); the default where it explains nearly all: some rows may be bad."""

    def explained(size: int) -> int:
        return sum(is_count(tokens, ids, size) for tokens, ids in counts)

    if explained(default) >= 0.8 * len(counts):
        return default
    best: int = max(SIZES, key=explained)  # the smallest of several
    return best


def unit_ns_of(stamps: Sequence[float]) -> int:
    """Nanoseconds in a unit of these stamps, that are seconds unless requests would then be too rare."""
    if len(stamps) < 2:
        return 10**9
    return 10**6 if (max(stamps) - min(stamps)) / (len(stamps) - 1) > TOO_SLOW_S else 10**9


def remainder(raw: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """What must be kept so that `restored(again, ...)` equals `raw`: other values, and keys that it lacks."""
    keys = {key: value for key, value in raw.items() if key not in again or again[key] != value}
    absent = [key for key in again if key not in raw]
    return {name: value for name, value in (("keys", keys), ("absent", absent)) if value}


def restored(again: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    absent = kept.get("absent", ())
    keys: dict[str, Any] = kept.get("keys", {})
    return {key: value for key, value in again.items() if key not in absent} | keys


def is_whole(footer: Footer, name: str) -> bool:
    """Is this trace such a file, and all of it? Of a part, kept ids and turns would no longer fit together."""
    return footer.source_format == name and "slice_of" not in footer.notes
