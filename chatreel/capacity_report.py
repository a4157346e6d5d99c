"""`chatreel capacity`: its limits read, found, said, and what was tried shown in 80 columns."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from chatreel.replaying import parse_slos
from replay.capacity import Capacity, CapacityConfig, run_capacity
from replay.errors import PlanError
from replay.judge.doubts import PART_OFF
from replay.judge.search import Limit, Share, Tried
from replay.judge.summary import Point, load_label
from replay.judge.verdict import EXIT_INVALID, EXIT_OK, EXIT_SLO_MISSED
from replay.report.html import write_html
from replay.report.json import write_json
from replay.report.reading import judge_run
from replay.sweeping import load_name

EXIT_CUT_SHORT = 1
DEFAULT_SHARE = 0.99


def parse_limits(texts: Sequence[str]) -> list[Limit]:
    """`ttft:p99:500ms`; `ttft:500` is of p99."""
    found = []
    for text in texts:
        parts = text.split(":")
        try:
            share = float(parts.pop(1).removeprefix("p")) / 100 if len(parts) == 3 else DEFAULT_SHARE
            if not 0 < share < 1:
                raise ValueError(text)
        except ValueError as error:
            raise PlanError("no such SLO", seen=repr(text), wanted="METRIC:pNN:MS, e.g. ttft:p99:500ms or tpot:p90:40") from error
        found.append(Limit(slo=parse_slos([":".join(parts)])[0], share=share))
    return found


def find_and_report(config: CapacityConfig, out: Console, err: Console) -> int:
    """Exit code: 1 cut short, 3 if the client was the limit, 4 if not even the lowest load meets the limits, else 0."""
    err.print(f"seed {config.sweep.seed}", highlight=False)
    found = run_capacity(config, lambda line: err.print(line, highlight=False, soft_wrap=True))
    run_dir = config.sweep.run_dir
    summary = judge_run(run_dir, [one.slo for one in config.limits])
    write_json(summary, run_dir / "summary.json")
    write_html(summary, run_dir / "report.html")
    for line in lines(found, summary.points, config):
        out.print(line, highlight=False, markup=False)
    if found.tried:
        out.print()
        out.print(table(found))
    err.print(f"\nreport: {run_dir / 'report.html'}   figures: {run_dir / 'capacity.json'}", highlight=False, soft_wrap=True)
    return exit_code(found)


def exit_code(found: Capacity) -> int:
    """A client that was the limit far above the bracket says nothing about it."""
    high = found.bracket.high
    if any(one.client_limit for one in found.tried if high is None or one.load <= high):
        return EXIT_INVALID
    if found.stopped is not None:
        return EXIT_CUT_SHORT
    return EXIT_OK if found.lowest_meets else EXIT_SLO_MISSED


def lines(found: Capacity, points: Sequence[Point], config: CapacityConfig) -> list[str]:
    """The answer, then what gives way above it, then what not to trust."""
    said = [_answer(found, config)]
    high = found.bracket.high
    causes = [one.cause for one in points if high is not None and one.scale >= high and one.cause]
    if causes:
        said.append(f"What gives way there: {causes[0]}.")
    if found.stopped is not None:
        said.append(f"The search ended before it was done: {found.stopped}.")
    limited = next((one for one in found.tried if one.client_limit), None)
    if limited is not None:
        said.append(f"Not valid from {_label(found, limited.load)} on: {limited.client_limit}.")
    said += [
        f"{_label(found, one.load)} is off Little's law by {one.little_off:.0%}: it was not steady, or a stamp is wrong."
        for one in found.tried
        if not one.obeys_little
    ]
    return said + [line for one in found.tried if one.load in (found.bracket.low, high) and (line := _part(found, one))]


def _part(found: Capacity, one: Tried) -> str | None:
    """Runs begin anywhere in the trace; a few short ones need not add up to it."""
    whole = found.trace_prompt_tokens
    if not whole or one.prompt_tokens is None or abs(one.prompt_tokens / whole - 1) <= PART_OFF:
        return None
    return (
        f"The runs at {_label(found, one.load)} had prompts of {one.prompt_tokens:,.0f} tokens on average, the whole trace "
        f"{whole:,.0f}: give more --requests or --repeats."
    )


def _answer(found: Capacity, config: CapacityConfig) -> str:
    def name(load: float) -> str:
        return load_name(config.sweep, load)

    low, high, estimate = found.bracket.low, found.bracket.high, found.bracket.estimate
    if not found.tried:
        return "Nothing was tried."
    if not found.lowest_meets:
        return f"Not even the lowest load that was tried, {name(found.tried[0].load)}, meets the limits."
    about = f", about {name(estimate)}" if estimate is not None else ""
    if low is not None and high is not None:
        return f"Capacity lies between {name(low)} and {name(high)} (99 % confidence at each end){about}."
    if low is not None:
        return f"Capacity is at least {name(low)}: no load of the range surely misses the limits{about}."
    below = f" and below {name(high)}" if high is not None else ""
    return f"Capacity is not sure{below}: too few requests to say that a load meets the limits{about}."


def table(found: Capacity) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    titles = ("load", "runs", "sent", "met all (99 % interval)", "verdict", "TTFT p99", "TPOT p99", "Little")
    for title in titles:
        shown.add_column(title, justify="left" if title == "load" else "right", no_wrap=True)
    for one in found.tried:
        shown.add_row(
            _label(found, one.load),
            str(one.runs),
            str(one.requests),
            _interval(one.shares[0]),
            "client" if one.client_limit else "grows" if one.is_growing else one.verdict,
            _ms(one.ttft_p99_ms),
            _ms(one.tpot_p99_ms),
            _little(one),
        )
    return shown


def _label(found: Capacity, load: float) -> str:
    return load_label(load, found.by)


def _interval(share: Share) -> str:
    return f"{share.seen:.2%} ({share.low:.1%}-{share.high:.1%})"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.1f} s"


def _little(one: Tried) -> str:
    """In flight as it was seen / as Little's law has it, over all runs; `!`: a run is off by more than a tenth."""
    if not one.little:
        return "-"
    ratio = sum(little.in_flight for little in one.little) / max(1e-9, sum(little.expected for little in one.little))
    return f"{ratio:.2f}{'' if one.obeys_little else '!'}"
