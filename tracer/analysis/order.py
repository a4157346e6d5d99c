"""Is the log in the order in which things happened? A prompt that another one extends must come first. Pure."""

from typing import Literal

import msgspec
import numpy as np

from tracer.blocks import Blocks

ENOUGH_PAIRS = 20
SURE = 0.9


class LogOrder(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Literal["in order", "reversed", "shuffled", "cannot tell"]
    pairs: int  # of a whole prompt and the only one that goes on from it
    shorter_first: float | None  # share of the pairs in which the shorter one comes first


def check_order(blocks: Blocks) -> LogOrder:
    """From the prompts' blocks, in the log's order; ids must be chained.

    Only prompts sent once that one other prompt goes on from count: what many continue (a template, a document) may be
    asked for alone at any time.
    """
    if not len(blocks.ids):
        return LogOrder(verdict="cannot tell", pairs=0, shorter_first=None)
    prompts = np.flatnonzero(blocks.lengths > 0)
    place = blocks.offsets[1:][prompts] - 1
    size = int(blocks.ids.max()) + 1
    ends_at = np.full(size, -1, dtype=np.int64)
    ends_at[blocks.ids[place]] = prompts
    shorter = ends_at[blocks.ids]
    shorter[place] = -1
    inner = np.flatnonzero(shorter >= 0)
    owner = np.repeat(np.arange(len(blocks)), blocks.lengths)[inner]
    is_deepest = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    shorter, longer = shorter[inner][is_deepest], owner[is_deepest]
    sent = np.bincount(blocks.ids[place], minlength=size)[blocks.ids[blocks.offsets[shorter + 1] - 1]]
    continued = np.bincount(shorter, minlength=len(blocks))[shorter]
    counts = (sent == 1) & (continued == 1)
    first = int((shorter < longer)[counts].sum())
    pairs = int(counts.sum())
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
