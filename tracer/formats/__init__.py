"""Public trace formats to rows and back, one format a file. Pure: lines in, rows out; importing.py opens the files.

Loss-free means: import, export, import gives equal parsed values in the same order.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that is not a row of its format, and why."""

    line: int
    reason: str
    text: str


@dataclass(slots=True)
class Detected:
    """What an importer found out on its way through the file; complete when the last row has been read."""

    tail_rule: str | None = None
    notes: dict[str, str] = field(default_factory=dict)
    epoch_ns: int | None = None
    time_unit_ns: int = 1
    block_tokens: int = 16
    inversions: int = 0
