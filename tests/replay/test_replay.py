"""A whole replay against the simulated server: what was predicted is what the server reports, and faults keep results."""

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pyarrow.parquet import read_table as read_parquet

from replay.errors import PlanError
from replay.outcome import Outcome, Sample
from replay.progress import Progress
from replay.report.reading import judge_run
from replay.results import read_lines, read_outcomes
from replay.run import ReplayConfig, replay
from replay.sim.api import Ask
from replay.sim.engine import Request as EngineRequest
from replay.sim.server import ServerConfig, Simulator, Stream, serving
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

SYSTEM_BLOCKS = 20


def chats(sessions: int, turns: int, gap_s: float) -> Iterator[Request]:
    """Sessions below one system prompt; each turn carries the conversation so far."""
    next_id = SYSTEM_BLOCKS
    rows: list[Request] = []
    for session in range(sessions):
        known, length = list(range(SYSTEM_BLOCKS)), SYSTEM_BLOCKS * 16
        for turn in range(turns):
            length += 50
            total = length + 40
            next_id_after = next_id + total // 16 - len(known)
            path = known + list(range(next_id, next_id_after))
            next_id = next_id_after
            rows.append(
                {
                    "arrival_ns": int((session * gap_s + turn * 1.0) * 1e9),
                    "session_id": session,
                    "turn": turn,
                    "think_ns": 200_000_000 if turn else None,
                    "input_tokens": length,
                    "output_tokens": 40,
                    "input_blocks": path[: length // 16],
                    "output_blocks": path[length // 16 :],
                }
            )
            known, length = path, total
    rows.sort(key=lambda row: row["arrival_ns"])
    return ({"request_id": i, **row} for i, row in enumerate(rows))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "chats.parquet"
    write_trace(path, chats(sessions=12, turns=3, gap_s=0.15), Footer())
    return path


def outcomes(run_dir: Path, point: int = 0) -> list[Outcome]:
    seen, torn = read_outcomes(run_dir, point)
    assert not torn
    return seen


@pytest.mark.parametrize("by", ["users", "time"])
def test_reported_hit_rate_is_the_predicted_one(trace: Path, tmp_path: Path, by: str) -> None:
    async def run() -> None:
        async with serving(ServerConfig(port=0)) as url:
            config = ReplayConfig(trace=trace, target=url, run_dir=tmp_path / "run", scales=(1.0, 2.0), by=by)  # type: ignore[arg-type]
            await replay(config)

    asyncio.run(run())

    manifest = msgspec.json.decode((tmp_path / "run" / "run.json").read_bytes())
    for point in manifest["points"]:
        seen = outcomes(tmp_path / "run", point["index"])
        assert len(seen) == point["planned"] == (36 if by == "time" else 36 * point["scale"])
        assert {one.error_kind for one in seen} == {None}
        assert all(one.input_tokens == one.planned_input_tokens for one in seen)
        assert all(one.output_tokens == one.planned_output_tokens for one in seen)
        assert all(one.answer_spliced for one in seen if one.turn)
        reported = sum(one.cached_tokens or 0 for one in seen) / sum(one.input_tokens or 0 for one in seen)
        assert reported == pytest.approx(point["hit_rate_predicted"], abs=0.02)
        assert reported > 0.7


@pytest.mark.parametrize("choice", [{"workers": 2}, {"transport": "httpx"}])
def test_several_processes_and_the_other_transport_do_the_same(trace: Path, tmp_path: Path, choice: dict[str, Any]) -> None:
    async def run() -> None:
        async with serving(ServerConfig(port=0)) as url:
            await replay(ReplayConfig(trace=trace, target=url, run_dir=tmp_path / "run", scales=(1.0, 2.0), **choice))

    asyncio.run(run())

    workers = choice.get("workers", 1)
    for point, planned in enumerate((36, 72)):
        seen = outcomes(tmp_path / "run", point)
        assert sorted(one.request_id for one in seen) == list(range(planned))
        assert {one.error_kind for one in seen} == {None}
        assert all(one.answer_spliced for one in seen if one.turn)
        parts = [read_parquet(path) for path in (tmp_path / "run").glob(f"point-{point}.outcomes-*.parquet")]
        assert len(parts) == workers and all(len(part) for part in parts)
        sessions = [set(part["session_id"].to_pylist()) for part in parts]
        assert len(set.union(*sessions)) == sum(map(len, sessions))


def test_a_trace_read_while_it_is_sent_gives_the_same_requests_and_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "chats.parquet"
    write_trace(trace, chats(sessions=6, turns=2, gap_s=0.1), Footer())
    prompts: list[bytes] = []

    def seen(self: Simulator, ask: Ask, prompt: "array[int]", arrival_s: float) -> tuple[EngineRequest, Stream]:
        prompts.append(prompt.tobytes())
        return opened(self, ask, prompt, arrival_s)

    opened = Simulator.open
    monkeypatch.setattr(Simulator, "open", seen)

    async def run(folder: str, long_references: int) -> list[Any]:
        async with serving(ServerConfig(port=0, speed=8)) as url:
            prompts.clear()
            config = ReplayConfig(
                trace=trace,
                target=url,
                run_dir=tmp_path / folder,
                scales=(1.0, 2.0),
                prompt_mode="text",  # later turns do not carry what the server happened to answer
                open_loop=True,
                long_references=long_references,
            )
            await replay(config)
        points = msgspec.json.decode((tmp_path / folder / "run.json").read_bytes())["points"]
        due = [
            sorted((one.request_id, one.planned_ns, one.planned_input_tokens) for one in outcomes(tmp_path / folder, index))
            for index in range(2)
        ]
        return [sorted(prompts), due, points]

    before, beside = (asyncio.run(run(folder, most)) for folder, most in (("before", 10**9), ("beside", 0)))

    assert before == beside
    assert before[2][0]["hit_rate_predicted"] > 0.7


def test_later_turns_wait_for_the_answer_and_think(trace: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(ServerConfig(port=0)) as url:
            await replay(ReplayConfig(trace=trace, target=url, run_dir=tmp_path / "run", scales=(1.0,)))

    asyncio.run(run())

    turns = {(one.session_id, one.turn): one for one in outcomes(tmp_path / "run")}
    for (session, turn), one in turns.items():
        if turn:
            before = turns[session, turn - 1]
            assert before.end_ns is not None
            assert one.planned_ns == before.end_ns + 200_000_000
            assert one.sent_ns is not None and one.sent_ns >= one.planned_ns


def test_samples_hold_server_and_client_state(trace: Path, tmp_path: Path) -> None:
    shown: list[Progress] = []

    async def run() -> None:
        async with serving(ServerConfig(port=0)) as url:
            config = ReplayConfig(trace=trace, target=url, run_dir=tmp_path / "run", scales=(1.0,))
            await replay(config, shown.append)

    asyncio.run(run())

    lines = (tmp_path / "run" / "point-0.samples.jsonl").read_bytes().splitlines()
    samples = [msgspec.json.decode(line, type=Sample) for line in lines]
    assert samples[-1].prompt_tokens == sum(one.planned_input_tokens for one in outcomes(tmp_path / "run"))
    assert samples[-1].preemptions == 0
    assert max(one.kv_usage or 0 for one in samples) > 0
    assert shown[-1].counts.ended == shown[-1].counts.sent == 36


@pytest.mark.parametrize("mode", ["text", "chat"])
def test_text_prompts_have_the_same_lengths(trace: Path, tmp_path: Path, mode: str) -> None:
    async def run() -> None:
        async with serving(ServerConfig(port=0)) as url:
            config = ReplayConfig(trace=trace, target=url, run_dir=tmp_path / "run", scales=(1.0,), prompt_mode=mode, limit=20)
            await replay(config)

    asyncio.run(run())

    seen = outcomes(tmp_path / "run")
    assert len(seen) == 20
    assert all(one.input_tokens == one.planned_input_tokens for one in seen)
    assert not any(one.answer_spliced for one in seen)


def test_a_target_that_dies_leaves_what_was_seen_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "many.parquet"
    rng = np.random.default_rng(0)
    stamps = np.sort(rng.integers(0, 4_000_000_000, 120)).tolist()
    rows: list[Request] = [
        {"request_id": i, "arrival_ns": t, "input_tokens": 64, "output_tokens": 4} for i, t in enumerate(stamps)
    ]
    write_trace(path, rows, Footer())

    async def run() -> None:
        async with AsyncExitStack() as stack:
            url = await stack.enter_async_context(serving(ServerConfig(port=0)))
            asyncio.get_running_loop().call_later(1.5, lambda: asyncio.ensure_future(stack.aclose()))
            await replay(ReplayConfig(trace=path, target=url, run_dir=tmp_path / "run", scales=(1.0, 2.0)))

    asyncio.run(run())

    manifest = msgspec.json.decode((tmp_path / "run" / "run.json").read_bytes())
    seen = outcomes(tmp_path / "run")
    assert "the target is gone" in manifest["points"][-1]["stopped"]
    assert len(manifest["points"]) == 1
    assert 0 < sum(one.error_kind is None for one in seen) < 120
    assert {one.error_kind for one in seen} <= {None, "connect", "connection_lost"}


def test_an_unreachable_target_is_the_users_to_mend(trace: Path, tmp_path: Path) -> None:
    config = ReplayConfig(trace=trace, target="http://127.0.0.1:1", run_dir=tmp_path / "run")

    with pytest.raises(PlanError, match="127.0.0.1:1: the target cannot be reached"):
        asyncio.run(replay(config))

    assert not (tmp_path / "run").exists()


def test_several_metrics_pages_are_one_server_and_each_its_own(trace: Path, tmp_path: Path) -> None:
    async def run() -> list[str]:
        async with serving(ServerConfig(port=0)) as url, serving(ServerConfig(port=0)) as idle:
            pages = [url + "/metrics", idle + "/metrics"]
            config = ReplayConfig(
                trace=trace, target=url, run_dir=tmp_path / "run", scales=(1.0,), limit=8, metrics_urls=tuple(pages)
            )
            await replay(config)
            return pages

    pages = asyncio.run(run())

    manifest = msgspec.json.decode((tmp_path / "run" / "run.json").read_bytes())
    assert manifest["metrics_urls"] == pages
    assert any("predicted as one" in note for note in manifest["notes"])
    samples, _ = read_lines(tmp_path / "run" / "point-0.samples.jsonl", Sample)
    seen = outcomes(tmp_path / "run")
    assert samples[-1].prompt_tokens == sum(one.input_tokens or 0 for one in seen)
    assert all(list(one.servers) == pages and one.servers[pages[1]]["running"] == 0 for one in samples)
    assert max(one.servers[pages[0]]["running"] for one in samples) > 0


def test_a_metrics_page_that_was_asked_for_must_be_there(trace: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(ServerConfig(port=0)) as url:
            await replay(ReplayConfig(trace=trace, target=url, run_dir=tmp_path / "run", metrics_urls=(url + "/v1/models",)))

    with pytest.raises(PlanError, match="no metrics here"):
        asyncio.run(run())


@pytest.mark.parametrize("router", ["prefix", "sticky", "rr"])
def test_each_of_several_targets_reports_the_hit_rate_predicted_for_its_share(trace: Path, tmp_path: Path, router: str) -> None:
    async def run() -> list[str]:
        async with serving(ServerConfig(port=0, speed=2)) as first, serving(ServerConfig(port=0, speed=2)) as second:
            config = ReplayConfig(
                trace=trace,
                target=first,
                other_targets=(second,),
                router=router,  # type: ignore[arg-type]
                run_dir=tmp_path / "run",
                scales=(2.0,),
                by="time",
                workers=2 if router == "rr" else 1,
            )
            await replay(config)
            return [first, second]

    urls = asyncio.run(run())

    manifest = msgspec.json.decode((tmp_path / "run" / "run.json").read_bytes())
    facts, (point,) = manifest["points"][0], judge_run(tmp_path / "run").points
    seen = outcomes(tmp_path / "run")
    assert manifest["router"] == router and manifest["target"] == ", ".join(urls) == ", ".join(one.url for one in point.servers)
    assert [one["planned"] for one in facts["servers"]] == [sum(one.server == n for one in seen) for n in (0, 1)]
    assert {one.error_kind for one in seen} == {None} and len(seen) == 36
    if router == "sticky":
        assert len({(one.session_id, one.server) for one in seen}) == 12
    for one in point.servers:
        assert one.completed == one.planned
        if one.planned:
            assert one.hit_rate_usage == pytest.approx(one.hit_rate_predicted, abs=0.03)
            assert one.hit_rate_metrics == pytest.approx(one.hit_rate_usage, abs=0.001)
    assert point.cache.hit_rate_usage == pytest.approx(point.cache.hit_rate_predicted, abs=0.03)
    assert point.cache.hit_rate_metrics == pytest.approx(point.cache.hit_rate_usage, abs=0.001)


def test_targets_that_are_no_copies_of_each_other_are_refused(trace: Path, tmp_path: Path) -> None:
    async def run(**choice: Any) -> None:
        async with (
            serving(ServerConfig(port=0)) as first,
            serving(ServerConfig(port=0, preset="a10-mpt-7b")) as second,
        ):
            others = (first,) if choice else (second,)
            await replay(ReplayConfig(trace=trace, target=first, other_targets=others, run_dir=tmp_path / "run", **choice))

    with pytest.raises(PlanError, match="serve different models"):
        asyncio.run(run())
    with pytest.raises(PlanError, match="named twice"):
        asyncio.run(run(by="time"))
