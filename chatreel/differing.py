"""`chatreel diff` of two run folders: side by side, with an exit code for a build that must not get slower."""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from replay.errors import PlanError
from replay.judge.difference import Difference, differences, figures, same_load
from replay.judge.summary import Point, Slo, Summary
from replay.judge.verdict import EXIT_INVALID, EXIT_OK
from replay.outcome import Outcome
from replay.report.reading import judge_run
from replay.results import read_outcomes

EXIT_WORSE = 4
STYLES = {"worse": "red", "better": "green", "same": "dim", "unsure": "yellow"}

type Pair = tuple[Point, Point]


def run_diff_of_runs(before: Path, after: Path, slos: list[Slo], tolerance: float, as_json: bool) -> int:
    """Exit code: 3 if the client was the limit of a point, 4 if a figure got worse."""
    if not 0 <= tolerance < 1:
        raise PlanError("no such tolerance", seen=f"{tolerance:g}", wanted="a share, e.g. 0.05")
    runs = judge_run(before, slos), judge_run(after, slos)
    pairs = _pairs(runs, (before, after))
    found: list[Difference] = []
    for one, other in pairs:
        sides = (one, _outcomes(before, one)), (other, _outcomes(after, other))
        _refuse_other_load(one.label, same_load(*sides), after)
        found += differences(*sides, slos, figures_in_all=len(pairs) * len(figures(slos)), tolerance=tolerance)
    invalid = [
        f"{path} {point.label}" for pair in pairs for path, point in zip((before, after), pair, strict=True) if not point.valid
    ]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode({"differences": found, "invalid": invalid}), indent=2).decode())
    else:
        _print(pairs, found, invalid, Console())
    left = [point.label for run in runs for point in run.points if not any(point in pair for pair in pairs)]
    if left:
        Console(stderr=True).print(f"in one run only, not compared: {', '.join(left)}", highlight=False)
    if invalid:
        return EXIT_INVALID
    return EXIT_WORSE if any(one.verdict == "worse" for one in found) else EXIT_OK


def _pairs(runs: tuple[Summary, Summary], paths: tuple[Path, Path]) -> list[Pair]:
    """Points of the same load; of a load that was run twice the last."""
    first, second = ({(one.by, one.scale): one for one in run.points if one.completed} for run in runs)
    both = [(first[load], second[load]) for load in first if load in second]
    if not both:
        raise PlanError(
            "the runs have no point in common",
            path=str(paths[1]),
            seen=", ".join(one.label for one in second.values()) or "no answered request",
            wanted=", ".join(one.label for one in first.values()) or "a run with answered requests",
        )
    return both


def _outcomes(run_dir: Path, point: Point) -> list[Outcome]:
    return read_outcomes(run_dir, point.index, with_chunks=False)[0]  # no figure needs chunks, nearly all of a run


def _refuse_other_load(label: str, unlike: str | None, path: Path) -> None:
    if unlike is not None:
        raise PlanError(
            f"the runs did not play the same load at {label}",
            path=str(path),
            seen=unlike,
            wanted="the same trace, scaled the same way",
            next_step="Replay the same trace with the same --seed, --limit and --scale",
        )


def _print(pairs: list[Pair], found: list[Difference], invalid: list[str], out: Console) -> None:
    for before, after in pairs:
        table = Table(box=None, pad_edge=False, header_style="bold", title=f"{before.label}", title_justify="left")
        for name in ("figure", "before", "after", "change", "from", "to", "verdict"):
            table.add_column(name, justify="left" if name in ("figure", "verdict") else "right")
        for one in found:
            if one.point == before.label:
                table.add_row(*_cells(one), style=STYLES[one.verdict])
        out.print(table)
        for text in _told(before, after):
            out.print(text, highlight=False, markup=False)
        out.print()
    for name in invalid:
        out.print(f"INVALID {name}: the client was the limit, so this says nothing of the server", highlight=False, markup=False)
    worse = [f"{one.figure.partition(',')[0]} at {one.point}" for one in found if one.verdict == "worse"]
    unsure = sum(one.verdict == "unsure" for one in found)
    verdict = f"worse: {'; '.join(worse)}" if worse else "nothing got worse beyond noise and tolerance"
    more = f"; {unsure} of {len(found)} figures cannot be told from noise: a longer run would" if unsure else ""
    out.print(verdict + more, highlight=False, markup=False, soft_wrap=True)


def _cells(one: Difference) -> list[str]:
    if one.is_share:
        values = [f"{value:.1%}" for value in (one.before, one.after)]
        changes = [f"{100 * value:+.1f} pt" for value in (one.change, one.low, one.high)]
    else:
        values = [f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" for value in (one.before, one.after)]
        changes = [f"{value:+.1%}" if value < 1 else f"{1 + value:,.3g}x" for value in (one.change, one.low, one.high)]
    return [one.figure, *values, *changes, one.verdict]


def _told(before: Point, after: Point) -> list[str]:
    """What has no measure of its noise: told, not judged."""
    rows = [
        ("verdict", *(f"{one.regime}{f' ({one.cause})' if one.cause else ''}" for one in (before, after))),
        ("preemptions", before.cache.preemptions, after.cache.preemptions),
        ("KV usage, highest", *(None if (v := one.cache.kv_usage_max) is None else f"{v:.0%}" for one in (before, after))),
        ("waiting, most", before.cache.waiting_max, after.cache.waiting_max),
    ]
    return [f"{name}: {one} -> {other}" for name, one, other in rows if one != other and None not in (one, other)]
