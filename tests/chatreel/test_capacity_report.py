"""What `chatreel capacity` takes, says and returns."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from chatreel.capacity_report import exit_code, lines, parse_limits, table
from replay.capacity import Capacity, CapacityConfig
from replay.errors import PlanError
from replay.judge.search import Bracket, Limit, Share, Tried
from replay.judge.summary import Little, Slo
from replay.sweeping import SweepConfig

LIMITS = [Limit(slo=Slo(metric="ttft", limit_ms=500.0), share=0.99)]
CONFIG = CapacityConfig(sweep=SweepConfig(trace=Path("t"), run_dir=Path("r"), kind="rate", values=(1.0,)), limits=LIMITS)


def tried(load: float, seen: float, **changes: Any) -> Tried:
    share = Share(name="all limits", wanted=0.99, seen=seen, low=seen - 0.004, high=min(1.0, seen + 0.004))
    one = Tried(
        load=load,
        runs=5,
        requests=12_345,
        is_growing=False,
        client_limit=None,
        shares=[share],
        ttft_p99_ms=123.4,
        tpot_p99_ms=12.3,
        little=[Little(in_flight=30.0, rate_per_s=10.0, time_s=3.0)],
    )
    return msgspec.structs.replace(one, **changes)


def found(bracket: Bracket, *tries: Tried, **changes: Any) -> Capacity:
    one = Capacity(
        trace="t.parquet",
        target="simulated",
        by="rate",
        attain=0.99,
        limits=LIMITS,
        seed=0,
        bracket=bracket,
        lowest_meets=tries[0].seems_to_meet,
        tried=list(tries),
    )
    return msgspec.structs.replace(one, **changes)


def test_runs_whose_prompts_are_not_those_of_the_trace_are_said() -> None:
    tries = [tried(10.0, 0.997, prompt_tokens=850.0), tried(12.5, 0.95, prompt_tokens=1_040.0)]
    one = found(Bracket(low=10.0, high=12.5, estimate=11.0), *tries, trace_prompt_tokens=1_000.0)

    said = [line for line in lines(one, [], CONFIG) if "whole trace" in line]

    assert said == [
        "The runs at 10/s had prompts of 850 tokens on average, the whole trace 1,000: give more --requests or --repeats."
    ]


WHOLE = found(Bracket(low=10.0, high=12.5, estimate=11.0), tried(10.0, 0.997), tried(12.5, 0.95))


@pytest.mark.parametrize(
    ("text", "metric", "limit_ms", "share"),
    [("ttft:p99:500ms", "ttft", 500.0, 0.99), ("tpot:p90:40", "tpot", 40.0, 0.9), ("e2e:10000", "e2e", 10_000.0, 0.99)],
)
def test_a_limit_is_a_metric_a_percentile_and_milliseconds(text: str, metric: str, limit_ms: float, share: float) -> None:
    (limit,) = parse_limits([text])

    assert (limit.slo.metric, limit.slo.limit_ms) == (metric, limit_ms)
    assert limit.share == pytest.approx(share)


@pytest.mark.parametrize("text", ["ttft", "ttft:p0:5", "ttft:p100:5", "ttft:p99:-5ms", "itl:p99:5", "ttft:p99:nan", "ttft:x:5"])
def test_other_limits_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match="no such SLO.*ttft"):
        parse_limits([text])


def test_the_answer_comes_first_and_the_table_fits_80_columns() -> None:
    screen = io.StringIO()
    growing = tried(1234.5, 0.123, is_growing=True, ttft_p99_ms=123_456.0, tpot_p99_ms=1234.0)

    Console(file=screen, width=80).print(table(found(WHOLE.bracket, *WHOLE.tried, growing)))

    assert lines(WHOLE, [], CONFIG)[0] == ("Capacity lies between 10/s and 12.5/s (99 % confidence at each end), about 11/s.")
    shown = screen.getvalue()
    assert "99.70% (99.3%-100.0%)" in shown and "grows" in shown and "123.5 s" in shown
    assert "…" not in shown


def test_what_is_off_littles_law_is_named() -> None:
    off = tried(12.5, 0.95, little=[Little(in_flight=40.0, rate_per_s=10.0, time_s=3.0)])

    assert any("off Little's law by 33%" in line for line in lines(found(WHOLE.bracket, WHOLE.tried[0], off), [], CONFIG))


@pytest.mark.parametrize(
    ("capacity", "code"),
    [
        (WHOLE, 0),
        (found(Bracket(low=None, high=10.0, estimate=None), tried(10.0, 0.5)), 4),
        (found(WHOLE.bracket, WHOLE.tried[0], tried(12.5, 0.95, client_limit="late")), 3),
        (found(WHOLE.bracket, *WHOLE.tried, tried(50.0, 0.1, client_limit="late")), 0),
        (msgspec.structs.replace(WHOLE, stopped="interrupted"), 1),
    ],
)
def test_exit_codes(capacity: Capacity, code: int) -> None:
    assert exit_code(capacity) == code
