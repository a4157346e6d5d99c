"""What KV memory buys: footprint, reuse times and distances, hits by cause, and how much of it is needed when. Pure.

All of it is about the cache as an engine sees it (`touches_as_engine`): full pages, answers occupy memory too.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracer.analysis.distances import reuse_segments
from tracer.analysis.groups import sharing_groups
from tracer.analysis.policies import EvictionPoint, eviction
from tracer.analysis.reuse import HitCurve, Touches, hit_curve, prompt_tokens, touches_as_engine
from tracer.blocks import Blocks
from tracer.schema import Footer
from tracer.tracefile import blocks as block_column
from tracer.tracefile import column

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

GROWTH_POINTS, CURVE_POINTS, DEMAND_POINTS = 40, 20, 120
WARM_UP_SHARE = 0.2  # of the requests: an empty cache says little about one that has run for days
TEN_GB = 10e9
ASSUMED_PREFILL_TOKENS_PER_S = 5000.0  # only where a trace has no end times
ASSUMED_DECODE_TOKENS_PER_S = 30.0


class FootprintPoint(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    tokens: int  # distinct ones, answers included, after so many requests


class ReuseBin(msgspec.Struct, frozen=True, kw_only=True):
    up_to: float  # seconds; the bin starts where the one before ends, the first at 0
    share: float  # of the possible hits


class ReuseTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the same tokens were last touched, over the possible hits, each token the same weight.

    Ancestors are touched whenever a descendant is, so a cache that forgets what was not touched for p90_s seconds keeps
    90 % of the possible hits: the percentiles are also the time to live that is needed.
    """

    p50_s: float
    p90_s: float
    p99_s: float
    histogram: list[ReuseBin]


class ReuseDistance(msgspec.Struct, frozen=True, kw_only=True):
    """Distinct tokens touched since the last touch, over the possible hits: the LRU cache that gives so many of them."""

    p50_tokens: int
    p90_tokens: int
    p99_tokens: int


class MarginalPoint(msgspec.Struct, frozen=True, kw_only=True):
    cache_tokens: int
    hit_rate: float
    gain_of_half_more: float  # of hit rate, at 1.5 times the size
    gain_per_million_tokens: float  # of hit rate, averaged from this size to 1.5 times of it
    gain_of_ten_gb: float | None  # hit rate that 10 GB more buys; None where the bytes per token are not known


class CausePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of prompt tokens; they sum to the hit rate."""

    cache_tokens: int
    global_prefix: float  # in a prefix that at least a twentieth of the requests share
    own_session: float  # beyond it, and the same conversation held it before
    sharing_group: float  # beyond it, brought by other conversations only; where no sessions are known, by any request

    @property
    def hit_rate(self) -> float:
        return self.global_prefix + self.own_session + self.sharing_group


class Causes(msgspec.Struct, frozen=True, kw_only=True):
    cold: list[CausePoint]  # all requests count, the first one meets an empty cache
    warm: list[CausePoint]  # the first `warm_up_share` of the requests fills the cache, but does not count
    warm_up_share: float
    sessions_known: bool


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """KV tokens at evenly spaced times. Running: prompt and whole answer of each request from its arrival to its end.

    An upper bound: answers grow, and running requests may share a prefix. Working sets: distinct tokens that requests
    touched in the last 60 or 600 s.
    """

    at_s: list[float]
    running_tokens: list[int]
    working_set_60s_tokens: list[int]
    working_set_600s_tokens: list[int]
    running_mean_tokens: float  # over time: Little's law
    running_peak_tokens: int
    assumed_ends: int  # requests without an end time; they are taken to run at the rates below
    assumed_prefill_tokens_per_s: float = ASSUMED_PREFILL_TOKENS_PER_S
    assumed_decode_tokens_per_s: float = ASSUMED_DECODE_TOKENS_PER_S


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    footprint: list[FootprintPoint]
    reuse_time: ReuseTime | None  # None: nothing is ever reused
    reuse_distance: ReuseDistance | None
    marginal: list[MarginalPoint]
    causes: Causes
    demand: Demand
    eviction: list[EvictionPoint]


def describe(table: pa.Table, footer: Footer, kv_bytes_per_token: float | None = None) -> Memory:
    """From the columns of an analysis and `end_ns`, in arrival order, blocks present."""
    touches = touches_as_engine(table, footer)
    curve = hit_curve(touches)
    arrival_ns, session = column(table, "arrival_ns"), column(table, "session_id")
    own = session if (session >= 0).any() else None
    runs = touched_runs(touches)
    global_blocks = sharing_groups(block_column(table, "input_blocks"), own).global_blocks
    global_units = global_blocks * footer.block_tokens // touches.unit_tokens
    return Memory(
        footprint=footprint_growth(runs, touches),
        reuse_time=reuse_time(runs, arrival_ns),
        reuse_distance=reuse_distance(curve),
        marginal=marginal_value(curve, kv_bytes_per_token),
        causes=hits_by_cause(touches, runs, curve, global_units, session),
        eviction=eviction(touches, curve),
        demand=demand(
            runs,
            touches.unit_tokens,
            arrival_ns,
            column(table, "end_ns"),
            prompt_tokens(table, footer),
            np.maximum(column(table, "output_tokens"), 0),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Stretches of a request's path that one earlier request touched last, or none at all. All [runs]."""

    request: Ints
    before: Ints  # the request that touched it last, -1 for none
    units: Ints
    depth: Ints  # units above it in the path
    looked_up: Ints  # leading part of `units` that the request looks up
    distance: Ints  # the first unit's stack distance - 1, as in `ReuseSegments`; NEVER for new ones


