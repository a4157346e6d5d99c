"""How like one trace is to another: distances, each beside the real trace's own noise, and a verdict per gate. Pure.

Noise is the same distance between the real trace's first and second half. Where distributions are held together, no gate
asks for more than the trace grants itself: the limit is the larger of a fixed figure and 1.25 times the noise. What is made
of the whole trace (hit curve, footprint, dispersion) has fixed limits; there the noise is shown beside.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from synth.arrivals import spread_inside_grid
from tracer.analysis.arrivals import index_of_dispersion
from tracer.analysis.groups import sharing_groups
from tracer.analysis.memory import touched_runs
from tracer.analysis.reuse import HitCurve, Touches, concatenate, hit_curve, touches_as_engine
from tracer.errors import TraceError
from tracer.schema import Footer
from tracer.tracefile import blocks as block_column
from tracer.tracefile import column

type Trace = tuple[pa.Table, Footer]
type Ints = NDArray[np.int64]
type Floats = NDArray[np.float64]

COLUMNS = [
    *("request_id", "arrival_ns", "session_id", "parent_request_id", "think_ns", "input_tokens", "output_tokens"),
    *("input_blocks", "input_tail_id", "output_blocks"),
]
NOISE_FACTOR = 1.25
KS_LIMIT, REUSE_KS_LIMIT, VARIATION_LIMIT = 0.05, 0.08, 0.05
CURVE_LIMIT, AREA_LIMIT, FOOTPRINT_LIMIT = 0.03, 0.015, 0.05
DISPERSION_RANGE = (0.7, 1.4)
ANSWERED_SHARE = 0.99
ENOUGH_WINDOWS = 10  # fewer counts tell nothing about their variance
ENOUGH_VALUES = 20  # requests of half a trace: fewer tell nothing about its noise
POINTS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveError:
    """Distance of two hit curves, over cache sizes log-spaced from 0.5 to 100 % of the real footprint."""

    largest: float
    area: float  # mean absolute difference over the log-spaced sizes
    at_capacity_units: int  # where the largest is


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """A distance and what it may be. `kind`: distance (0 is best) or ratio (1 is best)."""

    name: str
    kind: str
    value: float
    noise: float | None  # the same between the halves of the real trace; None: they are too small to tell
    least: float
    most: float

    @property
    def passed(self) -> bool:
        return self.least <= self.value <= self.most


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """One trace against another. `left_out`: gates that cannot be told, and why."""

    requests: int  # compared of each
    gates: list[Gate]
    left_out: dict[str, str]
    notes: list[str]
    real_curve: list[tuple[int, float]]  # (KV tokens, hit rate)
    synth_curve: list[tuple[int, float]]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    def __getitem__(self, name: str) -> float:
        """Value of a gate."""
        return next(gate.value for gate in self.gates if gate.name == name)


def compare(real: Trace, synth: Trace) -> Fidelity:
    """Gate by gate, on as many requests as the smaller of the two has (columns `COLUMNS`)."""
    if not real[0].num_rows or not synth[0].num_rows:
        raise TraceError("a trace without requests is like no other", next_step="Give two traces with requests")
    requests = min(real[0].num_rows, synth[0].num_rows)
    first, second = Facts.of(head(real, requests)), Facts.of(head(synth, requests))
    halves = _halves(real)
    noise = tuple(Facts.of(half) for half in halves) if halves else None
    gates = _answered(synth)
    left_out: dict[str, str] = {}
    for one in _measured(first, second, noise):
        if isinstance(one, Gate):
            gates.append(one)
        else:
            left_out[one[0]] = one[1]
    return Fidelity(
        requests=requests,
        gates=gates,
        left_out=left_out,
        notes=_notes(real, synth, requests, has_noise=noise is not None),
        real_curve=_points(first.curve, first.curve),
        synth_curve=_points(second.curve, first.curve),
    )


def _answered(replayed: Trace) -> list[Gate]:
    """Of the export of a run: answered / planned requests, which no distance of distributions tells."""
    table, footer = replayed
    planned = int(footer.notes.get("planned", 0))
    if not planned or "slice_of" in footer.notes:
        return []
    answered = int((column(table, "output_tokens") >= 0).sum())
    return [Gate(name="answered, of planned", kind="ratio", value=answered / planned, noise=None, least=ANSWERED_SHARE, most=1.0)]


def head(trace: Trace, requests: int) -> Trace:
    """The first requests, in order of arrival spread inside the recorded grid."""
    table, footer = trace
    if footer.time_grid_ns:
        stamps = spread_inside_grid(column(table, "arrival_ns"), footer.time_grid_ns, np.random.default_rng(0))
        at = table.column_names.index("arrival_ns")
        order = np.argsort(stamps, kind="stable")
        table = table.set_column(at, "arrival_ns", pa.array(stamps)).take(pa.array(order))
    return table.slice(0, requests), footer


def _halves(trace: Trace) -> tuple[Trace, Trace] | None:
    """First and second half of the requests, each as a trace by itself."""
    table, footer = head(trace, trace[0].num_rows)
    half = table.num_rows // 2
    return ((table.slice(0, half), footer), (table.slice(half, half), footer)) if half >= ENOUGH_VALUES else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is compared. Unknown is an empty array. Shapes: [requests] less what is unknown, unless said otherwise."""

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    new_tokens: Ints  # not served by an endless cache; without blocks: not of the turn before
    think_s: Floats
    turns: Ints  # [sessions]
    group_sizes: Ints  # [sharing groups]
    curve: HitCurve
    footprint: Ints  # tokens touched so far, [requests]
    reuse_s: Floats  # [reused runs] time since the last use
    reuse_tokens: Ints  # [reused runs]

    @classmethod
    def of(cls, trace: Trace) -> "Facts":
        table, footer = trace
        arrival = column(table, "arrival_ns")
        session, inputs, outputs = (column(table, name) for name in ("session_id", "input_tokens", "output_tokens"))
        touches = touches_as_engine(table, footer)
        curve = hit_curve(touches)
        runs = touched_runs(touches)
        reused = (runs.before >= 0) & (runs.looked_up > 0)
        path = concatenate(block_column(table, "input_blocks"), block_column(table, "output_blocks"))
        has_blocks = len(path.ids) > 0
        fresh = np.bincount(runs.request, weights=runs.units * (runs.before < 0), minlength=len(arrival))
        groups = sharing_groups(path, session if (session >= 0).any() else None).group_of if has_blocks else arrival[:0]
        think = column(table, "think_ns")
        return cls(
            arrival_s=(arrival - arrival[0]) / 1e9,
            input_tokens=inputs[inputs >= 0],
            output_tokens=outputs[outputs >= 0],
            new_tokens=_new_tokens(table, touches, curve, has_blocks=has_blocks),
            think_s=think[think >= 0] / 1e9,
            turns=np.bincount(session[session >= 0]),
            group_sizes=np.bincount(groups) if has_blocks else arrival[:0],
            curve=curve,
            footprint=(np.cumsum(fresh) * touches.unit_tokens).astype(np.int64) if has_blocks else arrival[:0],
            reuse_s=(arrival[runs.request[reused]] - arrival[runs.before[reused]]) / 1e9,
            reuse_tokens=runs.looked_up[reused] * touches.unit_tokens,
        )


