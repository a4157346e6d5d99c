"""The capacity of a simulated engine is where long runs of it say, and a user is told what cannot be searched for."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from replay.capacity import Capacity, CapacityConfig, find, run_capacity
from replay.errors import PlanError
from replay.judge import metrics
from replay.judge.search import Limit
from replay.judge.summary import Slo
from replay.outcome import Outcome
from replay.plan.load import as_long_as, at_rate
from replay.run import planned
from replay.sim.presets import changed, preset_named
from replay.sim.server import ServerConfig, serving
from replay.sim.virtual import play
from replay.sweeping import SweepConfig
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

ENGINE, SEQUENCES = "h100-llama3-8b", 4
LIMITS = [Limit(slo=Slo(metric="ttft", limit_ms=400.0), share=0.9)]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of several lengths that share nothing, one a second."""
    rows: list[Request] = [
        {"request_id": i, "arrival_ns": i * 10**9, "input_tokens": 200, "output_tokens": 20 + i * 37 % 60} for i in range(400)
    ]
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    write_trace(path, rows, Footer())
    return path


@pytest.fixture(scope="module")
def true_share(trace: Path) -> Any:
    """Of a load: the share of requests that meet the limit, in one long run."""
    plan = planned(trace, 0, limit=None, dequantise=True, open_loop=False)
    preset = changed(preset_named(ENGINE), max_num_seqs=SEQUENCES)

    def share(load: float, requests: int = 5_000) -> float:
        long = at_rate(as_long_as(plan, requests), load, "poisson", np.random.default_rng(99), waits=False)
        played = play(long, preset, replicas=1, router="rr", sample_s=10.0)
        met = [metrics.meets(one, [LIMITS[0].slo]) for one in played if isinstance(one, Outcome) and one.request_id > 500]
        return sum(met) / len(met)

    return share


def searched(folder: Path, trace: Path, changes: dict[str, Any] | None = None, **options: Any) -> Capacity:
    asked: dict[str, Any] = {"engine": ENGINE, "max_num_seqs": SEQUENCES, "kind": "rate", "max_s": 3600.0}
    sweep = SweepConfig(trace=trace, run_dir=folder, values=(1.0,), **asked | (changes or {}))
    settings: dict[str, Any] = {
        "limits": LIMITS,
        "attain": 0.9,
        "lowest": 8.0,
        "highest": 100.0,
        "tolerance": 0.1,
        "requests": 1000,
    }
    return run_capacity(CapacityConfig(sweep=sweep, **settings | options))


@pytest.mark.slow
def test_the_bracket_holds_the_capacity_of_long_runs(tmp_path: Path, trace: Path, true_share: Any) -> None:
    found = searched(tmp_path / "run", trace)

    low, high = found.bracket.low, found.bracket.high
    assert low is not None and high is not None and high < 1.5 * low
    assert true_share(low) > 0.9 > true_share(high)
    assert found.lowest_meets and found.stopped is None
    assert all(one.obeys_little for one in found.tried)
    assert msgspec.json.decode((tmp_path / "run" / "capacity.json").read_bytes(), type=Capacity) == found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nineteen_of_twenty_brackets_hold_the_capacity_of_long_runs(tmp_path: Path, trace: Path, true_share: Any) -> None:
    held = 0
    for seed in range(20):
        bracket = searched(tmp_path / str(seed), trace, {"seed": seed}).bracket
        assert bracket.low is not None and bracket.high is not None
        held += true_share(bracket.low, 40_000) >= 0.9 >= true_share(bracket.high, 40_000)
    assert held >= 19


def test_a_search_goes_on_where_it_was_cut_off(tmp_path: Path, trace: Path) -> None:
    options: dict[str, Any] = {"lowest": 8.0, "highest": 32.0, "tolerance": 1.0, "requests": 300}
    whole = searched(tmp_path / "run", trace, **options)
    path = tmp_path / "run" / "run.json"
    manifest = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(manifest | {"points": manifest["points"][:2]}))

    assert searched(tmp_path / "run", trace, {"resume": True}, **options) == whole
    with pytest.raises(PlanError, match="another search is in this folder"):
        searched(tmp_path / "run", trace, {"resume": True}, lowest=9.0, highest=10.0, requests=300)


def test_scaled_by_time_the_trace_has_a_capacity_too(tmp_path: Path, trace: Path) -> None:
    """One request a second: k times as fast is k requests a second, and evenly spaced ones, so more than Poisson's."""
    found = searched(
        tmp_path / "run", trace, {"kind": "scale", "by": "time"}, lowest=8.0, highest=64.0, tolerance=1.0, requests=300
    )

    assert found.by == "time"
    assert found.bracket.low is not None and found.bracket.low >= 8


def test_not_even_the_lowest_load_meets_what_no_server_can(tmp_path: Path, trace: Path) -> None:
    limits = [Limit(slo=Slo(metric="ttft", limit_ms=0.1), share=0.9)]

    found = searched(tmp_path / "run", trace, limits=limits, lowest=4.0, highest=16.0, requests=300)

    assert not found.lowest_meets
    assert found.bracket.low is None and found.bracket.high == 4.0


def test_a_live_server_is_searched(tmp_path: Path, trace: Path) -> None:
    """Time limits that it meets and others that it cannot, at two loads."""

    async def run(limit_ms: float) -> Capacity:
        async with serving(ServerConfig(preset=ENGINE, port=0)) as url:
            sweep = SweepConfig(
                trace=trace,
                run_dir=tmp_path / str(limit_ms),
                kind="rate",
                values=(1.0,),
                target=url,
                max_s=2.0,
            )
            limits = [Limit(slo=Slo(metric="ttft", limit_ms=limit_ms), share=0.5)]
            options: dict[str, Any] = {"lowest": 40.0, "highest": 60.0, "tolerance": 0.5, "repeats": 2, "requests": 40}
            return await find(CapacityConfig(sweep=sweep, limits=limits, attain=0.5, **options))

    met, missed = asyncio.run(run(5000.0)), asyncio.run(run(0.001))

    assert met.bracket.low == 60.0 and met.bracket.high is None and met.lowest_meets
    assert not missed.lowest_meets and missed.bracket.low is None


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"limits": []}, "under which limit"),
        ({"kind": "concurrency"}, {}, "open loop"),
        ({}, {"attain": 1.0}, "--attain 1"),
        ({}, {"tolerance": 0.0}, "--tolerance 0"),
        ({}, {"repeats": 1}, "2 or more"),
        ({}, {"lowest": 5.0, "highest": 2.0}, "--range 5..2"),
        ({"kind": "scale", "by": "users"}, {"lowest": 0.5}, "--load time"),
        ({"engine": None}, {}, "either --target URL or --engine PRESET"),
    ],
)
def test_what_cannot_be_searched_for_is_said(
    tmp_path: Path, trace: Path, changes: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        searched(tmp_path / "run", trace, changes, **options)

    assert not (tmp_path / "run").exists()