NEVER = 2**62


def touched_runs(touches: Touches) -> Runs:
    """Known runs in the order of the references, then what is new of each request."""
    offsets = touches.blocks.offsets
    above = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(touches.units)])
    path_units = above[offsets[1:]] - above[offsets[:-1]]
    blocks, units = _occupying(touches)
    found = reuse_segments(blocks, units, path_units)
    new = np.flatnonzero(path_units > found.request_hits)
    request = np.concatenate([found.requests, new])
    depth = np.concatenate([found.depths, found.request_hits[new]])
    width = np.concatenate([found.counts, (path_units - found.request_hits)[new]])
    return Runs(
        request=request,
        before=np.concatenate([found.predecessors, np.full(len(new), -1, dtype=np.int64)]),
        units=width,
        depth=depth,
        looked_up=np.clip(touches.lookup_units[request] - depth, 0, width),
        distance=np.concatenate([found.distances, np.full(len(new), NEVER, dtype=np.int64)]),
    )


def _occupying(touches: Touches) -> tuple[Blocks, Ints]:
    """Without blocks of no units, which are never in a cache."""
    blocks, keep = touches.blocks, touches.units > 0
    if keep.all():
        return blocks, touches.units
    before = np.zeros(len(keep) + 1, dtype=np.int64)
    np.cumsum(keep, out=before[1:])
    return Blocks(offsets=before[blocks.offsets], ids=blocks.ids[keep]), touches.units[keep]


def _spans(offsets: Ints) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip(ends[:-1], ends[1:], strict=True))


def footprint_growth(runs: Runs, touches: Touches) -> list[FootprintPoint]:
    requests = len(touches.blocks)
    new = np.bincount(runs.request, weights=runs.units * (runs.before < 0), minlength=requests)
    grown = np.cumsum(new) * touches.unit_tokens
    counts = np.unique(np.linspace(1, requests, min(GROWTH_POINTS, requests)).round().astype(np.int64))
    return [FootprintPoint(requests=int(n), tokens=int(grown[n - 1])) for n in counts]


def reuse_time(runs: Runs, arrival_ns: Ints) -> ReuseTime | None:
    seen = (runs.before >= 0) & (runs.looked_up > 0)
    if not seen.any():
        return None
    seconds = (arrival_ns[runs.request[seen]] - arrival_ns[runs.before[seen]]) / 1e9
    weights = runs.looked_up[seen]
    p50, p90, p99 = (weighted_quantile(seconds, weights, share) for share in (0.5, 0.9, 0.99))
    return ReuseTime(p50_s=p50, p90_s=p90, p99_s=p99, histogram=_reuse_bins(seconds, weights))


