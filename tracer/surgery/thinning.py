"""A miniature: a share of the sharing groups, whole, so that it behaves on 1/k of the cache as the trace does on all of it.

Dropping single requests or sessions would break what groups share; a group kept whole keeps its own reuse.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracer.analysis.groups import Groups, sharing_groups
from tracer.blocks import Blocks
from tracer.errors import TraceError
from tracer.surgery.slicing import refuse_same, slice_trace
from tracer.tracefile import blocks, column, read_table

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
DRAWS = 64


def thin_trace(path: Path, out_path: Path, keep: float, seed: int = 0) -> tuple[int, int, int]:
    """(requests kept, groups kept, groups in all). `keep`: share of the groups, 0 < keep <= 1. Raises TraceError."""
    if not 0 < keep <= 1:
        raise TraceError("no share of a trace", seen=str(keep), wanted="more than 0, at most 1", next_step="Give e.g. --keep 0.1")
    refuse_same(path, out_path)
    found, tokens, ids = _groups(path)
    kept = chosen_groups(_sizes(found.group_of, tokens, ids), keep, np.random.default_rng(seed))
    is_kept = kept[found.group_of]
    count = slice_trace(path, out_path, keep=lambda row: bool(is_kept[row["request_id"]]))
    return count, int(kept.sum()), found.count


def largest_groups(path: Path, count: int) -> NDArray[np.bool_]:
    """Which requests are in the `count` sharing groups with the most prompt tokens, [requests]. Raises TraceError."""
    if count < 1:
        raise TraceError("no groups asked for", seen=str(count), wanted="1 or more")
    found, tokens, _ = _groups(path)
    totals = np.bincount(found.group_of, weights=tokens)
    return np.isin(found.group_of, np.argsort(-totals, kind="stable")[:count])


def _groups(path: Path) -> tuple[Groups, Ints, Blocks]:
    """(sharing groups, prompt tokens, prompt blocks) by request."""
    table = read_table(path, ["session_id", "input_blocks", "input_tokens"])
    session, ids = column(table, "session_id"), blocks(table, "input_blocks")
    found = sharing_groups(ids, session if (session >= 0).any() else None)
    return found, np.maximum(column(table, "input_tokens"), 1), ids


def _sizes(group_of: Ints, tokens: Ints, ids: Blocks) -> Floats:
    """What is to be in proportion, [groups, 4]: prompt tokens, requests, references to blocks, blocks seen for the first time."""
    groups = int(group_of.max(initial=-1)) + 1
    references = np.diff(ids.offsets)
    _, first_seen = np.unique(ids.ids, return_index=True)
    new = np.bincount(np.repeat(np.arange(len(references)), references)[first_seen], minlength=len(references))
    return np.stack(
        [np.bincount(group_of, weights=one, minlength=groups) for one in (tokens, np.ones_like(tokens), references, new)], 1
    )


def chosen_groups(sizes: Floats, keep: float, random: np.random.Generator) -> NDArray[np.bool_]:
    """Which groups stay, [groups]: of many stratified draws the one whose sizes come closest to `keep` of the whole's.

    One group at random from each 1/keep that follow each other by `sizes[:, 0]`: a plain draw would now and then miss or take
    the few groups that hold most of the tokens. To keep only a well balanced draw is rejective sampling (Fuller, Biometrika
    96, 2009).
    """
    groups = len(sizes)
    order = np.argsort(sizes[:, 0], kind="stable")[::-1]
    strata = int(keep * groups)
    bounds = np.ceil(np.arange(strata + 1) / keep).astype(np.int64)
    wanted = keep * np.maximum(sizes.sum(0), 1)
    best, best_error = np.zeros(groups, dtype=bool), np.inf
    for _ in range(DRAWS):
        places = np.append(bounds[:-1], bounds[-1]) + (random.random(strata + 1) * np.append(np.diff(bounds), 1 / keep)).astype(
            np.int64
        )
        chosen = np.zeros(groups, dtype=bool)
        chosen[order[places[places < groups]]] = True  # the last stratum is a part of one: its place may be beyond the end
        error = np.abs(sizes[chosen].sum(0) / wanted - 1).max()
        if chosen.any() and error < best_error:
            best, best_error = chosen, error
    if not best.any():
        best[order[int(random.integers(groups))]] = True
    return best