def _new_tokens(table: pa.Table, touches: Touches, curve: HitCurve, *, has_blocks: bool) -> Ints:
    inputs = column(table, "input_tokens")
    if has_blocks:
        return (touches.prompt_tokens - curve.request_hits * touches.unit_tokens)[inputs >= 0]
    parent = rows_named(column(table, "request_id"), column(table, "parent_request_id"))
    if not (parent >= 0).any():
        return inputs[:0]
    whole = inputs + np.maximum(column(table, "output_tokens"), 0)
    return np.maximum(inputs - np.where(parent >= 0, whole[parent], 0), 0)[inputs >= 0]


def rows_named(request_ids: Ints, wanted: Ints) -> Ints:
    """Row of each wanted request id, -1 for none."""
    order = np.argsort(request_ids)
    at = np.minimum(np.searchsorted(request_ids, wanted, sorter=order), len(order) - 1)
    found = (wanted >= 0) & (request_ids[order[at]] == wanted)
    return np.where(found, order[at], -1)


def _measured(real: Facts, synth: Facts, halves: tuple[Facts, ...] | None) -> list[Gate | tuple[str, str]]:
    """In the order of the report."""

    def distance(name: str, of: Any, limit: float, *, fixed: bool = False) -> Gate | tuple[str, str]:
        return _gate(name, (real, synth), halves, of, limit, NOISE_FACTOR * (not fixed))

    return [
        distance("input tokens, KS", lambda a, b: ks_distance(a.input_tokens, b.input_tokens), KS_LIMIT),
        distance("output tokens, KS", lambda a, b: ks_distance(a.output_tokens, b.output_tokens), KS_LIMIT),
        distance("new tokens, KS", lambda a, b: _known(ks_distance, a.new_tokens, b.new_tokens), KS_LIMIT),
        distance("think time, KS", lambda a, b: _known(ks_distance, a.think_s, b.think_s), KS_LIMIT),
        distance("turns, variation", lambda a, b: _known(total_variation, a.turns, b.turns), VARIATION_LIMIT),
        distance("group sizes, variation", lambda a, b: _known(total_variation, a.group_sizes, b.group_sizes), VARIATION_LIMIT),
        distance("hit curve, largest error", lambda a, b: _curve(a, b, "largest"), CURVE_LIMIT, fixed=True),
        distance("hit curve, area", lambda a, b: _curve(a, b, "area"), AREA_LIMIT, fixed=True),
        distance("footprint growth", lambda a, b: _known(growth_error, a.footprint, b.footprint), FOOTPRINT_LIMIT, fixed=True),
        distance("reuse time, KS", _reuse_distance, REUSE_KS_LIMIT),
        *(_dispersion(window, real, synth, halves) for window in (1, 10, 60)),
    ]