def weighted_quantile(values: Floats, weights: Ints, share: float) -> float:
    """Nearest rank: the smallest value with at least `share` of the weight at or below it."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    return float(values[order][int(np.searchsorted(below, share * below[-1] - 1e-9, side="left"))])


def _reuse_bins(seconds: Floats, weights: Ints) -> list[ReuseBin]:
    """Four bins to a decade, from 0.1 s (all below it in one) to the longest time."""
    longest = max(float(seconds.max()), 0.1)
    edges = 0.1 * 10 ** (np.arange(int(np.ceil(np.log10(longest / 0.1) * 4 - 1e-9)) + 1) / 4)
    edges[-1] = max(edges[-1], longest)
    sums = np.bincount(np.searchsorted(edges, seconds, side="left"), weights=weights, minlength=len(edges))
    return [ReuseBin(up_to=float(f"{edge:.4g}"), share=float(one)) for edge, one in zip(edges, sums / weights.sum(), strict=True)]


def reuse_distance(curve: HitCurve) -> ReuseDistance | None:
    if not curve.hits_infinite:
        return None
    p50, p90, p99 = (curve.capacity_for(share) * curve.unit_tokens for share in (0.5, 0.9, 0.99))
    return ReuseDistance(p50_tokens=p50, p90_tokens=p90, p99_tokens=p99)


def marginal_value(curve: HitCurve, kv_bytes_per_token: float | None = None) -> list[MarginalPoint]:
    return [_marginal(curve, size, kv_bytes_per_token) for size in sizes_of(curve)]


def sizes_of(curve: HitCurve, points: int = CURVE_POINTS) -> list[int]:
    """Log-spaced sizes in units, from 1/1000 of the footprint to all of it."""
    return [size for size, _ in curve.curve(points)]


def _marginal(curve: HitCurve, size: int, kv_bytes_per_token: float | None) -> MarginalPoint:
    here, step = curve.hit_rate_at(size), max(size // 2, 1)
    more = curve.hit_rate_at(size + step) - here
    gain = ten_gb_more(curve, size, kv_bytes_per_token) if kv_bytes_per_token else None
    return MarginalPoint(
        cache_tokens=size * curve.unit_tokens,
        hit_rate=here,
        gain_of_half_more=more,
        gain_per_million_tokens=more / (step * curve.unit_tokens) * 1e6,
        gain_of_ten_gb=gain,
    )


def ten_gb_more(curve: HitCurve, size: int, kv_bytes_per_token: float) -> float:
    """Hit rate gained by 10 GB more KV memory than `size` units."""
    added = int(TEN_GB // (kv_bytes_per_token * curve.unit_tokens))
    return curve.hit_rate_at(size + added) - curve.hit_rate_at(size)


def hits_by_cause(
    touches: Touches, runs: Runs, curve: HitCurve, global_units: Ints, session: Ints, warm_up_share: float = WARM_UP_SHARE
) -> Causes:
    """Exact at each size: what of a run is hit is its leading part, and so is what of it is a global prefix or its own.

    `global_units` [requests]: leading units that are a global prefix. `session` [requests], -1: none.
    """
    request, depth = runs.request, runs.depth
    to_own = np.maximum(global_units, own_session_units(touches, session))[request] - depth
    to_global = global_units[request] - depth
    warm_from = int(warm_up_share * len(touches.blocks))
    is_warm = request >= warm_from
    totals = touches.prompt_tokens.sum(), touches.prompt_tokens[warm_from:].sum()
    points: tuple[list[CausePoint], list[CausePoint]] = ([], [])
    for size in sizes_of(curve):
        hits = np.clip(size - runs.distance, 0, runs.looked_up)
        common = np.clip(to_global, 0, hits)
        own = np.clip(to_own, 0, hits) - common
        group = hits - common - own
        for into, total, chosen in zip(points, totals, (slice(None), is_warm), strict=True):
            share = touches.unit_tokens / max(int(total), 1)
            into.append(
                CausePoint(
                    cache_tokens=size * touches.unit_tokens,
                    global_prefix=int(common[chosen].sum()) * share,
                    own_session=int(own[chosen].sum()) * share,
                    sharing_group=int(group[chosen].sum()) * share,
                )
            )
    return Causes(cold=points[0], warm=points[1], warm_up_share=warm_up_share, sessions_known=bool((session >= 0).any()))


def own_session_units(touches: Touches, session: Ints) -> Ints:
    """Leading units of each request that an earlier request of its session touched. [requests]"""
    blocks, depth = touches.blocks, np.zeros(len(touches.blocks), dtype=np.int64)
    spans = _spans(blocks.offsets)
    toucher = np.full(int(blocks.ids.max(initial=-1)) + 1, -1, dtype=np.int32)
    for request in np.argsort(session, kind="stable").tolist():
        own = int(session[request])
        if own < 0:
            continue
        start, end = spans[request]
        path = blocks.ids[start:end]
        depth[request] = touches.units[start : start + np.count_nonzero(toucher[path] == own)].sum()
        toucher[path] = own
    return depth


def demand(runs: Runs, unit_tokens: int, arrival_ns: Ints, end_ns: Ints, input_tokens: Ints, output_tokens: Ints) -> Demand:
    """`end_ns` counts from the arrival; -1: not known."""
    start = (arrival_ns - arrival_ns[0]) / 1e9
    assumed = input_tokens / ASSUMED_PREFILL_TOKENS_PER_S + output_tokens / ASSUMED_DECODE_TOKENS_PER_S
    end = start + np.where(end_ns >= 0, end_ns / 1e9, assumed)
    span = float(end.max())
    at = np.linspace(0.0, span, DEMAND_POINTS)
    tokens = input_tokens + output_tokens
    touched, units = start[runs.request], runs.units * unit_tokens
    before = np.where(runs.before >= 0, start[runs.before], -np.inf)
    sets = [active_at(at, np.maximum(touched, before + window), touched + window, units) for window in (60.0, 600.0)]
    return Demand(
        at_s=[round(float(t), 3) for t in at],
        running_tokens=active_at(at, start, end, tokens).tolist(),
        working_set_60s_tokens=sets[0].tolist(),
        working_set_600s_tokens=sets[1].tolist(),
        running_mean_tokens=float((tokens * (end - start)).sum() / span) if span else 0.0,
        running_peak_tokens=int(active_at(start, start, end, tokens).max()),
        assumed_ends=int((end_ns < 0).sum()),
    )


def active_at(at: Floats, start: Floats, end: Floats, weights: Ints) -> Ints:
    """Weight of the intervals [start, end) that hold each time of `at`, which ascends."""
    steps = np.zeros(len(at) + 1)
    np.add.at(steps, np.searchsorted(at, start, side="left"), weights)
    np.subtract.at(steps, np.searchsorted(at, end, side="left"), weights)
    return np.cumsum(steps[:-1]).astype(np.int64)
