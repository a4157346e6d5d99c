"""`chatreel calibrate`: fit, write the engine, say how far off it is."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from replay.calibration import Calibration, Cost, calibrate
from replay.sim.engines import engine_named, write_engine


def run_calibrate(
    run_dirs: Sequence[Path],
    out_path: Path,
    trace: Path | None,
    engine: str | None,
    hold_back: str,
    limits: Mapping[str, int | None],
    out: Console,
    err: Console,
) -> Calibration:
    base = engine_named(engine) if engine is not None else None
    found = calibrate(*run_dirs, trace=trace, base=base, hold_back=hold_back, **limits)
    table = Table(box=None, pad_edge=False)
    for title in ("", "fitted: measured", "predicted", "error", "held back: measured", "predicted", "error"):
        table.add_column(title, justify="right" if title else "left")
    held_back = {one.name: one for one in found.held_back}
    for one in found.fitted:
        cells = []
        for figure in (one, held_back.get(one.name)):
            cells += (
                ["", "", ""]
                if figure is None
                else [f"{figure.measured:.4g}", f"{figure.predicted:.4g}", _error(figure.name, figure.error)]
            )
        table.add_row(one.name, *cells)
    out.print(table)
    out.print(_costs(found.costs))
    worst = "; ".join(f"{one.name} {_error(one.name, one.error)}" for one in found.held_back)
    unsure = [f"{one.name}: {_surety(one)}" for one in found.costs if not one.is_told]
    write_engine(
        out_path,
        found.engine,
        found.name,
        [f"chatreel calibrate {' '.join(map(str, run_dirs))}", f"held back ({hold_back}): {worst}", *unsure, *found.notes],
    )
    for note in found.notes:
        err.print(note, highlight=False)
    err.print(f"engine: {out_path} ({found.simulations} simulations)", highlight=False)
    return found


def _costs(costs: list[Cost]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("cost", "microseconds", "standard error"):
        table.add_column(title, justify="left" if title == "cost" else "right")
    for one in costs:
        table.add_row(one.name.removesuffix("_s"), f"{one.seconds * 1e6:.4g}", _surety(one))
    return table


def _surety(cost: Cost) -> str:
    if cost.relative_error > 1:
        return "not told by this run: a guess"
    return f"{cost.relative_error:.1%}" + ("" if cost.is_told else ", barely told by this run")


def _error(name: str, error: float) -> str:
    return f"{error:+.4f}" if "rate" in name else f"{error:+.1%}"
