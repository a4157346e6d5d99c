"""How like real traces are the ones that we make of them: bootstrap and fitted model, in sample and on a held-back last third.

    python bench/fidelity.py TRACE.parquet ... --seeds 5

Each trace is learned whole and graded against itself by the gates of `chatreel compare`; then its first two thirds are
learned and graded against its last third. The row "first two thirds" grades these themselves against the last third: the
drift of the trace, which no generator that knows only them can be blamed for. Worst of the seeds in every column.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from synth.fidelity import COLUMNS, Fidelity, Trace, compare
from synth.generating import fit_trace, generate_from, generate_from_model
from tracer.surgery.slicing import slice_trace
from tracer.tracefile import column, read_footer, read_table

SHOWN = {
    "input KS": "input tokens, KS",
    "output KS": "output tokens, KS",
    "think KS": "think time, KS",
    "turns": "turns, variation",
    "curve max": "hit curve, largest error",
    "curve area": "hit curve, area",
    "footprint": "footprint growth",
    "reuse KS": "reuse time, KS",
    "1 s": "dispersion per 1 s, ratio",
    "10 s": "dispersion per 10 s, ratio",
    "60 s": "dispersion per 60 s, ratio",
}


def read(path: Path) -> Trace:
    return read_table(path, COLUMNS), read_footer(path)


def made(source: Path, how: str, seed: int, folder: Path) -> Path:
    path = folder / f"{how}.parquet"
    if how == "bootstrap":
        generate_from(source, path, seed)
    else:
        fit_trace(source, folder / "model.json")
        generate_from_model(folder / "model.json", path, seed)
    return path


def row(name: str, found: list[Fidelity]) -> str:
    return f"| {name} | {' | '.join(cells(found, SHOWN))} | {sum(one.passed for one in found)} of {len(found)} |"


def cells(found: list[Fidelity], shown: dict[str, str]) -> list[str]:
    """The worst of each gate shown; `-` where it cannot be told."""
    said = []
    for gate in shown.values():
        values = [one[gate] for one in found if any(each.name == gate for each in one.gates)]
        is_ratio = gate.endswith("ratio")
        worst = max(values, key=lambda value: abs(np.log(value)) if is_ratio else value) if values else None
        said.append("-" if worst is None else f"{worst:.2f}" if is_ratio else f"{worst:.3f}")
    return said


def report(path: Path, seeds: int, folder: Path) -> None:
    table = read_table(path, ["arrival_ns"])
    print(f"\n**{path.stem}**, {table.num_rows:,} requests, worst of {seeds} seeds:\n")
    print(f"| | {' | '.join(SHOWN)} | all gates pass |\n|---|{'---|' * (len(SHOWN) + 1)}")
    real = read(path)
    for how in ("bootstrap", "model"):
        print(row(how, [compare(real, read(made(path, how, seed, folder))) for seed in range(seeds)]), flush=True)
    edge = int(column(table, "arrival_ns")[-1] * 2 // 3)
    first, last = folder / "first.parquet", folder / "last.parquet"
    slice_trace(path, first, to_ns=edge)
    slice_trace(path, last, from_ns=edge)
    held = read(last)
    print(row("first two thirds against the last", [compare(held, read(first))]))
    for how in ("bootstrap", "model"):
        name = f"{how} of the first two thirds"
        print(row(name, [compare(held, read(made(first, how, seed, folder))) for seed in range(seeds)]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for path in options.traces:
            report(path, options.seeds, Path(folder))


if __name__ == "__main__":
    main()
