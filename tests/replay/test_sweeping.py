"""Sweeps find what is known: where the batch is full, where the KV cache is, and where a step has become twice as long."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.errors import PlanError
from replay.judge.summary import Point
from replay.report.reading import judge_run
from replay.sim.presets import preset_named
from replay.sim.server import ServerConfig, serving
from replay.sweeping import SweepConfig, run_sweep, sweep
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

LOADS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


def alike(path: Path, count: int, input_tokens: int, output_tokens: int) -> Path:
    """Requests of one size that share nothing."""
    rows: list[Request] = [
        {"request_id": i, "arrival_ns": i * 10**9, "input_tokens": input_tokens, "output_tokens": output_tokens}
        for i in range(count)
    ]
    write_trace(path, rows, Footer())
    return path


def swept(tmp_path: Path, trace: Path, **options: Any) -> list[Point]:
    asked: dict[str, Any] = {"kind": "concurrency", "values": LOADS, "engine": "h100-llama3-8b", "min_requests": 150}
    run_sweep(SweepConfig(trace=trace, run_dir=tmp_path / "run", **asked | options))
    return judge_run(tmp_path / "run").points


def first(points: list[Point], cause: str) -> float:
    return next(one.scale for one in points if one.cause is not None and cause in one.cause)


def test_the_queue_begins_where_the_batch_is_full(tmp_path: Path) -> None:
    points = swept(tmp_path, alike(tmp_path / "t.parquet", 400, 200, 60), max_num_seqs=16)

    assert first(points, "queue growth") == 32
    assert all(one.cache.running_max == min(one.scale, 16) for one in points)
    assert not any(one.cache.preemptions for one in points)
    at = {one.scale: one.requests_per_s for one in points}
    assert at[64] == pytest.approx(at[16], rel=0.05)  # the wall: nothing more is got through


def test_preemptions_begin_where_kv_memory_is_full(tmp_path: Path) -> None:
    """1,024 tokens a request at its end: 16 of them fill 16,384 tokens to the last block when they end together."""
    points = swept(tmp_path, alike(tmp_path / "t.parquet", 400, 512, 512), kv_tokens=16_384)

    assert first(points, "preemptions") == 32
    assert first(points, "KV full") in (16, 32)
    assert not any(one.cache.preemptions for one in points if one.scale <= 16)


def test_the_knee_is_where_a_step_takes_twice_as_long(tmp_path: Path) -> None:
    """Short prompts and long answers: a step reads the weights and every context, on average that of a request half way."""
    context, values = 64 + 500, (1.0, 32.0, 64.0, 128.0, 256.0)
    rows: list[Request] = [  # of many lengths, or all would be computed in step
        {"request_id": i, "arrival_ns": i * 10**9, "input_tokens": 64, "output_tokens": 500 + i * 613 % 1000} for i in range(400)
    ]
    write_trace(tmp_path / "t.parquet", rows, Footer())
    points = swept(tmp_path, tmp_path / "t.parquet", values=values, kv_tokens=4_000_000, max_s=600.0, min_requests=60)

    step_s = preset_named("h100-llama3-8b").step_s
    doubled = next(i for i, n in enumerate(values) if step_s(int(n), int(n) * context, int(n) * context) > 2 * step_s(1, 64, 64))
    knee = next(i for i, one in enumerate(points) if one.regime in ("knee", "wall"))
    assert abs(knee - doubled) <= 1
    assert "batch saturation" in (points[knee].cause or "")


def test_open_loop_at_a_rate_ends_at_the_wall(tmp_path: Path) -> None:
    trace = alike(tmp_path / "t.parquet", 400, 200, 60)
    most = swept(tmp_path, trace, max_num_seqs=4)[-1].requests_per_s

    rates = (0.25 * most, 0.5 * most, 2 * most)
    run_sweep(
        SweepConfig(
            trace=trace, run_dir=tmp_path / "rate", kind="rate", values=rates, engine="h100-llama3-8b", max_num_seqs=4, max_s=30.0
        )
    )

    low, half, over = judge_run(tmp_path / "rate").points
    assert low.regime == "flat"
    assert half.requests_per_s == pytest.approx(0.5 * most, rel=0.15)
    assert over.regime == "wall" and "queue growth" in (over.cause or "")
    assert over.requests_per_s == pytest.approx(most, rel=0.1)


@pytest.mark.parametrize("cache", ["cold", "primed", "carry"])
def test_littles_law_holds_at_every_point(tmp_path: Path, cache: str) -> None:
    points = swept(tmp_path, alike(tmp_path / "t.parquet", 300, 200, 60), values=(2.0, 8.0), cache=cache, min_requests=1000)

    for point in points:
        assert point.little is not None
        assert point.little.in_flight == pytest.approx(point.little.expected, rel=0.1)
        assert point.little.in_flight == pytest.approx(point.scale, rel=0.1)


def test_a_sweep_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    trace = alike(tmp_path / "t.parquet", 300, 200, 60)
    whole = swept(tmp_path, trace, values=(1.0, 4.0))
    path = tmp_path / "run" / "run.json"
    manifest = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(manifest | {"points": manifest["points"][:1]}))
    said: list[str] = []

    asked: dict[str, Any] = {"kind": "concurrency", "values": (1.0, 4.0), "engine": "h100-llama3-8b", "min_requests": 150}
    run_sweep(SweepConfig(trace=trace, run_dir=tmp_path / "run", resume=True, **asked), said.append)

    assert said[0] == "1 at once: done before" and len(said) == 2
    assert judge_run(tmp_path / "run").points == whole
    with pytest.raises(PlanError, match="another run is in this folder"):
        run_sweep(SweepConfig(trace=trace, run_dir=tmp_path / "run", resume=True, **asked | {"seed": 1}))
    with pytest.raises(PlanError, match="there is a run here already"):
        run_sweep(SweepConfig(trace=trace, run_dir=tmp_path / "run", **asked))


def test_what_was_carried_over_is_there_again_after_a_cut(tmp_path: Path) -> None:
    trace = alike(tmp_path / "t.parquet", 300, 200, 60)
    asked: dict[str, Any] = {"cache": "carry", "values": (1.0, 4.0)}
    whole = swept(tmp_path, trace, **asked)
    path = tmp_path / "run" / "run.json"
    manifest = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(manifest | {"points": manifest["points"][:1]}))

    again = swept(tmp_path, trace, resume=True, **asked)

    assert again == whole
    assert again[1].cache.hit_rate_reported is not None and again[1].cache.hit_rate_reported > 0.5


def test_a_live_server_is_swept_in_closed_loop(tmp_path: Path) -> None:
    trace = alike(tmp_path / "t.parquet", 200, 100, 12)

    async def run() -> None:
        async with serving(ServerConfig(port=0)) as url:
            asked: dict[str, Any] = {"kind": "concurrency", "values": (1.0, 4.0), "max_s": 1.5, "min_requests": 20}
            await sweep(SweepConfig(trace=trace, run_dir=tmp_path / "run", target=url, **asked))

    asyncio.run(run())

    one, four = judge_run(tmp_path / "run").points
    assert one.cache.running_max == 1
    assert four.requests_per_s > 1.5 * one.requests_per_s
    assert not one.errors and not four.errors


@pytest.mark.parametrize("kind", ["rate", "scale"])
def test_a_point_that_begins_within_the_trace_plays_what_is_there_with_a_lead_in(tmp_path: Path, kind: str) -> None:
    """A hundred sessions, one turn after the other: each turn carries 80 tokens more."""
    rows: list[Request] = []
    for i in range(2000):
        session, turn = i % 100, i // 100
        blocks = [session * 1000 + number for number in range(5 * (turn + 1))]
        rows.append(
            {"request_id": i, "session_id": session, "turn": turn, "parent_request_id": i - 100 if turn else None}
            | {"think_ns": 10**9 if turn else None, "arrival_ns": i * 10**8, "input_tokens": 80 * (turn + 1), "output_tokens": 64}
            | {"input_blocks": blocks}  # type: ignore[typeddict-item]
        )
    write_trace(tmp_path / "t.parquet", rows, Footer())
    asked: dict[str, Any] = {"kind": kind, "values": (4.0,), "engine": "h100-llama3-8b", "min_requests": 60, "by": "time"}

    def point(begin: float) -> Point:
        run_dir = tmp_path / str(begin)
        run_sweep(SweepConfig(trace=tmp_path / "t.parquet", run_dir=run_dir, begin=begin, **asked))
        return judge_run(run_dir).points[0]

    first, middle = point(0.0), point(0.4)

    assert "part_differs" in {note.kind for note in first.notes} and first.standing == "suspect"
    assert middle.input_tokens_per_s / middle.requests_per_s > 640 > first.input_tokens_per_s / first.requests_per_s
    assert middle.window_s[0] > 0 and middle.cache.hit_rate_usage is not None and middle.cache.hit_rate_usage > 0.5


@pytest.mark.parametrize("kind", ["concurrency", "rate"])
def test_several_targets_are_swept_as_one_and_each_is_told_of(tmp_path: Path, kind: str) -> None:
    trace = alike(tmp_path / "t.parquet", 200, 100, 12)
    (tmp_path / "key").write_text("secret\n")

    async def run() -> str:
        async with serving(ServerConfig(port=0)) as first, serving(ServerConfig(port=0)) as second:
            asked: dict[str, Any] = {"kind": kind, "values": (8.0,), "max_s": 1.5, "min_requests": 1000, "prompt_mode": "chat"}
            targets: dict[str, Any] = {"target": first, "other_targets": (second,), "router": "rr"}
            key = tmp_path / "key"
            await sweep(SweepConfig(trace=trace, run_dir=tmp_path / "run", api_key_file=key, **asked | targets))
            return f"{first}, {second}"

    urls = asyncio.run(run())

    manifest = msgspec.json.decode((tmp_path / "run" / "run.json").read_bytes())
    (point,) = judge_run(tmp_path / "run").points
    one, two = point.servers
    assert manifest["target"] == urls and manifest["router"] == "rr" and manifest["prompt_mode"] == "chat"
    assert "key" not in (tmp_path / "run" / "run.json").read_text()
    assert abs(one.planned - two.planned) <= 1 and one.planned + two.planned == point.completed > 4
    assert one.hit_rate_predicted is not None and one.hit_rate_predicted == pytest.approx(one.hit_rate_usage, abs=0.03)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine": None}, "either --target URL or --engine PRESET"),
        ({"values": (0.0,)}, "numbers above 0"),
        ({"values": (1.5,)}, "whole numbers"),
        ({"begin": 1.0}, "below 1"),
        ({"engine": "h100-llama4"}, "h100-llama3-8b"),
    ],
)
def test_what_cannot_be_swept_is_said_before_anything_is_sent(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        swept(tmp_path, alike(tmp_path / "t.parquet", 10, 100, 10), **changes)

    assert not (tmp_path / "run").exists()