def _gate(
    name: str, pair: tuple[Facts, Facts], halves: tuple[Facts, ...] | None, of: Any, limit: float, noise_factor: float
) -> Gate | tuple[str, str]:
    value = of(*pair)
    if value is None:
        return name, "the real trace does not tell"
    noise = of(*halves) if halves else None
    return Gate(name=name, kind="distance", value=value, noise=noise, least=0.0, most=max(limit, noise_factor * (noise or 0.0)))


def _known(of: Any, first: NDArray[Any], second: NDArray[Any]) -> float | None:
    return float(of(first, second)) if len(first) else None


def _curve(real: Facts, synth: Facts, which: str) -> float | None:
    if not len(real.footprint):
        return None
    return float(getattr(curve_error(real.curve, synth.curve), which))


def _reuse_distance(real: Facts, synth: Facts) -> float | None:
    if not len(real.reuse_s):
        return None
    return ks_distance(real.reuse_s, synth.reuse_s, real.reuse_tokens, synth.reuse_tokens)


def _dispersion(window_s: int, real: Facts, synth: Facts, halves: tuple[Facts, ...] | None) -> Gate | tuple[str, str]:
    """Variance / mean of the counts per window, without the last, cut-off one: synthetic / real."""
    name = f"dispersion per {window_s} s, ratio"

    def ratio(a: Facts, b: Facts) -> float | None:
        if min(a.arrival_s[-1], b.arrival_s[-1]) < ENOUGH_WINDOWS * window_s:
            return None
        first, second = (index_of_dispersion(one.arrival_s, window_s, whole_windows=True) for one in (a, b))
        return second / first if first and second else None

    value = ratio(real, synth)
    if value is None:
        return name, f"fewer than {ENOUGH_WINDOWS} windows"
    noise = ratio(*halves) if halves else None
    return Gate(name=name, kind="ratio", value=value, noise=noise, least=DISPERSION_RANGE[0], most=DISPERSION_RANGE[1])


