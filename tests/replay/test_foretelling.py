"""`chatreel predict`: a run folder like that of a replay, and figures like those of the simulated server in real time."""

import asyncio
from pathlib import Path

import pytest

from replay.foretelling import PredictConfig, run_predict
from replay.judge.summary import Summary
from replay.report.reading import judge_run
from replay.results import read_outcomes
from replay.run import ReplayConfig, replay
from replay.sim.server import ServerConfig, serving
from tests.replay.test_replay import chats
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

PRESET, KV_TOKENS = "laptop-demo", 8192
MS = 1_000_000


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "chats.parquet"
    write_trace(path, chats(sessions=40, turns=3, gap_s=0.1), Footer())
    return path


def predicted(trace: Path, run_dir: Path, **options: object) -> Summary:
    settings = {"engine": PRESET, "kv_tokens": KV_TOKENS, "scales": (1.0, 2.0), **options}
    return judge_run(run_predict(PredictConfig(trace=trace, run_dir=run_dir, **settings)))  # type: ignore[arg-type]


def test_a_prediction_is_a_run_that_says_that_it_is_one(trace: Path, tmp_path: Path) -> None:
    summary = predicted(trace, tmp_path / "run")

    assert [point.completed for point in summary.points] == [120, 240]
    assert all(point.valid and not point.errors for point in summary.points)
    assert summary.target.startswith("simulated: laptop-demo, 8,192 tokens")
    assert any("no server was asked" in note.seen for note in summary.notes)


def test_the_same_seed_gives_the_same_bytes(trace: Path, tmp_path: Path) -> None:
    for name in "ab":
        predicted(trace, tmp_path / name)

    for file in sorted((tmp_path / "a").glob("point-*")):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_figures_are_those_of_the_same_engine_in_real_time(trace: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(ServerConfig(port=0, preset=PRESET, kv_tokens=KV_TOKENS)) as url:
            await replay(ReplayConfig(trace=trace, target=url, run_dir=tmp_path / "real", scales=(1.0,)))

    asyncio.run(run())
    real = judge_run(tmp_path / "real").points[0]
    ours = predicted(trace, tmp_path / "ours", scales=(1.0,)).points[0]

    assert ours.cache.hit_rate_usage == pytest.approx(real.cache.hit_rate_usage, abs=0.02)
    assert ours.latency.tpot_ms is not None and real.latency.tpot_ms is not None
    assert ours.latency.tpot_ms.p50 == pytest.approx(real.latency.tpot_ms.p50, rel=0.25)  # a shared machine; bench has more
    assert ours.latency.e2e_schedule_ms is not None and real.latency.e2e_schedule_ms is not None
    assert ours.latency.e2e_schedule_ms.p50 == pytest.approx(real.latency.e2e_schedule_ms.p50, rel=0.25)


def test_more_replicas_wait_less(trace: Path, tmp_path: Path) -> None:
    one, two = (predicted(trace, tmp_path / str(count), replicas=count, kv_tokens=3072).points[1] for count in (1, 2))

    assert one.latency.ttft_schedule_ms is not None and two.latency.ttft_schedule_ms is not None
    assert two.latency.ttft_schedule_ms.p99 < one.latency.ttft_schedule_ms.p99
    assert (two.cache.preemptions or 0) <= (one.cache.preemptions or 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 0}, "replicas"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"router": "star"}, "router"),
        ({"engine": "abacus"}, "preset"),
    ],
)
def test_what_is_wrong_is_named(trace: Path, tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=words):
        predicted(trace, tmp_path / "run", **options)


def test_hang_ups_are_those_of_a_replay_against_the_server(tmp_path: Path) -> None:
    """Out of long answers, before the first token, and one that would have been done by then; a later turn waits for its end."""
    rows: list[Request] = [
        {"request_id": i, "arrival_ns": i * 40 * MS, "input_tokens": 300, "output_tokens": 12, "session_id": i, "turn": 0}
        for i in range(6)
    ]
    rows[1] |= {"max_tokens": 900, "client_abort_ns": 700 * MS}
    rows[2] |= {"output_tokens": None, "max_tokens": 900, "client_abort_ns": 1 * MS}
    rows[4] |= {"max_tokens": 12, "client_abort_ns": 60_000 * MS}
    more: Request = {"request_id": 6, "arrival_ns": 900 * MS, "input_tokens": 400, "output_tokens": 5, "think_ns": 30 * MS}
    write_trace(tmp_path / "t.parquet", [*rows, {**more, "session_id": 1, "turn": 1}], Footer())

    async def run() -> None:
        async with serving(ServerConfig(preset=PRESET, port=0, kv_tokens=KV_TOKENS)) as url:
            await replay(ReplayConfig(trace=tmp_path / "t.parquet", target=url, run_dir=tmp_path / "real", scales=(1.0,)))

    asyncio.run(run())
    summary = predicted(tmp_path / "t.parquet", tmp_path / "sim", scales=(1.0,))
    real, sim = (sorted(read_outcomes(tmp_path / name, 0)[0], key=lambda one: one.request_id) for name in ("real", "sim"))

    assert [one.error_kind for one in sim] == [one.error_kind for one in real]
    assert [one.error_kind for one in sim].count("client_abort") == 2
    for one, other in zip(real, sim, strict=True):
        assert (one.error_text, one.cached_tokens, one.finish_reason) == (
            other.error_text,
            other.cached_tokens,
            other.finish_reason,
        )
        assert (one.input_tokens, one.token_count_source) == (other.input_tokens, other.token_count_source)
        assert (other.output_tokens or 0) == pytest.approx(one.output_tokens or 0, rel=0.2, abs=2)
    assert 20 < (sim[1].output_tokens or 0) < 900
    assert sim[1].end_ns == sim[1].planned_ns + 700 * MS and sim[6].planned_ns == sim[1].end_ns + 30 * MS
    assert (summary.points[0].hung_up, summary.points[0].errors) == (2, {})
    patient = predicted(tmp_path / "t.parquet", tmp_path / "patient", scales=(1.0,), hang_up=False)
    assert (patient.points[0].hung_up, patient.points[0].completed) == (0, 7)
