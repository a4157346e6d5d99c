"""Dials of a fitted model: each changes one thing and keeps the rest. Values, and models with other tables. Pure.

Lengths are dialed while requests are drawn: what goes on, and how much of a prompt is kept, is still decided at the lengths
that the trace had. Sharing is dialed there too: which part of the blocks that would be shared is, at the same lengths.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from synth.learned import PROBABILITIES, Class, Model
from synth.lengths import counts as counts_of
from synth.model import Distribution

type Floats = NDArray[np.float64]
type Ints = NDArray[np.int64]
_GOLDEN = (np.sqrt(5) - 1) / 2  # its multiples are as even in [0, 1) as can be, however many there are
_GRID = (np.arange(4000) + 0.5) / 4000
NEVER_ENDS = 0.9999  # chance of a next turn that odds without bound come to


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """A number, or a factor of what the trace had."""

    value: float
    is_factor: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """Tokens: a factor of the learned ones, or a distribution in their place, at the same ranks."""

    factor: float = 1.0
    law: Distribution | None = None

    def of(self, learned: Floats, scores: Floats) -> Ints:
        """`learned`: tokens at these normal scores."""
        if self.law is not None:
            return counts_of(self.law, scores)
        return np.rint(learned * self.factor).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dials:
    input_tokens: Length = Length()  # new tokens of a request, beyond what it keeps
    output_tokens: Length = Length()
    shared_part: float = 1.0  # of the blocks that starts have from global prefixes, and others from requests of other sessions
    more_shared: float = 0.0  # blocks by which every global prefix is longer, at the cost of what is a prompt's own

    def of_start(self, blocks: Ints, number: Ints, room: Ints) -> Ints:
        """Blocks of a global prefix that a start has, where its learned prefix has `blocks`."""
        if self.shared_part == 1.0 and not self.more_shared:
            return blocks
        part = rounded(blocks, self.shared_part, number) + rounded(np.ones_like(blocks), self.more_shared, number)
        return np.asarray(np.minimum(part, room))

    def of_link(self, blocks: Ints) -> Ints:
        return blocks if self.shared_part == 1.0 else rounded(blocks, self.shared_part, np.arange(len(blocks)))


def rounded(counts: Ints, factor: float, number: Ints) -> Ints:
    """Counts times the factor, up or down by turns so that the mean stays. Grows with both."""
    return np.asarray(np.floor(counts * factor + number * _GOLDEN % 1.0)).astype(np.int64)


def with_think(model: Model, factor: float) -> Model:
    turns = [msgspec.structs.replace(one, wait_s=[wait * factor for wait in one.wait_s]) for one in model.turns]
    return model if factor == 1 else msgspec.structs.replace(model, turns=turns)


def with_turns(model: Model, odds: float) -> Model:
    """The odds of a next turn times a factor, everywhere; of a geometric law, later turns are then so many times as many."""

    def at(chance: float) -> float:
        if chance >= 1:  # several go on from it, or the trace's end made it seem so: the more go on, the less may that multiply
            return chance * odds if odds < 1 else 1 + (chance - 1) / odds
        return min(chance * odds / (1 - chance + chance * odds), max(chance, NEVER_ENDS))

    def changed(one: Class) -> Class:
        few, many = ([at(chance) for chance in some] for some in one.goes_on)
        return msgspec.structs.replace(one, goes_on=(few, many))

    return model if odds == 1 else msgspec.structs.replace(model, turns=[changed(one) for one in model.turns])


def gaps_cv(model: Model) -> float:
    """CV of the gaps between starts, at an even rate."""
    starts = model.starts
    match starts.law:
        case "empirical":
            gaps = np.interp(_GRID, PROBABILITIES, starts.gaps or [1.0] * len(PROBABILITIES))
            return float(gaps.std() / gaps.mean())
        case "gamma" if starts.shape:
            return float(starts.shape**-0.5)
        case "weibull" if starts.shape:
            gaps = (-np.log1p(-_GRID)) ** (1 / starts.shape)
            return float(gaps.std() / gaps.mean())
    return 1.0


def with_burstiness(model: Model, cv: float) -> Model:
    """Gamma gaps of this CV inside each window; how many starts a window has is kept."""
    shape = float(f"{cv**-2:.6g}")
    return msgspec.structs.replace(model, starts=msgspec.structs.replace(model.starts, law="gamma", shape=shape, gaps=None))
