"""Learn a workload from a trace: tables of quantiles and shares small enough to read. Pure.

Starts come by a rate per window and a law of gaps inside it. Every request then has further turns, and others share its
prompt, each with a probability that depends on how many came before and how long the prompt is. What the end of the
trace cuts off is put back: a link after a gap g counts 1 / (share of requests that the trace follows for g).
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from synth.arrivals import NS
from synth.fidelity import COLUMNS as COMPARED
from synth.fidelity import head
from synth.gaps import gap_law
from synth.learned import PROBABILITIES, Class, Lengths, Model, Prefix, Service, Starts, quantiles
from synth.links import SHARE, START, TURN, Links, find_links
from tracer.errors import TraceError
from tracer.schema import Footer

type Floats = NDArray[np.float64]
type Ints = NDArray[np.int64]
COLUMNS = [*COMPARED, "end_ns", "model", "endpoint"]
DEPTHS = (0, 1, 2, 3, 5, 9, 17, 33)  # first depth of each class
ENOUGH_LINKS = 40  # fewer in a class: it joins the one before
SIZES = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.88, 0.95)  # where a class is split by size of prompt; only some if it is small
ENOUGH_PARENTS = 25
MUCH_NEW = 0.67  # share of requests with fewer new tokens
MAX_WEIGHT = 5.0
WINDOW_S = 60.0
MAX_WINDOWS = 120


def fit(table: pa.Table, footer: Footer, source: str = "") -> Model:
    """Columns `COLUMNS`. Raises TraceError for a trace without requests or with ids that are not chained."""
    if not table.num_rows:
        raise TraceError("the trace has no request to learn from")
    table, footer = head((table, footer), table.num_rows)
    links = find_links(table, footer)
    arrival = links.arrival_ns - links.arrival_ns[0]
    span_ns = int(arrival[-1]) + max(1, int(arrival[-1]) // max(1, len(arrival) - 1))
    is_start = links.kind == START
    return Model(
        source=source,
        requests=len(arrival),
        span_s=span_ns / NS,
        mean_input_tokens=float(f"{links.input_tokens.mean():.5g}"),
        block_tokens=footer.block_tokens,
        has_blocks=len(links.path.ids) > 0,
        tail_rule=footer.tail_rule,
        has_tails=table["input_tail_id"].null_count < len(table),
        has_answers=table["output_blocks"].null_count < len(table),
        has_sessions=links.has_sessions,
        probabilities=[float(f"{one:.4g}") for one in PROBABILITIES],
        starts=_starts(arrival[is_start] / NS, span_ns / NS),
        prefixes=_prefixes(links, is_start),
        first=_lengths(links, is_start, footer.block_tokens),
        turns=_classes(links, TURN, span_ns, footer.block_tokens),
        sharing=_classes(links, SHARE, span_ns, footer.block_tokens),
        service=_service(links),
        model=_commonest(table, "model"),
        endpoint=_commonest(table, "endpoint"),
    )


def _starts(start_s: Floats, span_s: float) -> Starts:
    window_s = max(WINDOW_S, span_s / MAX_WINDOWS)
    windows = max(1, int(np.ceil(span_s / window_s)))
    counts = np.bincount((start_s // window_s).astype(np.int64), minlength=windows)
    window = np.minimum((start_s // window_s).astype(np.int64), windows - 1)[:-1]
    gaps = np.diff(start_s) * counts[window] / window_s  # mean 1 in each window
    gaps = gaps[counts[window] >= 5]
    law, shape = gap_law(gaps)
    return Starts(
        window_s=float(f"{window_s:.6g}"),
        counts=counts.tolist(),
        law=law,
        shape=shape,
        gaps=quantiles(gaps) if law == "empirical" else None,
    )


def _prefixes(links: Links, is_start: NDArray[np.bool_]) -> list[Prefix]:
    """Each global prefix at which starts end, those above them too: a small tree."""
    starts = np.flatnonzero(is_start)
    depth = np.minimum(links.global_blocks[starts], links.input_blocks[starts])
    last = (
        np.where(depth > 0, links.path.ids[links.path.offsets[starts] + np.maximum(depth, 1) - 1], -1)
        if len(links.path.ids)
        else depth - 1
    )
    names, first, counts = np.unique(last, return_index=True, return_counts=True)
    order = np.argsort(depth[first], kind="stable")
    prefixes: list[Prefix] = []
    place: dict[int, int] = {}  # last block -> place in the list
    for one in order.tolist():
        row, blocks = int(starts[first[one]]), int(depth[first[one]])
        above = [place[block] for block in links.path[row][: max(blocks - 1, 0)].tolist() if block in place]
        prefixes.append(
            Prefix(under=above[-1] if above else None, blocks=blocks, share=float(f"{counts[one] / len(starts):.5g}"))
        )
        if blocks:
            place[int(names[one])] = len(prefixes) - 1
    return prefixes


def new_tokens(links: Links, block_tokens: int) -> Ints:
    base = np.where(links.kind == START, np.minimum(links.global_blocks, links.input_blocks), links.kept)
    return np.asarray(np.maximum(links.input_tokens - base * block_tokens, 1))


def _lengths(links: Links, chosen: NDArray[np.bool_], block_tokens: int) -> Lengths:
    new = new_tokens(links, block_tokens)[chosen]
    output = links.output_tokens[chosen]
    correlation = spearman(new, output)
    return Lengths(new_tokens=quantiles(new), output_tokens=quantiles(output), correlation=float(f"{correlation:.3g}"))


def spearman(first: NDArray[np.number], second: NDArray[np.number]) -> float:
    """Rank correlation, ties at their mean rank; 0.0 where one of the two never changes."""
    if len(first) < 3 or first.min() == first.max() or second.min() == second.max():
        return 0.0
    return float(np.corrcoef(_mean_ranks(first), _mean_ranks(second))[0, 1])


def _mean_ranks(values: NDArray[np.number]) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse])


def _classes(links: Links, kind: int, span_ns: int, block_tokens: int) -> list[Class]:
    """Parents by depth; in a trace with sessions, sharing has one class."""
    children = np.flatnonzero(links.kind == kind)
    if not len(children):
        return []
    by_depth = links.depth if kind == TURN or not links.has_sessions else np.zeros_like(links.depth)
    found = []
    edges = [*DEPTHS, 2**31]
    begin = 0
    for end in range(1, len(edges)):
        inside = (by_depth[links.parent[children]] >= edges[begin]) & (by_depth[links.parent[children]] < edges[end])
        rest = by_depth[links.parent[children]] >= edges[end]
        if end + 1 < len(edges) and (inside.sum() < ENOUGH_LINKS or rest.sum() < ENOUGH_LINKS) and rest.any():
            continue
        if not inside.any():
            break
        parents = (by_depth >= edges[begin]) & (by_depth < edges[end])
        found.append(_class(links, children[inside], np.flatnonzero(parents), edges[begin], span_ns, block_tokens))
        begin = end
    return found


def _class(links: Links, children: Ints, parents: Ints, from_depth: int, span_ns: int, block_tokens: int) -> Class:
    above = links.parent[children]
    gap = links.arrival_ns[children] - links.arrival_ns[above]
    left = np.sort(links.arrival_ns[0] + span_ns - links.arrival_ns[parents])  # how long the trace follows each parent
    followed = 1 - np.searchsorted(left, gap) / len(left)
    weight = np.minimum(1 / np.maximum(followed, 1e-9), MAX_WEIGHT)
    sizes = _size_edges(links.input_tokens[parents])
    of_parent, of_child = (np.searchsorted(sizes, links.input_tokens[rows]) for rows in (parents, above))
    new = new_tokens(links, block_tokens)
    much_new = float(np.quantile(new[parents], MUCH_NEW))
    goes_on = _goes_on(of_parent, of_child, new[parents] >= much_new, new[above] >= much_new, weight, len(sizes) + 1)

    kept, path_blocks = links.kept[children], links.path.lengths[above]
    whole = kept >= np.maximum(path_blocks, 1)
    prompt = ~whole & (kept >= np.maximum(links.input_blocks[above], 1))
    same = ~whole & ~prompt & (kept == links.kept[above])
    branch = ~(whole | prompt | same)
    think = links.think_ns[children]
    wait = np.where(think >= 0, think, gap) / NS
    rows = np.zeros(len(links.kind), dtype=bool)
    appended, branched = rows.copy(), rows.copy()
    appended[children[whole | prompt]] = True
    branched[children[same | branch]] = True
    return Class(
        from_depth=from_depth,
        sizes=[float(f"{one:.4g}") for one in sizes],
        much_new=much_new,
        goes_on=goes_on,
        wait_s=quantiles(wait, weight),
        whole=_shares(whole, weight, of_child, len(sizes) + 1),
        prompt=_shares(prompt, weight, of_child, len(sizes) + 1),
        same=_shares(same, weight, of_child, len(sizes) + 1),
        kept_share=[
            quantiles((kept / np.maximum(links.input_blocks[above], 1))[branch & (of_child == size)])
            for size in range(len(sizes) + 1)
        ],
        appended=_lengths(links, appended, block_tokens),
        branched=_lengths(links, branched, block_tokens),
        new_follows=float(f"{spearman(new[children], new[above]):.3g}"),
    )


def _goes_on(
    of_parent: Ints, of_child: Ints, parent_much: NDArray[np.bool_], child_much: NDArray[np.bool_], weight: Floats, sizes: int
) -> tuple[list[float], list[float]]:
    """Links / parents by size, for those without and with many new tokens; pooled where there are few of a kind."""
    pooled = np.bincount(of_child, weights=weight, minlength=sizes) / np.maximum(np.bincount(of_parent, minlength=sizes), 1)
    found = []
    for parents, children in ((~parent_much, ~child_much), (parent_much, child_much)):
        total = np.bincount(of_parent[parents], minlength=sizes)
        rate = np.bincount(of_child[children], weights=weight[children], minlength=sizes) / np.maximum(total, 1)
        found.append([float(f"{one:.4g}") for one in np.where(total >= ENOUGH_PARENTS, rate, pooled)])
    return found[0], found[1]


def _shares(those: NDArray[np.bool_], weight: Floats, size: Ints, sizes: int) -> list[float]:
    total = np.maximum(np.bincount(size, weights=weight, minlength=sizes), 1e-9)
    return [float(f"{one:.4g}") for one in np.bincount(size, weights=weight * those, minlength=sizes) / total]


def _size_edges(tokens: Ints) -> Floats:
    shares, taken = [], 0.0
    for share in SIZES:
        if min(share - taken, 1 - share) * len(tokens) >= ENOUGH_PARENTS:
            shares.append(share)
            taken = share
    return np.unique(np.quantile(tokens, shares)) if shares else np.empty(0)


def _service(links: Links) -> Service | None:
    known = (links.service_ns >= 0) & (links.output_tokens > 0)
    if known.sum() < 10 or known.mean() < 0.2:
        return None
    seconds, tokens = links.service_ns[known] / NS, links.output_tokens[known].astype(np.float64)
    tpot, ttft = np.polyfit(tokens, seconds, 1) if tokens.min() < tokens.max() else (0.0, float(seconds.mean()))
    tpot = max(float(tpot), 0.0)
    ttft = max(float(seconds.mean() - tpot * tokens.mean()), 1e-3)
    return Service(ttft_s=float(f"{ttft:.4g}"), tpot_s=float(f"{tpot:.4g}"), factor=quantiles(seconds / (ttft + tpot * tokens)))


def _commonest(table: pa.Table, name: str) -> str | None:
    counts = table[name].drop_null().value_counts().to_pylist() if name in table.column_names else []
    return max(counts, key=lambda one: one["counts"])["values"] if counts else None
