"""What `fit` learns and `draw` draws from: a workload as one small JSON file. Values only.

Tables of quantiles stand at `PROBABILITIES`; no row of the source is in it.
"""

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError

type Floats = NDArray[np.float64]
type Law = Literal["exponential", "gamma", "weibull", "empirical"]
PROBABILITIES = np.array([0, 0.005, 0.01, *np.linspace(0.025, 0.975, 39), 0.985, 0.99, 0.995, 0.9975, 0.999, 1.0])


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """Starts per window, and how they lie inside one. `gaps`: quantiles of gap x rate, for the empirical law."""

    window_s: float
    counts: list[int]
    law: Law
    shape: float | None = None
    gaps: list[float] | None = None


class Prefix(msgspec.Struct, frozen=True, kw_only=True):
    """A global prefix below another (`under`: its place in the list), and the share of starts that end there."""

    under: int | None
    blocks: int  # from the beginning of the prompt
    share: float


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles (at `PROBABILITIES`) of tokens, and Spearman's rank correlation of the two."""

    new_tokens: list[float]
    output_tokens: list[float]
    correlation: float


class Class(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a depth and what may follow them. Probabilities by size of the prompt, small first."""

    from_depth: int
    sizes: list[float]  # tokens between the sizes
    much_new: float  # new tokens from which on a request counts as having many
    goes_on: tuple[list[float], list[float]]  # mean number of links to it: usually, and where it has many new tokens
    wait_s: list[float]  # quantiles: think time where ends are known, else since its arrival
    whole: list[float]  # by size: share of links that keep prompt and answer
    prompt: list[float]  # that keep the prompt without the answer
    same: list[float]  # that keep as much as it had kept itself; all others keep part of it
    kept_share: list[list[float]]  # by size: quantiles of that part / its blocks
    appended: Lengths  # where the prompt is kept
    branched: Lengths  # where it is not
    new_follows: float  # rank correlation of new tokens with those of the request before


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """Arrival to end: (ttft_s + tpot_s x output tokens) x a factor, by its quantiles."""

    ttft_s: float
    tpot_s: float
    factor: list[float]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A workload learned from a trace. Quantiles stand at the probabilities of the field of that name."""

    chatreel_model: int = 1
    source: str = ""
    requests: int  # of the source
    span_s: float
    mean_input_tokens: float
    block_tokens: int
    has_blocks: bool
    tail_rule: Literal["ceil", "floor"] | None
    has_tails: bool
    has_answers: bool
    has_sessions: bool
    probabilities: list[float]
    starts: Starts
    prefixes: list[Prefix]
    first: Lengths  # of starts, without global prefixes
    turns: list[Class]
    sharing: list[Class]
    service: Service | None
    model: str | None = None
    endpoint: str | None = None


def quantiles(values: NDArray[np.number], weights: Floats | None = None) -> list[float]:
    """At `PROBABILITIES`, four digits; [] without values."""
    if not len(values):
        return []
    order = np.argsort(values, kind="stable")
    weight = np.ones(len(values)) if weights is None else weights[order]
    middle = (np.cumsum(weight) - weight / 2) / weight.sum()
    return [float(f"{one:.4g}") for one in np.interp(PROBABILITIES, middle, values[order].astype(np.float64))]


def to_json(model: Model) -> bytes:
    return msgspec.json.format(msgspec.json.encode(model), indent=1) + b"\n"


def from_json(raw: bytes, path: str | None = None) -> Model:
    try:
        return msgspec.json.decode(raw, type=Model)
    except msgspec.DecodeError as error:  # also what has other keys
        raise TraceError(
            "not a model file", path=path, seen=str(error), wanted="what `chatreel fit` writes", next_step="Fit the trace again"
        ) from error