def curve_error(real: HitCurve, synth: HitCurve, points: int = POINTS) -> CurveError:
    """Both curves at the same cache sizes, in tokens; the units may differ."""
    sizes = _sizes(real, points)
    gaps = np.array([abs(real.hit_rate_at(int(c)) - _rate_at(synth, int(c) * real.unit_tokens)) for c in sizes])
    worst = int(gaps.argmax())
    return CurveError(largest=float(gaps[worst]), area=float(gaps.mean()), at_capacity_units=int(sizes[worst]))


def _sizes(real: HitCurve, points: int = POINTS) -> Ints:
    top = max(1, real.unique)
    return np.unique(np.geomspace(max(1.0, top * 0.005), top, points).round().astype(np.int64))


def _points(curve: HitCurve, real: HitCurve) -> list[tuple[int, float]]:
    tokens = [int(size) * real.unit_tokens for size in _sizes(real)]
    return [(one, _rate_at(curve, one)) for one in tokens]


def _rate_at(curve: HitCurve, tokens: int) -> float:
    return curve.hit_rate_at(tokens // curve.unit_tokens)


def ks_distance(
    first: NDArray[Any], second: NDArray[Any], weights: NDArray[Any] | None = None, second_weights: NDArray[Any] | None = None
) -> float:
    """Kolmogorov-Smirnov statistic: max over x of |F1(x) - F2(x)|. 1.0 if one of the two is empty, 0.0 if both are."""
    if not len(first) or not len(second):
        return float(len(first) != len(second))
    at = np.concatenate([first, second])
    shares = [_below(first, weights, at), _below(second, second_weights, at)]
    return float(np.abs(shares[0] - shares[1]).max())


def _below(values: NDArray[Any], weights: NDArray[Any] | None, at: NDArray[Any]) -> Floats:
    order = np.argsort(values)
    sums = np.arange(len(values) + 1) if weights is None else np.concatenate([[0], np.cumsum(weights[order])])
    return np.asarray(sums[np.searchsorted(values[order], at, side="right")] / sums[-1])


def total_variation(first: Ints, second: Ints) -> float:
    """Half the sum of |share of first - share of second| over sizes 1, 2, 3-4, 5-8, ...: 0.0 the same, 1.0 none in common."""
    if not len(first) or not len(second):
        return float(len(first) != len(second))
    bins = [np.ceil(np.log2(np.maximum(one[one > 0], 1))).astype(np.int64) for one in (first, second)]
    length = 1 + max(int(one.max(initial=0)) for one in bins)
    shares = [np.bincount(one, minlength=length) / max(len(one), 1) for one in bins]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def growth_error(real: Ints, synth: Ints) -> float:
    """Largest difference of the distinct tokens after 25, 50, 75, 100 % of the requests / all distinct tokens of the real one."""
    if not len(real) or not len(synth):
        return 1.0
    at = [max(1, round(share * min(len(real), len(synth)))) - 1 for share in (0.25, 0.5, 0.75, 1.0)]
    return float(max(abs(int(synth[i]) - int(real[i])) for i in at) / max(int(real[at[-1]]), 1))


def _notes(real: Trace, synth: Trace, requests: int, *, has_noise: bool) -> list[str]:
    notes = []
    counts = real[0].num_rows, synth[0].num_rows
    if max(counts) > 1.02 * requests:
        notes.append(f"the first {requests:,} requests of each are compared; the traces have {counts[0]:,} and {counts[1]:,}")
    spans = [
        max((int(column(one, "arrival_ns")[-1]) - int(column(one, "arrival_ns")[0])) / 1e9, 1e-9) for one, _ in (real, synth)
    ]
    rates = [count / span for count, span in zip(counts, spans, strict=True)]
    if not 0.8 < rates[1] / rates[0] < 1.25:
        notes.append(f"{rates[0]:.3g} and {rates[1]:.3g} requests/s: another load has another dispersion and another hit curve")
    if not has_noise:
        notes.append(f"under {2 * ENOUGH_VALUES} requests the real trace says nothing about its own noise")
    return notes
