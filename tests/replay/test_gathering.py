"""Several hosts, each with its shard of a plan, are one host."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from replay.edge.clock import ClockState, clock_state, clock_words
from replay.errors import PlanError
from replay.gathering import gather, together
from replay.outcome import Outcome, Sample
from replay.plan.share import Shard
from replay.report.reading import judge_run
from replay.results import read_outcomes
from replay.run import ReplayConfig, replay
from replay.starting import check_start
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

type Server = Callable[[], AbstractContextManager[str]]
type Chats = Callable[..., Iterator[Request]]


def sent(folder: Path) -> list[tuple[int, int, int, int, int]]:
    outcomes, torn = read_outcomes(folder, 0)
    assert not torn and {one.error_kind for one in outcomes} == {None}
    return sorted(
        (one.request_id, one.session_id, one.turn, one.planned_input_tokens, one.planned_output_tokens) for one in outcomes
    )


def replay_whole(server: Server, trace: Path, tmp_path: Path) -> None:
    with server() as url:
        asyncio.run(replay(ReplayConfig(trace=trace, target=url, run_dir=tmp_path / "whole", scales=(2.0,))))


@pytest.fixture
def trace(chats: Chats, tmp_path: Path) -> Path:
    path = tmp_path / "chats.parquet"
    write_trace(path, chats(sessions=10, turns=3), Footer())
    return path


def test_two_shards_send_what_one_host_sends_and_their_folders_join_into_one_run(
    server: Server, trace: Path, tmp_path: Path
) -> None:
    replay_whole(server, trace, tmp_path)

    async def both(url: str) -> None:
        start_ns = time.time_ns() + 4_000_000_000
        config = ReplayConfig(trace=trace, target=url, run_dir=tmp_path, scales=(2.0,), start_at_ns=start_ns)
        shards = (replace(config, run_dir=tmp_path / str(i), shard=Shard(index=i, count=2)) for i in (0, 1))
        await asyncio.gather(*map(replay, shards))

    with server() as url:  # a new one: the first has seen these prompts
        asyncio.run(both(url))

    compare(tmp_path)
    refused(tmp_path)


@pytest.mark.slow
def test_two_processes_of_the_command_are_two_hosts(server: Server, trace: Path, tmp_path: Path) -> None:
    replay_whole(server, trace, tmp_path)
    with server() as url:
        start = time.time_ns() / 1e9 + 12  # what a loaded machine needs to start two processes
        words = [sys.executable, "-m", "chatreel", "replay", str(trace), "--target", url, "--scale", "2"]
        hosts = [
            subprocess.Popen(
                [*words, "--shard", f"{index}/2", "--start-at", str(start), "-o", str(tmp_path / f"{index}")],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for index in (0, 1)
        ]
        said = [host.communicate()[1].decode() for host in hosts]

    assert all("starts at" in text and host.returncode in (0, 3) for text, host in zip(said, hosts, strict=True)), said
    compare(tmp_path)


def compare(tmp_path: Path) -> None:
    """The folders 0 and 1 together are the folder `whole`."""
    lines = gather([tmp_path / "1", tmp_path / "0"], tmp_path / "both")

    assert [line[:9] for line in lines] == ["shard 0/2", "shard 1/2"]
    parts = [sent(tmp_path / name) for name in ("0", "1")]
    assert all(parts) and sent(tmp_path / "both") == sent(tmp_path / "whole") == sorted(parts[0] + parts[1])
    assert not {one[1] for one in parts[0]} & {one[1] for one in parts[1]}
    outcomes, _ = read_outcomes(tmp_path / "both", 0)
    in_order_of_time(outcomes)
    (whole,), (both,) = judge_run(tmp_path / "whole").points, judge_run(tmp_path / "both").points
    assert both.planned == both.completed == whole.planned == 60 and not both.not_sent
    assert both.cache.hit_rate_predicted == whole.cache.hit_rate_predicted
    assert both.cache.hit_rate_usage == pytest.approx(both.cache.hit_rate_predicted, abs=0.03)  # the same prompts
    assert any("shard 0/2" in one.seen for one in judge_run(tmp_path / "0").notes)
    assert not any("shard" in one.seen for one in judge_run(tmp_path / "both").notes)


def in_order_of_time(outcomes: list[Outcome]) -> None:
    """Turns of a session follow each other; first turns are due at the same time since the start as in the plan."""
    by_session: dict[int, list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: one.turn):
        by_session.setdefault(one.session_id, []).append(one)
    for turns in by_session.values():
        assert turns[0].planned_ns == turns[0].recorded_ns
        for before, after in zip(turns, turns[1:], strict=False):
            assert after.planned_ns == (before.end_ns or 0) + 100_000_000


def refused(tmp_path: Path) -> None:
    """What is not all shards of one run."""
    with pytest.raises(PlanError, match="shard 1 of 2 is missing"):
        gather([tmp_path / "0"], tmp_path / "new")
    with pytest.raises(PlanError, match="given twice"):
        gather([tmp_path / "0", tmp_path / "1", tmp_path / "1"], tmp_path / "new")
    with pytest.raises(PlanError, match="not a shard of a run"):
        gather([tmp_path / "0", tmp_path / "whole"], tmp_path / "new")
    with pytest.raises(PlanError, match="not a run folder"):
        gather([tmp_path / "0", tmp_path / "none"], tmp_path / "new")
    with pytest.raises(PlanError, match="there is a run here already"):
        gather([tmp_path / "0", tmp_path / "1"], tmp_path / "both")
    manifest = json.loads((tmp_path / "1" / "run.json").read_text())
    manifest["points"][0]["shard"]["start_unix_ns"] += 1
    (tmp_path / "1" / "run.json").write_text(json.dumps(manifest))
    with pytest.raises(PlanError, match="start_unix_ns differs"):
        gather([tmp_path / "0", tmp_path / "1"], tmp_path / "new")


def test_samples_of_hosts_are_one_row_of_samples() -> None:
    first = [Sample(t_ns=t * 10**9, running=t, client_in_flight=2, client_cpu_share=0.1) for t in range(4)]
    second = [Sample(t_ns=t * 10**9 - 1, running=9, client_in_flight=3, client_cpu_share=0.4) for t in range(2)]

    joined = together([second, first])

    assert [one.running for one in joined] == [0, 1, 2, 3]
    assert [one.client_in_flight for one in joined] == [5, 5, 2, 2]
    assert [one.client_cpu_share for one in joined] == [0.4, 0.4, 0.1, 0.1]


def test_a_start_must_be_common_and_to_come() -> None:
    two, now_ns = Shard(index=0, count=2), time.time_ns()

    for shard, start_ns, scales, words in (
        (two, now_ns + 10**10, 3, "cannot tell each other"),
        (two, None, 1, "start together"),
        (two, now_ns - 10**10, 1, r"in the past; saw --start-at was 10 s ago"),
        (Shard(), now_ns + 10**16, 1, "more than a week away"),
    ):
        with pytest.raises(PlanError, match=words):
            check_start(shard, start_ns, scales)
    check_start(two, now_ns + 10**10, 1)


def test_a_clock_that_nothing_keeps_is_said() -> None:
    state = clock_state()

    assert state is None or state.most_error_ms >= state.estimated_error_ms >= 0
    assert "does not say" in clock_words(None)
    assert "run chrony" in clock_words(ClockState(is_kept=False, most_error_ms=1.0, estimated_error_ms=1.0))
    assert "to 0.3 ms (at most 12 ms off)" in clock_words(ClockState(is_kept=True, most_error_ms=12.0, estimated_error_ms=0.3))
