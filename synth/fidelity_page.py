"""A fidelity report as lines for a terminal and as one HTML page. Pure."""

from collections.abc import Iterable

import numpy as np

from synth.fidelity import Fidelity, Gate, Ints
from tracer.report.charts import overlay
from tracer.report.page import Charts, chart_boxes, definitions, escaped, render

HEAD = ("gate", "value", "its own halves", "limit", "verdict")
QUANTILES = 200

_FORMULAS = (
    (
        "KS",
        "largest distance between the two distribution functions (Kolmogorov and Smirnov), 0 to 1; reuse time weighs by tokens.",
    ),
    ("Variation", "half the sum of the differences between the shares of sizes 1, 2, 3-4, 5-8, ...: total variation, 0 to 1."),
    (
        "Hit curve",
        "token-weighted hit rate of an LRU prefix cache of every size with 16-token pages, at 100 sizes log-spaced from 0.5 % to "
        "100 % of the real footprint: the largest difference, and the mean one (area).",
    ),
    ("Footprint growth", "distinct tokens after 25, 50, 75, 100 % of the requests: largest difference / real footprint."),
    ("Dispersion", "variance / mean of the arrivals per window, synthetic / real; 1 is the same burstiness at that scale."),
    ("Reuse time", "time since the same block was last used, over all hits of an endless cache."),
    (
        "Its own halves",
        "the same distance between the first and the second half of the real trace. A distribution may differ by 1.25 times as "
        "much; the limits of curve, footprint and dispersion are fixed.",
    ),
)


def cells(gate: Gate) -> tuple[str, str, str, str, str]:
    """As in `HEAD`."""
    is_ratio = gate.kind == "ratio"
    limit = f"{gate.least:.2f} to {gate.most:.2f}" if is_ratio else f"<= {gate.most:.3f}"
    digits = 2 if is_ratio else 3
    noise = "-" if gate.noise is None else f"{gate.noise:.{digits}f}"
    return gate.name, f"{gate.value:.{digits}f}", noise, limit, "pass" if gate.passed else "MISS"


def verdict(found: Fidelity) -> str:
    missed = [gate.name for gate in found.gates if not gate.passed]
    if missed:
        return f"{len(missed)} of {len(found.gates)} gates missed: {'; '.join(missed)}."
    return f"All {len(found.gates)} gates pass, over {found.requests:,} requests."


def remarks(found: Fidelity) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in found.left_out.items():
        by_reason.setdefault(reason, []).append(name.partition(",")[0])
    return [*found.notes, *(f"not judged, {reason}: {', '.join(names)}" for reason, names in by_reason.items())]


def page(found: Fidelity, names: tuple[str, str], lengths: Iterable[tuple[str, Ints, Ints]]) -> str:
    """`lengths`: (title, of the real trace, of the synthetic one)."""
    first, second = (f"{label}: {name}" for label, name in zip(("real", "synthetic"), names, strict=True))
    charts: dict[str, tuple[str, object]] = {}
    if any(rate > 0 for _, rate in found.real_curve + found.synth_curve):
        curves = {first: [(float(x), y) for x, y in found.real_curve], second: [(float(x), y) for x, y in found.synth_curve]}
        charts["hit"] = ("Hit rate by KV memory", overlay(curves, "KV memory, tokens (log)", "share of prompt tokens"))
    for k, (title, real, synth) in enumerate(lengths):
        if len(real) and len(synth):
            lines = {first: _distribution(real), second: _distribution(synth)}
            charts[f"length{k}"] = (title, overlay(lines, "tokens (log)", "share at or below"))
    shown: Charts = charts  # type: ignore[assignment]
    rows = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in cells(gate))}</tr>" for gate in found.gates)
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    notes = "".join(f"<li>{escaped(line)}</li>" for line in remarks(found))
    body = f"""<h1>Is {escaped(names[1])} like {escaped(names[0])}?</h1>
<ul class="lead"><li>{escaped(verdict(found))}</li></ul>
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>
<ul class="notes">{notes}</ul>
{chart_boxes("Both traces", "", "wide", shown)}
<h2>How it was computed</h2>{definitions(_FORMULAS)}"""
    return render("fidelity", body, shown)


def _distribution(values: Ints) -> list[tuple[float, float]]:
    shares = np.linspace(0, 1, QUANTILES)
    return [(max(float(x), 1.0), float(share)) for x, share in zip(np.quantile(values, shares), shares, strict=True)]
