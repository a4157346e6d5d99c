"""Is the log in the order in which things happened? A prompt that another one extends must come first. Pure."""

from typing import Literal

import msgspec
import numpy as np

from tracer.blocks import Blocks

ENOUGH_PAIRS = 20
SURE = 0.9


class LogOrder(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Literal["in order", "reversed", "shuffled", "cannot tell"]
    pairs: int  # of a whole prompt and a longer one that begins with it
    shorter_first: float | None  # share of the pairs in which the shorter one comes first


def check_order(blocks: Blocks) -> LogOrder:
    """From the prompts' blocks, in the log's order; ids must be chained."""
    if not len(blocks.ids):
        return LogOrder(verdict="cannot tell", pairs=0, shorter_first=None)
    last = np.flatnonzero(blocks.lengths > 0)
    ends_at = np.full(int(blocks.ids.max()) + 1, -1, dtype=np.int64)
    place = blocks.offsets[1:][last] - 1
    ends_at[blocks.ids[place[::-1]]] = last[::-1]  # of equal prompts the first one
    owner = np.repeat(np.arange(len(blocks)), blocks.lengths)
    shorter = ends_at[blocks.ids]
    is_inner = shorter >= 0
    is_inner[place] = False
    first = int((shorter[is_inner] < owner[is_inner]).sum())
    pairs = int(is_inner.sum())
    share = first / pairs if pairs else None
    if share is None or pairs < ENOUGH_PAIRS:
        return LogOrder(verdict="cannot tell", pairs=pairs, shorter_first=share)
    verdict = "in order" if share >= SURE else "reversed" if share <= 1 - SURE else "shuffled"
    return LogOrder(verdict=verdict, pairs=pairs, shorter_first=share)  # type: ignore[arg-type]


def order_in_words(found: LogOrder) -> list[str]:
    """Something only where something is wrong."""
    if found.verdict not in ("reversed", "shuffled") or found.shorter_first is None:
        return []
    return [
        f"WARNING: this log seems to be {found.verdict}: of {found.pairs:,} prompts that another one continues, only "
        f"{found.shorter_first:.0%} come before it. Hit rates and gaps below mean nothing until it is sorted by time."
    ]
