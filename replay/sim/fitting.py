"""Step costs out of measured outcomes: each gap between two tokens of an answer is one step of the engine. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from replay.outcome import Outcome
from replay.sim.presets import StepCosts

Floats = NDArray[np.float64]

MAX_GAPS = 40_000
MIN_GAPS = 30
SAME_STEP = 0.25  # of the median gap: tokens of one step reach the client so far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """What ran during gaps between two tokens of one answer; all shapes [gaps]."""

    seconds: Floats
    sequences: Floats  # answers under way
    context_tokens: Floats  # theirs, together
    prompt_tokens: Floats  # computed, not cached, of requests whose first token came at the end of the gap
    pairs: Floats  # query-key pairs of these


def gaps_of(outcomes: Sequence[Outcome]) -> Gaps:
    done = [one for one in outcomes if one.error_kind is None and one.first_token_ns and one.chunk_gaps_us and one.input_tokens]
    ends: list[Floats] = []
    gaps: list[Floats] = []
    events: list[tuple[Floats, Floats, Floats]] = []  # times, change of sequences, change of context
    for one in done:
        own = np.asarray(one.chunk_gaps_us, dtype=np.float64) / 1e6
        tokens = np.asarray(one.chunk_tokens or [1] * (len(own) + 1), dtype=np.float64)
        if len(tokens) != len(own) + 1 or tokens.min() < 1:
            continue
        times = (one.first_token_ns or 0) / 1e9 + np.concatenate([[0.0], np.cumsum(own)])
        ends.append(times[1:])
        gaps.append(own / tokens[1:])  # several tokens in one chunk: as many steps
        prompt = float(one.input_tokens or 0)
        counts = np.zeros(len(times) + 1)
        counts[0], counts[-1] = 1, -1
        context = np.concatenate([tokens, [-(prompt + tokens.sum())]])
        context[0] += prompt
        events.append((np.append(times, times[-1]), counts, context))
    if not gaps:
        none = np.zeros(0)
        return Gaps(seconds=none, sequences=none, context_tokens=none, prompt_tokens=none, pairs=none)
    end, seconds = np.concatenate(ends), np.concatenate(gaps)
    stride = -(-len(end) // MAX_GAPS)
    end, seconds = end[::stride], seconds[::stride]
    times, counts, context = (np.concatenate(part) for part in zip(*events, strict=True))
    middle = end - seconds / 2
    late = SAME_STEP * float(np.median(seconds))
    firsts, prompts, pairs = _prompts(done)
    return Gaps(
        seconds=seconds,
        sequences=_running_sum(times, counts, middle),
        context_tokens=_running_sum(times, context, middle),
        prompt_tokens=_running_sum(firsts, prompts, end + late) - _running_sum(firsts, prompts, end - seconds + late),
        pairs=_running_sum(firsts, pairs, end + late) - _running_sum(firsts, pairs, end - seconds + late),
    )


def _prompts(done: Sequence[Outcome]) -> tuple[Floats, Floats, Floats]:
    """(first token, s; computed prompt tokens; query-key pairs) of each request."""
    cached = np.array([one.cached_tokens or 0 for one in done], dtype=np.float64)
    computed = np.array([one.input_tokens or 0 for one in done], dtype=np.float64) - cached
    firsts = np.array([one.first_token_ns or 0 for one in done], dtype=np.float64) / 1e9
    return firsts, computed, computed * cached + computed * (computed + 1) / 2


def _running_sum(times: Floats, changes: Floats, at: Floats) -> Floats:
    order = np.argsort(times, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(changes[order])])
    found: Floats = sums[np.searchsorted(times[order], at, side="right")]
    return found


def costs_from(gaps: Gaps, max_num_batched_tokens: int) -> StepCosts | None:
    """Regression of the gaps; None where there are too few.

    Without a prompt in them: gap = overhead + weights + sequences * token overhead + context * KV. With one, where that
    is not enough: gap = overhead + tokens * compute + pairs * attention. What both call overhead is told apart only by
    the second, so by few gaps: prediction needs the sums.
    """
    alone = gaps.prompt_tokens == 0
    if alone.sum() < MIN_GAPS:
        return None
    ones = np.ones(len(gaps.seconds))
    columns = np.stack([ones, gaps.sequences, gaps.context_tokens], axis=1)
    step_s, token_overhead_s, context_s = _fit(columns[alone], gaps.seconds[alone])
    decode_s = columns @ np.array([step_s, token_overhead_s, context_s])
    whole = (gaps.prompt_tokens > 0) & (gaps.prompt_tokens <= max_num_batched_tokens)  # else some steps saw a part of it
    longer = whole & (gaps.seconds > 1.1 * decode_s)
    costs = StepCosts(
        overhead_s=0.0,
        token_overhead_s=token_overhead_s,
        weights_s=step_s,
        context_token_s=context_s,
        token_s=step_s / 256,  # where no prompt was ever longer than a step: as of a GPU whose ridge is 256 tokens
        pair_s=0.0,
    )
    if longer.sum() < MIN_GAPS:
        return costs
    tokens = gaps.prompt_tokens + gaps.sequences
    compute = np.stack([ones, tokens, gaps.pairs + gaps.context_tokens], axis=1)
    beside = gaps.seconds - token_overhead_s * tokens
    overhead_s, token_s, pair_s = _fit(compute[longer], np.maximum(beside[longer], 1e-9))
    overhead_s = min(overhead_s, step_s)
    return replace(costs, overhead_s=overhead_s, weights_s=step_s - overhead_s, token_s=token_s, pair_s=pair_s)


def _fit(columns: Floats, seconds: Floats) -> list[float]:
    """Coefficients >= 0 of least relative error, outliers left out (twice: more than 4 median deviations away)."""
    keep = np.ones(len(seconds), dtype=bool)
    found = np.zeros(columns.shape[1])
    for _ in range(3):
        found = _nonnegative(columns[keep] / seconds[keep, None], np.ones(int(keep.sum())))
        error = columns @ found / seconds - 1
        spread = float(np.median(np.abs(error - np.median(error))))
        again = np.abs(error - np.median(error)) <= 4 * spread + 1e-6
        if again.sum() < MIN_GAPS:
            break
        keep = again
    return [float(value) for value in found]


def _nonnegative(columns: Floats, wanted: Floats) -> Floats:
    """Least squares with no negative coefficient: the best of all subsets of so few columns."""
    width = columns.shape[1]
    best, best_error = np.zeros(width), float(wanted @ wanted)
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    for count in range(1, width + 1):
        for some in combinations(range(width), count):
            chosen = list(some)
            part = np.linalg.lstsq(columns[:, chosen] / scale[chosen], wanted, rcond=None)[0]
            error = float(((columns[:, chosen] / scale[chosen] @ part - wanted) ** 2).sum())
            if part.min() >= 0 and error < best_error:
                best, best_error = np.zeros(width), error
                best[chosen] = part / scale[chosen]
    return best
