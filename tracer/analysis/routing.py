"""What several replicas with a cache each make of the same trace, by the rule that spreads the requests. Pure.

Each replica sees its own part of the stream, so its hit curve is exact like the one of a single cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracer.analysis.memory import CURVE_POINTS
from tracer.analysis.reuse import HitCurve, Touches, hit_curve, touches_as_engine
from tracer.blocks import Blocks
from tracer.schema import Footer
from tracer.tracefile import column

Ints = NDArray[np.int64]
Rule = Literal["round_robin", "session_sticky", "prefix_aware"]
RULES: tuple[Rule, ...] = get_args(Rule)

MATCH_SHARE = 0.5  # of the prompt; SGLang's router: cache_threshold 0.5 by default at first, 0.3 later
MAX_IMBALANCE = 1.5  # a replica with more than this times its even share of the tokens so far gets no more for their prefix


class RoutingPoint(msgspec.Struct, frozen=True, kw_only=True):
    cache_tokens_per_replica: int
    hit_rate: float


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    rule: Rule
    replicas: int
    curve: list[RoutingPoint]
    heaviest_share: float  # of all prompt tokens, on the replica that got most; 1 / replicas is even


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCurves:
    curves: Sequence[HitCurve]

    def hit_rate_at(self, capacity_units_each: int) -> float:
        """Token-weighted over all requests, every replica with a cache of this size."""
        total = sum(one.prompt_tokens for one in self.curves)
        hits = sum(one.hits_at(capacity_units_each) * one.unit_tokens for one in self.curves)
        return hits / total if total else 0.0


def describe(
    table: pa.Table, footer: Footer, replicas: int, sizes_tokens: Sequence[int] = (), rules: Sequence[Rule] = RULES
) -> list[Routing]:
    """Hit rates at log-spaced sizes per replica, and at `sizes_tokens`. Without sessions nothing is sticky: no such rule."""
    touches, session = touches_as_engine(table, footer), column(table, "session_id")
    if not (session >= 0).any():
        rules = [rule for rule in rules if rule != "session_sticky"]
    return [_described(touches, session, replicas, sizes_tokens, rule) for rule in rules]


def _described(touches: Touches, session: Ints, replicas: int, sizes_tokens: Sequence[int], rule: Rule) -> Routing:
    replica_of = ROUTES[rule](touches, session, replicas)
    found = replica_curves(touches, replica_of, replicas)
    largest = max(one.unique for one in found.curves)
    sizes = {round(float(one)) for one in np.geomspace(max(1.0, largest / 1000), max(largest, 1), CURVE_POINTS)}
    sizes |= {tokens // touches.unit_tokens for tokens in sizes_tokens}
    load = np.bincount(replica_of, weights=touches.prompt_tokens, minlength=replicas)
    return Routing(
        rule=rule,
        replicas=replicas,
        curve=[
            RoutingPoint(cache_tokens_per_replica=size * touches.unit_tokens, hit_rate=found.hit_rate_at(size))
            for size in sorted(sizes)
        ],
        heaviest_share=float(load.max() / load.sum()) if load.sum() else 0.0,
    )


def replica_curves(touches: Touches, replica_of: Ints, replicas: int) -> ReplicaCurves:
    return ReplicaCurves(curves=[hit_curve(part_of(touches, replica_of == one)) for one in range(replicas)])


def part_of(touches: Touches, chosen: NDArray[np.bool_]) -> Touches:
    """Only the chosen requests, ids numbered densely again."""
    blocks, keep = touches.blocks, np.repeat(chosen, touches.blocks.lengths)
    lengths = blocks.lengths[chosen]
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    ids = blocks.ids[keep]
    present = np.zeros(int(blocks.ids.max(initial=-1)) + 1, dtype=np.int32)
    present[ids] = 1
    dense = np.cumsum(present, dtype=np.int32) - 1
    return Touches(
        blocks=Blocks(offsets=offsets, ids=dense[ids].astype(np.int32, copy=False)),
        units=touches.units[keep],
        lookup_units=touches.lookup_units[chosen],
        prompt_tokens=touches.prompt_tokens[chosen],
        unit_tokens=touches.unit_tokens,
    )


def round_robin(touches: Touches, session: Ints, replicas: int) -> Ints:
    """Request k goes to replica k mod n."""
    del session
    return np.arange(len(touches.blocks), dtype=np.int64) % replicas


def session_sticky(touches: Touches, session: Ints, replicas: int) -> Ints:
    """A session's first request goes to the replica that got the fewest sessions so far, the others follow it.

    Requests without a session count as one of their own.
    """
    requests = np.arange(len(touches.blocks), dtype=np.int64)
    keys = np.where(session >= 0, session, session.max(initial=0) + 1 + requests)
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return np.asarray(rank[inverse] % replicas)


def prefix_aware(touches: Touches, session: Ints, replicas: int) -> Ints:
    """To the replica that saw the longest prefix of it, if that is half of the prompt and it is not overloaded.

    Else to the one that got the fewest tokens so far. The rule of SGLang's router (LMSYS, "SGLang v0.4: cache-aware
    load balancer", December 2024), with an endless memory of what went where, and tokens routed as the load.
    """
    del session
    seen_by = np.zeros((replicas, int(touches.blocks.ids.max(initial=-1)) + 1), dtype=bool)
    load = np.zeros(replicas)
    route = np.zeros(len(touches.blocks), dtype=np.int64)
    offsets, prompts = touches.blocks.offsets.tolist(), touches.prompt_tokens.tolist()
    for request, tokens in enumerate(prompts):
        start, end = offsets[request], offsets[request + 1]
        path = touches.blocks.ids[start:end]
        matched = seen_by[:, path] @ touches.units[start:end] * touches.unit_tokens
        # The longest match first, among equals the least loaded.
        best = int(np.lexsort((load, -matched))[0])
        overloaded = load[best] + tokens > MAX_IMBALANCE * (load.sum() + tokens) / replicas and load[best] > load.min()
        if matched[best] < MATCH_SHARE * tokens or overloaded:
            best = int(load.argmin())
        route[request] = best
        load[best] += tokens
        seen_by[best, path] = True
    return route


ROUTES: dict[Rule, Callable[[Touches, Ints, int], Ints]] = {
    "round_robin": round_robin,
    "session_sticky": session_sticky,
    "prefix_aware": prefix_aware,
}
