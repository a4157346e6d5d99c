"""Prefix share: which part of all prompt tokens an endless cache could serve, and system prompts that make it so. Pure.

The share is exact, not a model: hits are whole blocks of 16, and at least the last prompt token is computed. It needs
lengths and order only, and neither depends on the lengths of system prompts, so it can be solved before any id is made.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from synth.model import MAX_SYSTEM_TOKENS
from synth.prefixes import Pools, depth_seen_before
from synth.sessions import Turns
from tracer.errors import TraceError
from tracer.schema import BASE_BLOCK_TOKENS

Ints = NDArray[np.int64]
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """Lengths of all requests in arrival order, shared beginnings left out. Shapes: [requests]; choices [sessions, levels]."""

    session: Ints
    turn: Ints
    history: Ints  # tokens of earlier turns and their answers
    new_tokens: Ints
    output_tokens: Ints
    choices: Ints
    seen_depth: Ints  # [sessions] leading levels that an earlier session shares

    @classmethod
    def of(cls, found: Iterable[Turns]) -> "Skeleton":
        turns = Turns.joined(list(found))
        choices = turns.choice[turns.turn == 0]
        return cls(
            session=turns.session,
            turn=turns.turn,
            history=turns.history,
            new_tokens=turns.new_tokens,
            output_tokens=turns.output_tokens,
            choices=choices,
            seen_depth=depth_seen_before(choices),
        )


def prefix_share(skeleton: Skeleton, pools: Pools) -> float:
    """Sum of served tokens / sum of prompt tokens, endless cache."""
    ends = pools.level_ends(skeleton.choices)
    reached = np.concatenate([np.zeros((len(ends), 1), dtype=np.int64), ends], axis=1)
    seen = reached[np.arange(len(ends)), skeleton.seen_depth]
    prefix = ends[:, -1][skeleton.session]
    served = np.where(skeleton.turn == 0, seen[skeleton.session], prefix + skeleton.history)
    prompt = prefix + skeleton.history + skeleton.new_tokens
    return float((served // BASE_BLOCK_TOKENS * BASE_BLOCK_TOKENS).sum() / prompt.sum())


def solve_prefix_share(skeleton: Skeleton, pools: Pools, target: float) -> tuple[Pools, float]:
    """Pools whose system prompts are scaled so that the share comes closest to the target, and the share they give.

    With all lengths times f the share is (a + b f) / (c + d f) but for rounding to blocks: monotone, so bisection finds
    it. `TraceError` with the feasible range if no factor does.
    """
    pools = scalable(pools)
    low, high = 0.0, MAX_SYSTEM_TOKENS / int(pools.system_tokens.max())
    at_low, at_high = (prefix_share(skeleton, pools.scaled(factor)) for factor in (low, high))
    least, most = min(at_low, at_high), max(at_low, at_high)
    if not least - TOLERANCE / 2 <= target <= most + TOLERANCE / 2:
        raise _infeasible(target, least, most)
    tried = [(abs(at_low - target), low, at_low), (abs(at_high - target), high, at_high)]
    while high - low > 1e-4 * high:  # finer than one block of the longest system prompt
        middle = (low + high) / 2
        share = prefix_share(skeleton, pools.scaled(middle))
        tried.append((abs(share - target), middle, share))
        if (share < target) == (at_low < at_high):
            low = middle
        else:
            high = middle
        if high * pools.system_tokens.max() < BASE_BLOCK_TOKENS / 2:
            break  # all of them round to nothing
    _, factor, share = min(tried)
    return pools.scaled(factor), share


def scalable(pools: Pools) -> Pools:
    """A pool of empty system prompts has nothing to scale: give them a block each."""
    if pools.system_tokens.any():
        return pools
    return replace(pools, system_tokens=np.full_like(pools.system_tokens, BASE_BLOCK_TOKENS))


def _infeasible(target: float, least: float, most: float) -> TraceError:
    return TraceError(
        "no length of the system prompts gives this prefix share",
        seen=f"prefix_share = {target:g}",
        wanted=f"{least:.3f} to {most:.3f}",
        next_step="Less: fewer turns, more documents or lower zipf. More: fewer system prompts, more turns or requests",
    )
