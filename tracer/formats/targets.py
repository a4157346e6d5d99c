"""What the files that load generators read have in common. Pure.

A target is written, not read back: its file says what to send and when, and the tool makes up the prompts. All of them take
lengths and block ids, so no text is needed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from tracer.formats.ids import FirstSeen
from tracer.schema import Footer, Request


class Target(Protocol):
    """What a module offers that writes for a tool."""

    NAME: str
    HOLDS: frozenset[str]  # columns that the file tells, beside arrivals and lengths
    STEP_NS: int  # of its time stamps

    def write(self, rows: Iterable[Request], footer: Footer, losses: Counter[str]) -> Iterator[bytes]:
        """Lines with their ends. What they cannot say is counted, by what it is, in `losses`."""

    def usage(self, path: str, footer: Footer, rows: int) -> str:
        """The options with which the tool reads this file."""


def sendable(rows: Iterable[Request], losses: Counter[str]) -> Iterator[Request]:
    """Requests with a prompt and at least one token to answer; tools and servers refuse the others."""
    for row in rows:
        if not row.get("input_tokens"):
            losses["requests without a known prompt length: left out"] += 1
            continue
        if not row.get("output_tokens"):
            losses["requests without output: they ask for 1 token"] += 1
            row["output_tokens"] = 1
        if row.get("input_blocks") is None:
            losses["requests without known blocks: they share nothing"] += 1
        yield row


def prompt_ids(row: Request, block_tokens: int, numbers: FirstSeen) -> list[int]:
    """Ids of all blocks of a prompt, a partial last one too: ceil(input / block) of them.

    Blocks that the trace does not name get numbers that no other request has.
    """
    full, rest = divmod(row.get("input_tokens") or 0, block_tokens)
    ids = numbers.row((row.get("input_blocks") or [])[:full])
    tail = row.get("input_tail_id")
    if rest and tail is not None and len(ids) == full:
        ids.append(numbers[tail])
    ids += [numbers.fresh() for _ in range(full + (rest > 0) - len(ids))]
    return ids
