"""Nodes that send a shard each are led as one host: here in threads, with the calls that Ray would carry passed in."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replay import nodes
from replay.errors import PlanError
from replay.node import Node
from replay.nodes import Crew, check_led, replay_on
from replay.plan.share import Shard
from replay.progress import Progress
from replay.report.reading import judge_run
from replay.results import read_outcomes
from replay.run import ReplayConfig
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

type Server = Callable[[], AbstractContextManager[str]]
type Chats = Callable[..., Iterator[Request]]

APART_NS = 250_000_000


class Skewed(Node):
    """On a host whose clock is ahead, without our files."""

    began: ReplayConfig
    starts_ns: list[int]

    def now_ns(self) -> int:
        return super().now_ns() + APART_NS

    def start(self, at_ns: int) -> None:
        self.starts_ns = [*getattr(self, "starts_ns", []), at_ns - APART_NS]
        super().start(at_ns - APART_NS)

    def lacks(self, path: str, digest: str) -> bool:
        return True

    def begin(self, config: ReplayConfig) -> None:
        self.began = config
        super().begin(config)


class True_(Node):
    starts_ns: list[int]

    def start(self, at_ns: int) -> None:
        self.starts_ns = [*getattr(self, "starts_ns", []), at_ns]
        super().start(at_ns)


def crew_of(members: list[Node], is_gone: Callable[[int, str], bool] = lambda *_: False) -> Crew:
    pool = ThreadPoolExecutor(1)

    def call(number: int, method: str, *arguments: Any) -> Future[Any]:
        if is_gone(number, method):
            lost: Future[Any] = Future()
            lost.set_exception(ConnectionError("the actor died\nand more"))
            return lost
        return pool.submit(getattr(members[number], method), *arguments)

    return Crew(names=[f"host-{number}" for number in range(len(members))], call=call)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "START_IN_NS", 1_200_000_000)
    monkeypatch.setattr(nodes, "LOOK_S", 0.1)


@pytest.fixture
def config(chats: Chats, tmp_path: Path) -> ReplayConfig:
    trace = tmp_path / "chats.parquet"
    write_trace(trace, chats(sessions=10, turns=3), Footer())
    return ReplayConfig(trace=trace, target="", run_dir=tmp_path / "run", scales=(2.0,))


def test_nodes_send_the_whole_trace_at_each_scale_from_one_start(server: Server, config: ReplayConfig, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    two: list[Any] = [True_(), Skewed()]
    said: list[str] = []
    shown: list[Progress] = []
    with server() as url:
        asked = replace(config, target=url, scales=(1.0, 2.0), api_key_file=tmp_path / "key")

        assert replay_on(crew_of(two), asked, said.append, shown.append) == config.run_dir

    for index, planned in enumerate((30, 60)):
        outcomes, torn = read_outcomes(config.run_dir, index)
        assert (len(outcomes), torn, {one.error_kind for one in outcomes}) == (planned, 0, {None})
        assert len({(one.request_id, one.session_id) for one in outcomes}) == planned
    points = judge_run(config.run_dir).points
    assert [one.planned for one in points] == [one.completed for one in points] == [30, 60]
    assert all(one.lateness_ms is not None for one in points)
    assert {one.planned for one in shown} == {30, 60} and shown[-1].counts.ended <= 60
    assert max(one.counts.sent for one in shown) == 60
    assert "CHATREEL_TARGET_KEY" not in os.environ
    clocks = [re.fullmatch(r"host-1: clock (\S+) ms, give or take (\S+) ms", line) for line in said]
    told = [(float(found[1]), float(found[2])) for found in clocks if found]
    assert len(told) == 2 and all(abs(ms - 250) <= error_ms + 0.001 for ms, error_ms in told) and said[-1].startswith("shard 1/2")
    within_ms = 1 + max(error_ms for _, error_ms in told)  # on a busy host round trips are long

    ours, theirs = (one.starts_ns for one in two)
    assert all(abs(a - b) < within_ms * 1e6 for a, b in zip(ours, theirs, strict=True)) and len(ours) == 2
    manifest = json.loads((config.run_dir / "run.json").read_text())
    shards = manifest["points"][1]["shards"]
    assert [one["node"] for one in shards] == ["host-0", "host-1"]
    assert all(abs(one["start_unix_ns"] - ours[1]) < within_ms * 1e6 for one in shards)
    assert shards[1]["clock_offset"]["ms"] == pytest.approx(250, abs=within_ms)
    assert shards[1]["clock_offset_after"]["error_ms"] > 0
    assert any("host-1: its clock is +2" in note for note in manifest["notes"]) and manifest["trace"] == str(config.trace)

    assert two[1].began.trace != config.trace and two[1].began.shard == Shard(index=1, count=2)
    assert not two[1].began.trace.exists() and not (config.run_dir / "shards").exists()  # nothing is left behind


def test_a_node_alone_is_a_whole_run(server: Server, config: ReplayConfig) -> None:
    with server() as url:
        replay_on(crew_of([Node()]), replace(config, target=url), lambda _: None, lambda _: None)

    (point,) = judge_run(config.run_dir).points
    assert point.planned == point.completed == 60


def test_what_others_measured_is_kept_when_a_node_is_lost(server: Server, config: ReplayConfig) -> None:
    two, said = [Node(), Node()], list[str]()
    sending_since: list[float] = []

    def is_gone(number: int, method: str) -> bool:
        if two[0].state().phase == "sending":
            sending_since.append(time.monotonic())
        return number == 1 and bool(sending_since) and time.monotonic() - sending_since[0] > 1.6  # half a second after the start

    with server() as url:
        replay_on(crew_of(two, is_gone), replace(config, target=url), said.append, lambda _: None)

    two[1].close()  # it was sending on, as one does that only we cannot reach
    assert any("host-1 was lost: ConnectionError: the actor died. The others stop" in line for line in said)
    (point,) = judge_run(config.run_dir).points
    assert point.planned == 60 and 0 < point.completed < 60
    assert any("shard 1/2: host-1 was lost" in note.seen for note in point.notes if note.kind == "stopped_early")


def test_nothing_is_sent_if_a_node_cannot_begin(server: Server, config: ReplayConfig) -> None:
    with pytest.raises(PlanError, match=r"a node cannot replay; saw host-0 failed: .*127.0.0.1:9"):
        replay_on(crew_of([Node()]), replace(config, target="http://127.0.0.1:9"), lambda _: None, lambda _: None)
    with server() as url, pytest.raises(PlanError, match="host-1 was lost"):
        two = [Node(), Node()]
        gone = crew_of(two, lambda number, method: number == 1 and method == "begin")
        replay_on(gone, replace(config, target=url), lambda _: None, lambda _: None)
    two[1].close()
    assert not config.run_dir.exists()


def test_options_that_nodes_cannot_follow_are_refused(config: ReplayConfig) -> None:
    check_led(config)
    with pytest.raises(PlanError, match="--ray with --shard, --start-at"):
        check_led(replace(config, shard=Shard(index=0, count=2), start_at_ns=1))
