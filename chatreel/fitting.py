"""`chatreel fit`: what was learned, in lines."""

from collections.abc import Iterator
from pathlib import Path

from synth.generating import fit_trace, keep_trace
from synth.learned import Class, Model


def run_fit(trace: Path, out_path: Path, bootstrap: bool = False) -> Iterator[str]:
    if bootstrap:
        count = keep_trace(trace, out_path)
        yield f"warning: {out_path} holds {count:,} rows of {trace.name}: times, lengths, and who shares with whom; no text"
        yield f"{out_path.stat().st_size / 1000:,.0f} kB, from which `chatreel generate` draws as from the trace itself"
        return
    model = fit_trace(trace, out_path)
    starts = sum(model.starts.counts)
    law = model.starts.law if model.starts.shape is None else f"{model.starts.law} of shape {model.starts.shape:g}"
    yield f"{model.requests:,} requests over {model.span_s:,.0f} s: {starts:,} of them begin something new"
    yield f"starts: rate by windows of {model.starts.window_s:g} s, gaps {law}"
    for what, classes in (("a next turn", model.turns), ("another request that shares its prompt", model.sharing)):
        if classes:
            yield f"{_share(classes[0])} of the first ones are followed by {what}, after {_wait(classes[0])} s (p50)"
    yield from _missing(model)
    yield f"model of {out_path.stat().st_size / 1000:.0f} kB, no row of the trace in it -> {out_path}"


def _share(first: Class) -> str:
    """Mean over the classes of size, which hold like numbers of requests."""
    return f"{min(1.0, sum(first.goes_on[0]) / len(first.goes_on[0])):.0%}"


def _wait(first: Class) -> str:
    return f"{first.wait_s[len(first.wait_s) // 2]:.3g}"


def _missing(model: Model) -> Iterator[str]:
    if not model.has_blocks:
        yield "the trace names no prefix blocks: lengths and arrivals are learned, sharing is not"
    elif not model.has_sessions:
        yield "the trace names no sessions: what goes on from an earlier prompt is told by its blocks"
