"""The client's own series: valid OpenMetrics, counted right, served on loopback while a replay runs."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from replay.edge.page import served
from replay.errors import PlanError
from replay.live import CONTENT_TYPE, EDGES_S, Tally, is_late, joined, render
from replay.outcome import Outcome
from replay.progress import Progress
from replay.run import ReplayConfig, replay
from replay.sim.server import ServerConfig, serving
from tracer.schema import Footer
from tracer.tracefile import write_trace


def values(text: str) -> dict[str, float]:
    return {
        one.name + one.labels.get("le", ""): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_histograms_count_each_outcome_once(outcome: Callable[..., Outcome]) -> None:
    tally = Tally()
    for one in (
        outcome(late_ms=0.3, ttft_ms=50, tpot_ms=10),
        outcome(late_ms=20.0, ttft_ms=400, tpot_ms=30),
        outcome(error="timeout"),
    ):
        tally.add(one)

    seen = values(render("1", {"requests_sent": 3}, {"predicted_hit_rate": None, "planned_requests": 3}, tally))

    assert seen["chatreel_replay_requests_sent_total"] == 3 and seen["chatreel_replay_planned_requests"] == 3
    assert "chatreel_replay_predicted_hit_rate" not in seen
    assert seen["chatreel_replay_lateness_seconds_count"] == 3 and seen["chatreel_replay_lateness_seconds_bucket0.01"] == 2
    assert seen["chatreel_replay_ttft_seconds_bucket0.1"] == 1 and seen["chatreel_replay_ttft_seconds_bucket+Inf"] == 2
    assert seen["chatreel_replay_ttft_seconds_sum"] == pytest.approx(0.0503 + 0.420)
    assert seen["chatreel_replay_tpot_seconds_sum"] == pytest.approx(0.04)


def test_shares_are_added_up_and_what_lies_beyond_the_last_edge_counts(outcome: Callable[..., Outcome]) -> None:
    tallies = [Tally(), Tally()]
    tallies[0].add(outcome(late_ms=0.05))
    tallies[1].add(outcome(late_ms=9_000.0))

    both = joined(tallies)

    assert sum(both.counts["lateness"]) == 2 and both.counts["lateness"][-1] == 1
    assert both.quantile_s("lateness", 0.5) == EDGES_S["lateness"][0] and both.quantile_s("lateness", 0.99) is None
    assert is_late(both) and not is_late(joined(tallies[:1])) and not is_late(Tally())


def test_a_replay_shows_its_series_while_it_runs(tmp_path: Path) -> None:
    rows = [{"request_id": i, "arrival_ns": i * 20_000_000, "input_tokens": 100, "output_tokens": 5} for i in range(50)]
    write_trace(tmp_path / "t.parquet", rows, Footer())  # type: ignore[arg-type]
    pages: list[str] = []

    async def run() -> None:
        async with serving(ServerConfig(port=0, preset="h100-llama3-1b")) as url, httpx.AsyncClient() as client:
            async with served(0, "", lambda: "") as free:
                port = int(free.rsplit(":", 1)[1].partition("/")[0])

            async def look() -> None:
                while True:
                    try:
                        response = await client.get(f"http://127.0.0.1:{port}/metrics")
                        assert response.headers["Content-Type"] == CONTENT_TYPE
                        pages.append(response.text)
                    except httpx.ConnectError:
                        pass
                    await asyncio.sleep(0.05)

            task = asyncio.create_task(look())
            config = ReplayConfig(
                trace=tmp_path / "t.parquet",
                target=url,
                run_dir=tmp_path / "run",
                scales=(1.0,),
                serve_metrics=port,
                metrics_hz=10,
            )
            await replay(config)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())

    sent = [values(page).get("chatreel_replay_requests_sent_total", 0) for page in pages]
    assert sent == sorted(sent) and 10 < sent[-1] <= 50
    assert values(pages[-1])["chatreel_replay_ttft_seconds_count"] > 5


def test_other_paths_and_a_taken_port_are_said() -> None:
    async def ask() -> tuple[int, str]:
        async with served(0, "text/plain", Progress(scale=1, planned=2, predicted_hit_rate=None).openmetrics) as url:
            async with httpx.AsyncClient() as client:
                status = (await client.get(url.replace("/metrics", "/other"))).status_code
            with pytest.raises(PlanError, match="Choose another"):
                async with served(int(url.split(":")[2].partition("/")[0]), "", lambda: ""):
                    pass
            return status, url

    assert asyncio.run(ask())[0] == 404
