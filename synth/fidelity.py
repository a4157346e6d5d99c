"""How like one trace is to another, as numbers. Pure."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracer.analysis.reuse import HitCurve, hit_curve, touches_as_engine
from tracer.schema import Footer
from tracer.tracefile import column


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveError:
    """Distance of two hit curves, over cache sizes log-spaced from 0.5 to 100 % of the real footprint."""

    largest: float
    area: float  # mean absolute difference over the log-spaced sizes
    at_capacity_units: int  # where the largest is


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """One trace against another. KS: largest gap between two distribution functions, 0 to 1."""

    curve: CurveError
    ks_input_tokens: float
    ks_output_tokens: float


def compare(real: tuple[pa.Table, Footer], synth: tuple[pa.Table, Footer]) -> Fidelity:
    """Hit curves as a 16-token engine sees them, and lengths."""
    real_curve, synth_curve = (hit_curve(touches_as_engine(table, footer)) for table, footer in (real, synth))

    def ks(name: str) -> float:
        first, second = (column(table, name) for table, _ in (real, synth))
        return ks_distance(first[first >= 0], second[second >= 0])

    return Fidelity(
        curve=curve_error(real_curve, synth_curve), ks_input_tokens=ks("input_tokens"), ks_output_tokens=ks("output_tokens")
    )


def curve_error(real: HitCurve, synth: HitCurve, points: int = 100) -> CurveError:
    """Both curves at the same cache sizes, in tokens; the units may differ."""
    top = max(1, real.unique)
    sizes = np.unique(np.geomspace(max(1.0, top * 0.005), top, points).round().astype(np.int64))
    gaps = np.array([abs(real.hit_rate_at(int(c)) - _rate_at(synth, int(c) * real.unit_tokens)) for c in sizes])
    worst = int(gaps.argmax())
    return CurveError(largest=float(gaps[worst]), area=float(gaps.mean()), at_capacity_units=int(sizes[worst]))


def _rate_at(curve: HitCurve, tokens: int) -> float:
    return curve.hit_rate_at(tokens // curve.unit_tokens)


def ks_distance(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Kolmogorov-Smirnov statistic: max over x of |F1(x) - F2(x)|. 1.0 if one of the two is empty, 0.0 if both are."""
    if not len(first) or not len(second):
        return float(len(first) != len(second))
    at = np.concatenate([first, second])
    shares = [np.searchsorted(np.sort(one), at, side="right") / len(one) for one in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())
