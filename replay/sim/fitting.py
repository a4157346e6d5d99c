"""Step costs out of the steps that a client saw, and how far the steps tell them. Pure."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from replay.sim.presets import StepCosts
from replay.sim.seen import Steps

Floats = NDArray[np.float64]

MIN_STEPS = 30
IN_STRATUM = 100  # steps of like batch, context and prompts count together as so many
NAMES = ("overhead_s", "token_overhead_s", "weights_s", "context_token_s", "token_s", "pair_s", "request_overhead_s")
BORDERS = (1.02, 1.1, 1.4)  # a step so much longer than its answers need is bound by computing: starts that are tried
GROUPS = 5
FINEST = 2e-4  # relative error that is none: clients note microseconds
SHORTEST = 0.5  # of a short step: what is shorter is tokens that came late, and the next ones with them
HUBER = 1.345  # of robust standard deviations; 95 % efficient for a normal distribution: Huber, "Robust Statistics" (1981)
IDENTIFIED = 0.1  # relative standard error of a cost that the steps tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    costs: StepCosts
    request_overhead_s: float  # as far as an idle engine told it
    relative_error: dict[str, float]  # standard error of each of NAMES / its value; inf: the steps do not tell it
    spread: float  # robust relative deviation of the steps
    loss: float  # mean relative deviation of all steps, also of those that were left out


def costs_from(steps: Steps, *, carefully: bool = False) -> Fit | None:
    """Least relative error under Huber's loss over all steps; None where there are too few.

    seconds = overhead + tokens * token overhead + max(weights + context * KV, tokens * compute + pairs * attention),
    and the request's own overhead where they count from when it was sent. `carefully`: standard errors also from fits that
    leave out a fifth of the run each (jackknife), because what disturbs one step disturbs its neighbours too.
    """
    if len(steps):
        steps = steps.part(steps.seconds > SHORTEST * np.quantile(steps.seconds, 0.1))
    everything, clear = steps, steps.part(~steps.doubtful)
    steps = clear if len(clear) >= max(MIN_STEPS, len(steps) // 20) else steps
    if (steps.prompt_tokens == 0).sum() < MIN_STEPS:
        return None
    share = _share(steps)
    found = {border: _from(steps, share, border) for border in BORDERS}
    border = min(BORDERS, key=lambda one: found[one][1])
    costs, _, weights = found[border]
    error = _error(steps, costs)
    computing = _is_computing(steps, costs)
    columns = _columns(steps, computing)
    spread = max(_spread(error), FINEST)
    told = _told(columns, weights, costs, spread)
    if carefully:
        again = _left_out(steps, share, border, costs)
        told = {name: max(one, other) for (name, one), other in zip(told.items(), again.tolist(), strict=True)}
    costs = _with_guess(costs, columns)
    return Fit(
        costs=StepCosts(**dict(zip(NAMES[:-1], costs.tolist()[:-1], strict=True))),
        request_overhead_s=float(costs[-1]),
        relative_error=told,
        spread=spread,
        loss=_loss(everything, costs),
    )


def _left_out(steps: Steps, share: Floats, border: float, costs: Floats) -> Floats:
    """Relative standard errors of a delete-a-group jackknife over stretches of the run; inf of a cost of 0."""
    group = np.arange(len(steps)) * GROUPS // len(steps)
    fits = np.stack([_from(steps.part(group != one), share[group != one], border)[0] for one in range(GROUPS)])
    variance = (GROUPS - 1) / GROUPS * ((fits - fits.mean(axis=0)) ** 2).sum(axis=0)
    found: Floats = np.sqrt(variance) / np.where(costs > 0, costs, np.nan)
    return np.nan_to_num(found, nan=np.inf)


def _loss(steps: Steps, costs: Floats) -> float:
    """Of doubtful steps too: a wrong token budget makes many."""
    return float(np.average(np.minimum(np.abs(_error(steps, costs)), 0.5), weights=_share(steps)))


def _with_guess(costs: Floats, columns: Floats) -> Floats:
    """Where no step was bound by computing: as of a GPU whose ridge is 256 tokens."""
    if not columns[:, 4].any():
        costs = costs.copy()
        costs[4] = (costs[0] + costs[2]) / 256
    return costs


def _share(steps: Steps) -> Floats:
    """Weights by which a stratum of many steps does not drown one of few."""
    keys = np.stack([np.log2(1 + part).astype(np.int64) for part in (steps.tokens, steps.context_tokens, steps.prompt_tokens)])
    _, stratum, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    found: Floats = np.minimum(1.0, IN_STRATUM / counts)[stratum.ravel()]
    return found


def _from(steps: Steps, share: Floats, border: float) -> tuple[Floats, float, Floats]:
    """(costs, loss, weights) after turns of: which side binds each step, how much it weighs, which costs are best."""
    prompts = steps.prompt_tokens > 0
    answers = _columns(steps, np.zeros(len(steps), dtype=bool))
    weights = share * ~prompts
    costs = np.zeros(len(NAMES))
    for _ in range(10):
        costs = _nonnegative(answers[:, 1:4], weights)
        costs = np.array([0.0, *costs, 0.0, 0.0, 0.0])
        weights = share * ~prompts * _huber(1 - answers @ costs)
    computing = prompts & (answers @ costs < 1 / border)
    for _ in range(60):
        columns = _columns(steps, computing)
        weights = share * _huber(_error(steps, costs)) if costs[4] or costs[5] else share
        again = _nonnegative(columns, weights)
        settled = bool(np.allclose(again, costs, rtol=1e-7))
        costs, computing = again, _is_computing(steps, again)
        if settled:
            break
    error = _error(steps, costs)
    scale = max(float(np.average(np.abs(error), weights=share)), 1e-12)
    return costs, scale, share * _huber(error)


def _columns(steps: Steps, computing: NDArray[np.bool_]) -> Floats:
    """[steps, 7] per second of the step, so that costs @ columns is 1 where they fit."""
    one = np.ones(len(steps))
    tokens, memory = steps.tokens, ~computing
    parts = [one, tokens, memory, steps.context_tokens * memory, tokens * computing, steps.pairs * computing, steps.alone]
    found: Floats = np.stack(parts, axis=1) / steps.seconds[:, None]
    return found


def _is_computing(steps: Steps, costs: Floats) -> NDArray[np.bool_]:
    _, _, weights_s, context_s, token_s, pair_s, _ = costs.tolist()
    found: NDArray[np.bool_] = steps.tokens * token_s + steps.pairs * pair_s > weights_s + steps.context_tokens * context_s
    return found


def _error(steps: Steps, costs: Floats) -> Floats:
    found: Floats = _columns(steps, _is_computing(steps, costs)) @ costs - 1
    return found


def _spread(error: Floats) -> float:
    return 1.4826 * float(np.median(np.abs(error)))


def _huber(error: Floats) -> Floats:
    limit = HUBER * max(_spread(error), FINEST)
    found: Floats = np.minimum(1.0, limit / np.maximum(np.abs(error), 1e-12))
    return found


def _told(columns: Floats, weights: Floats, costs: Floats, spread: float) -> dict[str, float]:
    """Standard errors of weighted least squares, relative; of steps that count once a stratum's share is taken.

    A cost of 0 may be another, so it counts in the errors of the others.
    """
    used = np.flatnonzero(columns.any(axis=0))
    found = dict.fromkeys(NAMES, float("inf"))
    if not len(used):
        return found
    scale = np.abs(columns[:, used]).max(axis=0)
    part = columns[:, used] / scale
    values, vectors = np.linalg.eigh(part.T @ (part * weights[:, None]))
    error = spread * np.sqrt((vectors**2 / np.maximum(values, 1e-15 * values.max())).sum(axis=1)) / scale
    for place, one in zip(used.tolist(), error.tolist(), strict=True):
        if costs[place] > 0:
            found[NAMES[place]] = one / float(costs[place])
    return found


def _nonnegative(columns: Floats, weights: Floats) -> Floats:
    """Weighted least squares to ones with no negative coefficient: the best of all subsets of so few columns."""
    width = columns.shape[1]
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    part = columns / scale
    gram, wanted = part.T @ (part * weights[:, None]), part.T @ weights
    best, best_gain = np.zeros(width), 0.0
    for count in range(1, width + 1):
        for some in combinations(range(width), count):
            chosen = list(some)
            values = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], wanted[chosen], rcond=1e-12)[0]
            gain = float(2 * values @ wanted[chosen] - values @ gram[np.ix_(chosen, chosen)] @ values)
            if values.min() >= 0 and gain > best_gain + 1e-15:
                best, best_gain = np.zeros(width), gain
                best[chosen] = values / scale[chosen]
    return best
