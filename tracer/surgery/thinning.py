"""A miniature: a share of the sharing groups, whole, so that it behaves on 1/k of the cache as the trace does on all of it.

Dropping single requests or sessions would break what groups share; a group kept whole keeps its own reuse.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.groups import sharing_groups
from tracer.errors import TraceError
from tracer.surgery.slicing import refuse_same, slice_trace
from tracer.tracefile import blocks, column, read_table

Ints = NDArray[np.int64]


def thin_trace(path: Path, out_path: Path, keep: float, seed: int = 0) -> tuple[int, int, int]:
    """(requests kept, groups kept, groups in all). `keep`: share of the groups, 0 < keep <= 1. Raises TraceError."""
    if not 0 < keep <= 1:
        raise TraceError("no share of a trace", seen=str(keep), wanted="more than 0, at most 1", next_step="Give e.g. --keep 0.1")
    refuse_same(path, out_path)
    table = read_table(path, ["session_id", "input_blocks", "input_tokens"])
    session = column(table, "session_id")
    found = sharing_groups(blocks(table, "input_blocks"), session if (session >= 0).any() else None)
    weight = np.maximum(column(table, "input_tokens"), 1)
    kept = chosen_groups(found.group_of, weight, keep, np.random.default_rng(seed))
    is_kept = kept[found.group_of]
    count = slice_trace(path, out_path, keep=lambda row: bool(is_kept[row["request_id"]]))
    return count, int(kept.sum()), found.count


def chosen_groups(group_of: Ints, weight: Ints, keep: float, random: np.random.Generator) -> NDArray[np.bool_]:
    """Which groups stay, [groups]. In the order of their weights every 1/keep-th, from a random one on.

    A plain draw would now and then miss or take the few groups that hold most of the tokens.
    """
    groups = int(group_of.max(initial=-1)) + 1
    order = np.argsort(np.bincount(group_of, weights=weight, minlength=groups), kind="stable")[::-1]
    marks = (np.arange(groups) + random.uniform()) * keep
    chosen = np.zeros(groups, dtype=bool)
    chosen[order[np.floor(marks + keep) > np.floor(marks)]] = True
    if not chosen.any():
        chosen[order[int(random.integers(groups))]] = True
    return chosen
