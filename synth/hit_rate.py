"""Hit rate at a KV size: what an LRU prefix cache of that many tokens serves, and system prompts that make it so. Pure.

Exact, not a model: the same pass over the same touches as `chatreel analyze`, but with a whole turn or a whole level of a
shared beginning as one unit of varying width, which no cache can tell from its blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synth.model import MAX_SYSTEM_TOKENS
from synth.prefixes import Pools, prefix_numbers
from synth.share import TOLERANCE, Skeleton, scalable
from tracer.analysis.reuse import Touches, hit_curve
from tracer.blocks import Blocks
from tracer.errors import TraceError
from tracer.schema import BASE_BLOCK_TOKENS

Ints = NDArray[np.int64]
CLOSE_ENOUGH = 0.002
LENGTHS_TRIED = 24  # on the way from no system prompt to the longest; the rate need not be monotone
MAX_HALVINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paths:
    """Which levels and turns a prompt is made of; lengths come later. Positions are [references]."""

    blocks: Blocks
    level: Ints  # flat place in [sessions, levels], -1 for turns
    request: Ints  # the request whose turn it is, -1 for levels


def touches(skeleton: Skeleton, pools: Pools) -> Touches:
    """What a cache with pages of 16 tokens sees of these requests."""
    return _touches(skeleton, pools, _paths(skeleton))


def solve_hit_rate(skeleton: Skeleton, pools: Pools, target: float, kv_tokens: int) -> tuple[Pools, float]:
    """Pools whose system prompts are scaled so that the hit rate comes closest to the target, and the rate they give.

    Longer system prompts add hits until they push each other and the sessions' histories out of the cache. So lengths
    from none to the longest are tried first, then the shortest stretch that crosses the target is halved. `TraceError`
    with the feasible range if there is none.
    """
    pools, paths = scalable(pools), _paths(skeleton)

    def rate(factor: float) -> float:
        return hit_curve(_touches(skeleton, pools.scaled(factor), paths)).hit_rate_at(kv_tokens // BASE_BLOCK_TOKENS)

    longest = int(pools.system_tokens.max())
    factors = [0.0, *np.geomspace(BASE_BLOCK_TOKENS, MAX_SYSTEM_TOKENS, LENGTHS_TRIED) / longest]
    tried, is_crossed = closest(factors, target, rate)
    factor, found = min(tried, key=lambda one: abs(one[1] - target))
    if abs(found - target) > TOLERANCE / 2 and not is_crossed:
        raise _infeasible(target, kv_tokens, [one for _, one in tried])
    return pools.scaled(factor), found


def closest(settings: Sequence[float], target: float, rate: Callable[[float], float]) -> tuple[list[tuple[float, float]], bool]:
    """Settings tried with their rates, and whether some stretch between two neighbours crosses the target: it is then halved."""
    tried: list[tuple[float, float]] = []
    for setting in settings:
        tried.append((setting, rate(setting)))
        if len(tried) > 1 and min(tried[-2][1], tried[-1][1]) <= target <= max(tried[-2][1], tried[-1][1]):
            return tried + _halved(tried[-2], tried[-1], target, rate), True
    return tried, False


def _halved(
    low: tuple[float, float], high: tuple[float, float], target: float, rate: Callable[[float], float]
) -> list[tuple[float, float]]:
    tried: list[tuple[float, float]] = []
    for _ in range(MAX_HALVINGS):
        factor = (low[0] + high[0]) / 2
        middle = (factor, rate(factor))
        tried.append(middle)
        if abs(middle[1] - target) <= CLOSE_ENOUGH:
            break
        if (middle[1] < target) == (low[1] < target):
            low = middle
        else:
            high = middle
    return tried


def _infeasible(target: float, kv_tokens: int, rates: list[float]) -> TraceError:
    least, most = min(rates), max(rates)
    if target < least:
        why = (
            f"Already {rates[0]:.3f} comes from sessions that repeat their own history and from documents, without any system "
            "prompt. Ask for fewer turns, longer think times, a higher rate or a smaller KV size"
        )
    else:
        why = (
            "Longer system prompts only push each other and the histories out. Ask for fewer system prompts, a higher zipf, "
            "fewer or shorter new tokens, shorter think times or a larger KV size"
        )
    return TraceError(
        "no length of the system prompts gives this hit rate",
        seen=f"hit_rate = {target:g} at {kv_tokens:,} tokens",
        wanted=f"{least:.3f} to {most:.3f}",
        next_step=why,
    )


def _paths(skeleton: Skeleton) -> _Paths:
    numbers = prefix_numbers(skeleton.choices)
    sessions, levels = numbers.shape
    requests = len(skeleton.session)
    order = np.lexsort((skeleton.turn, skeleton.session))
    place = np.empty(requests, dtype=np.int64)
    place[order] = np.arange(requests)
    each = levels + skeleton.turn + 1
    begin = np.cumsum(each) - each
    level = np.full(int(each.sum()), -1, dtype=np.int64)
    places = begin[:, None] + np.arange(levels)
    level[places] = skeleton.session[:, None] * levels + np.arange(levels)
    request = np.full(len(level), -1, dtype=np.int64)
    turns = skeleton.turn + 1
    counted = np.arange(int(turns.sum())) - np.repeat(np.cumsum(turns) - turns, turns)
    request[np.repeat(begin + levels, turns) + counted] = order[np.repeat(place - skeleton.turn, turns) + counted]
    names = np.where(level >= 0, numbers.ravel()[np.maximum(level, 0)], request + int(numbers.max(initial=-1)) + 1)
    blocks = Blocks(offsets=np.concatenate([[0], np.cumsum(each)]), ids=names.astype(np.int32))
    return _Paths(blocks=blocks, level=level, request=request)


def _touches(skeleton: Skeleton, pools: Pools, paths: _Paths) -> Touches:
    ends = pools.level_ends(skeleton.choices)
    level_units = np.diff(ends // BASE_BLOCK_TOKENS, prepend=0, axis=1).ravel()
    history = ends[:, -1][skeleton.session] + skeleton.history
    prompt = history + skeleton.new_tokens
    turn_units = (prompt + skeleton.output_tokens) // BASE_BLOCK_TOKENS - history // BASE_BLOCK_TOKENS
    units = np.where(paths.level >= 0, level_units[np.maximum(paths.level, 0)], turn_units[np.maximum(paths.request, 0)])
    return Touches(
        blocks=paths.blocks,
        units=units,
        lookup_units=(prompt - 1) // BASE_BLOCK_TOKENS,
        prompt_tokens=prompt,
        unit_tokens=BASE_BLOCK_TOKENS,
    )
