"""`chatreel tune`: found, said, and each configuration shown in the terminal and in tune.md; figures are in tune.json too."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from replay.configurations import Grid, Value, named, shown
from replay.judge.choice import Choice, Edge
from replay.judge.summary import Percentiles, load_label
from replay.judge.verdict import EXIT_INVALID, EXIT_OK, EXIT_SLO_MISSED
from replay.report.text import printable
from replay.tune import TuneConfig, launch_line, run_tune
from replay.tuned import AtLoad, Row, Tuned, deciding

EXIT_CUT_SHORT = EXIT_NOTHING = 1
CAUSE = "what gives way"
DROPPED = (CAUSE, "preemp- tions", "KV max", "hit rate", "TPOT p50 / p99, ms")  # in this order, where a terminal is narrow
LONGEST_LOG = 5  # lines of a failed server's log that are shown; all are in its folder
HOPELESS_SHARE = 0.5
SURE_SHARE = 0.999  # of the requests within the limits: nothing is left to tell configurations apart
STYLES = {"BEST": "bold green", "alike": "green", "unsure": "yellow", "misses": "red", "client": "bold red"}

type Cells = list[str]


def tune_and_report(config: TuneConfig, out: Console, err: Console) -> int:
    """Exit code: 1 cut short or nothing could be measured, 3 the client was the limit, 4 none meets the limits, else 0."""
    err.print(f"seed {config.sweep.seed}", highlight=False)
    found = run_tune(config, lambda line: err.print(printable(line), highlight=False, markup=False, soft_wrap=True))
    said = words(found, config.grid)
    out.print()
    for number, line in enumerate(said):
        out.print(f"[bold]{escape(line)}[/bold]" if number == 0 else escape(line), highlight=False, soft_wrap=True)
    for load in loads_of(found):
        heads, rows = cells(found, load)
        out.print()
        if load is not None:
            out.print(f"at {load_label(load, found.by)}", highlight=False)
        out.print(_table(*_fitting(heads, rows, out.width)))
        for line in _causes(found, load):
            out.print(line, highlight=False, markup=False, soft_wrap=True)
    for row in found.rows:
        if row.failed is not None:
            out.print()
            for line in failure(row, config.sweep.run_dir):
                out.print(line, highlight=False, markup=False, soft_wrap=True)
    folder = config.sweep.run_dir
    (folder / "tune.md").write_text(markdown(found, said, folder), encoding="utf-8")
    err.print(f"\nfigures: {folder / 'tune.json'}   report: {folder / 'tune.md'}", highlight=False, soft_wrap=True)
    return exit_code(found)


def exit_code(found: Tuned) -> int:
    """A client that was the limit of one configuration may have hidden the best."""
    if any(one.client_limit for row in found.rows if (one := deciding(row, found.load)) is not None):
        return EXIT_INVALID
    if found.stopped is not None:
        return EXIT_CUT_SHORT
    if found.choice is None:
        return EXIT_NOTHING
    return EXIT_OK if found.choice.meets else EXIT_SLO_MISSED


def loads_of(found: Tuned) -> Sequence[float | None]:
    """A table each, the one that decides first; of a search there is one, each configuration at its own load."""
    measured = [row for row in found.rows if row.loads]
    if any(row.bracket for row in measured):
        return [None]
    others = {one.load for row in measured for one in row.loads} - {found.load}
    return ([found.load] if found.load is not None else []) + sorted(others, reverse=True)


def words(found: Tuned, grid: Grid) -> list[str]:
    """What to take and why, then what else to know about it."""
    choice = found.choice
    if choice is None:
        tried = f"{len(found.rows)} of {found.configurations} configurations were tried"
        limited = any(one.client_limit for row in found.rows for one in row.loads)
        why = "the client was the limit in all that were measured" if limited else "none could be measured"
        return [f"No recommendation: {tried}, {why}.", *_cut_short(found)]
    rows = {row.number: row for row in found.rows}
    row = rows[choice.recommended]
    figures = deciding(row, found.load)
    assert figures is not None
    at = load_label(figures.load, found.by)
    rate = f"{figures.goodput_per_s:.3g} requests/s within the limits at {at} ({figures.attainment.seen:.2%} of them)"
    said = [f"Take {named(row.setting)}: {choice.reason}; {rate}."]
    if not choice.meets:
        said = [f"None meets the limits for {found.attain:.4g} of the requests. Nearest is {named(row.setting)}: {rate}."]
        if figures.attainment.seen < HOPELESS_SHARE:
            said.append("This load is far too high for the whole grid: try a lower one, or --search.")
    launch = launch_line(grid, row.setting)
    said += [f"Launch: {launch}"] if launch else ["Simulated in virtual time: no server was launched. Try this one first."]
    return [*said, *_others(found, choice, rows), *map(_edge, choice.edges), *_not_candidates(found), *_cut_short(found)]


def _others(found: Tuned, choice: Choice, rows: dict[int, Row]) -> list[str]:
    said = []
    if choice.best != choice.recommended:
        said.append(f"The most goodput was seen with {named(rows[choice.best].setting)}.")
    if choice.unsure:
        names = "; ".join(named(rows[number].setting) for number in choice.unsure)
        said.append(f"Noise may be why these are behind: {names}. More --requests or --repeats would tell.")
    all_met = [(one := deciding(row, found.load)) is not None and one.attainment.seen >= SURE_SHARE for row in found.rows]
    if sum(all_met) > 1 and choice.alike and not any(row.bracket for row in found.rows):
        said.append(f"{sum(all_met)} configurations met nearly every request: a higher load, or --search, would tell them apart.")
    return said


def _edge(edge: Edge) -> str:
    word, more = ("largest", "larger") if edge.is_largest else ("smallest", "smaller")
    return f"{edge.key} = {edge.value:g} is the {word} of the grid: the best may lie beyond it, try {more} ones."


def _not_candidates(found: Tuned) -> list[str]:
    said = []
    for row in found.rows:
        one = deciding(row, found.load)
        if one is not None and one.client_limit is not None:
            said.append(f"Not valid, so no candidate: {named(row.setting)}: {one.client_limit}.")
    failed = sum(row.failed is not None for row in found.rows)
    return [*said, *([f"{failed} of {len(found.rows)} configurations failed, see below."] if failed else [])]


def _cut_short(found: Tuned) -> list[str]:
    left = found.configurations - len(found.rows)
    if found.stopped is None:
        return []
    return [f"Cut short ({found.stopped}): {left} of {found.configurations} configurations were not tried; --resume goes on."]


def failure(row: Row, folder: Path) -> list[str]:
    lines = [f"Failed: {named(row.setting)}: {printable(row.failed or '')}"]
    if row.log_tail:
        lines.append(f"  the last lines of {folder / row.run / 'server.log'}:")
        lines += [f"    {printable(line)}" for line in row.log_tail[-LONGEST_LOG:]]
    return lines


def cells(found: Tuned, load: float | None) -> tuple[Cells, list[Cells]]:
    """(heads, rows), the most goodput first. Keys that do not vary, and figures that nobody knows, are left out."""
    rows = sorted(found.rows, key=lambda row: -_goodput(row, load))
    keys = [key for key in (rows[0].setting if rows else {}) if len({shown(row.setting[key]) for row in rows}) > 1]
    columns = [("#", [str(row.number) for row in rows])]
    columns += [(key.replace("_", " "), [_value(row.setting[key]) for row in rows]) for key in keys]
    columns += [(head, [_figure(row, load, figure) for row in rows]) for head, figure in _FIGURES]
    columns.append(("verdict", [_verdict(row, found, load) for row in rows]))
    kept = [(head, column) for head, column in columns if set(column) != {"-"}]
    return [head for head, _ in kept], [list(row) for row in zip(*(column for _, column in kept), strict=True)]


def _goodput(row: Row, load: float | None) -> float:
    one = _at(row, load)
    return -1.0 if one is None else one.goodput_per_s


def _at(row: Row, load: float | None) -> AtLoad | None:
    return deciding(row) if row.bracket is not None else next((one for one in row.loads if one.load == load), None)


def _figure(row: Row, load: float | None, figure: Callable[[Row, AtLoad], str]) -> str:
    one = _at(row, load)
    return "-" if one is None else figure(row, one)


def _value(value: Value) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else shown(value) or "none"


def _pair(one: Percentiles | None) -> str:
    return "-" if one is None else f"{one.p50:.0f} / {one.p99:.0f}" if one.p50 >= 10 else f"{one.p50:.1f} / {one.p99:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _bracket(row: Row, _: AtLoad) -> str:
    if row.bracket is None:
        return "-"
    low, high = row.bracket.low, row.bracket.high
    return f"{'?' if low is None else f'{low:.3g}'} - {'?' if high is None else f'{high:.3g}'}"


_FIGURES: list[tuple[str, Callable[[Row, AtLoad], str]]] = [
    ("capacity", _bracket),
    ("goodput /s", lambda _, one: f"{one.goodput_per_s:.3g}"),
    ("met all", lambda _, one: f"{one.attainment.seen:.1%}"),
    ("TTFT p50 / p99, ms", lambda _, one: _pair(one.ttft_ms)),
    ("TPOT p50 / p99, ms", lambda _, one: _pair(one.tpot_ms)),
    ("hit rate", lambda _, one: _share(one.hit_rate)),
    ("KV max", lambda _, one: _share(one.kv_usage_max)),
    ("preemp- tions", lambda _, one: "-" if one.preemptions is None else f"{one.preemptions:,}"),
    (CAUSE, lambda _, one: one.cause or "-"),
]


def _verdict(row: Row, found: Tuned, load: float | None) -> str:
    one, choice = _at(row, load), found.choice
    if one is None:
        return "failed" if row.failed is not None else "-"
    if one.client_limit is not None:
        return "client"
    if choice is not None and load == found.load:
        if row.number == choice.recommended:
            return "BEST" if choice.meets else "nearest"
        if row.number in (choice.best, *choice.alike):
            return "alike"
        if row.number in choice.unsure:
            return "unsure"
    return "meets" if one.meets else "misses"


def _fitting(heads: Sequence[str], rows: Sequence[Cells], width: int) -> tuple[Cells, list[Cells]]:
    """Without the columns that a terminal of this width has no place for; tune.md has them all. Causes stand below the table."""
    kept = [number for number, head in enumerate(heads) if head != CAUSE]
    widths = [_width(head, [row[number] for row in rows]) for number, head in enumerate(heads)]
    for dropped in DROPPED:
        if sum(widths[number] + 1 for number in kept) <= width + 1:
            break
        kept = [number for number in kept if heads[number] != dropped]
    return [heads[number] for number in kept], [[row[number] for number in kept] for row in rows]


def _width(head: str, column: Sequence[str]) -> int:
    """Heads may wrap, figures not."""
    return max(map(len, (*column, *head.split())))


def _table(heads: Sequence[str], rows: Sequence[Cells]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for number, head in enumerate(heads):
        width = _width(head, [row[number] for row in rows])
        table.add_column(head, justify="left" if head == "verdict" else "right", min_width=width)
    for row in rows:
        table.add_row(*(f"[{STYLES[cell]}]{cell}[/]" if cell in STYLES else escape(printable(cell)) for cell in row))
    return table


def _causes(found: Tuned, load: float | None) -> list[str]:
    by_cause: dict[str, Cells] = {}
    for row in found.rows:
        one = _at(row, load)
        if one is not None and one.cause is not None:
            by_cause.setdefault(one.cause, []).append(f"#{row.number}")
    return [f"What gives way in {', '.join(numbers)}: {cause}" for cause, numbers in by_cause.items()]


def markdown(found: Tuned, said: Sequence[str], folder: Path) -> str:
    limits = ", ".join(f"{one.slo.metric.upper()} p{one.share * 100:g} <= {one.slo.limit_ms:g} ms" for one in found.limits)
    lines = ["# Tuning", "", f"{found.trace}, {found.grid}; {limits}, {found.attain:.4g} of the requests; seed {found.seed}", ""]
    lines += [f"- {line}" for line in said]
    for load in loads_of(found):
        heads, rows = cells(found, load)
        lines += ["", f"## At {load_label(load, found.by)}" if load is not None else "## At the capacity of each", ""]
        lines += [_row_of(heads), _row_of(["---"] * len(heads)), *map(_row_of, rows)]
    for row in found.rows:
        if row.failed is not None:
            lines += ["", "```", *failure(row, folder), "```"]
    return "\n".join(lines) + "\n"


def _row_of(row: Sequence[str]) -> str:
    return "| " + " | ".join(printable(cell).replace("|", r"\|") for cell in row) + " |"
