"""Public trace formats to rows and back, one format a file. Pure: lines in, rows out; importing.py opens the files.

Loss-free means: import, then export, gives equal parsed values in the same order.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from tracer.schema import BASE_BLOCK_TOKENS, Footer, Request


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is not a row of its format, and why."""

    line: int
    reason: str
    text: str


@dataclass(slots=True)
class Detected:
    """What an importer found out on its way through the file; complete when the last row has been read."""

    in_seconds: bool = False  # Mooncake: stamps are seconds, not ms. Found in one pass, obeyed if set before the next
    epoch_ns: int | None = None
    time_unit_ns: int = 1
    block_tokens: int = BASE_BLOCK_TOKENS
    tail_rule: Literal["ceil", "floor"] | None = None
    hash_scope: Literal["global", "local"] = "global"  # local: ids mean something inside their session only
    notes: dict[str, str] = field(default_factory=dict)
    side_lines: dict[str, Sequence[bytes]] = field(default_factory=dict)  # given, not found: files that belong to the source
    columns: dict[str, str] = field(default_factory=dict)  # given, not found: plain CSV: what is in which column


class Format(Protocol):
    """What each module of this package offers."""

    NAME: str
    HOLDS: frozenset[str]  # columns that a file of this format tells, beside arrivals
    STEP_NS: int  # of its time stamps

    def looks_like(self, head: bytes) -> bool:
        """Do the first bytes of a file show this format?"""

    def read(self, lines: Iterable[bytes], found: Detected, bad: Callable[[BadRow], None]) -> Iterator[Request]:
        """Rows in file order, without request_id; `arrival_ns` may have any zero that is the same for all rows.

        Columns that name other requests hold their places in that order.
        """

    def write(self, rows: Iterable[Request], footer: Footer) -> Iterator[bytes]:
        """Lines with their ends."""


def source_extra(row: Request) -> dict[str, Any]:
    """The row's `source_extra` as a value; empty where it has none."""
    text = row.get("source_extra")
    return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
