"""A replay over the nodes of a real Ray cluster, two of them on this machine. Slow; without Ray it skips."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from replay.edge.ray_workers import places, ray_crew
from replay.errors import PlanError
from replay.report.reading import judge_run
from replay.results import read_outcomes
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

type Chats = Callable[..., Iterator[Request]]
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (chatreel[ray])")
STORE_BYTES = 200_000_000  # of each node: results are fetched in pieces


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(PlanError, match=r"pip install 'chatreel\[ray\]'"), ray_crew("auto", None, 1):
        pass


def test_shards_go_round_the_nodes_as_far_as_their_cpus_go() -> None:
    nodes = [{"NodeID": name, "Alive": alive, "Resources": {"CPU": cpus}} for name, alive, cpus in LIVING]

    def chosen(count: int | None, cpus: int) -> str:
        return "".join(one["NodeID"] for one in places(nodes, count, cpus))

    assert [chosen(count, 1) for count in (None, 1, 2, 3, 4, 6)] == ["abd", "a", "ab", "abd", "abdb", "abdbdd"]
    assert chosen(None, 2) == "bd" and chosen(3, 2) == "bdd"
    with pytest.raises(PlanError, match="saw room for 7 on 3 living nodes, wanted room for 8 of 1 CPUs"):
        places(nodes, 8, 1)
    with pytest.raises(PlanError, match="room for 0 on 3 living nodes"):
        places(nodes, None, 9)


LIVING = (("a", True, 1.0), ("b", True, 2.0), ("c", False, 8.0), ("d", True, 4.0))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": STORE_BYTES}
    made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        made.add_node(**node)
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def server() -> Iterator[str]:
    words = [sys.executable, "-m", "chatreel", "serve", "--port", "0", "--speed", "4"]
    with subprocess.Popen(words, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = next(line for line in process.stdout if "http://" in line)
            yield next(word for word in said.split() if word.startswith("http://")).rstrip(".,")
        finally:
            process.terminate()


def command(trace: Path, url: str, address: str, run_dir: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "chatreel", "replay", str(trace), "--target", url, "--ray", address, "-o", str(run_dir)]
    return [*words, *more]


@needs_ray
@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Ray and what it loads
@pytest.mark.timeout(280)
def test_two_nodes_of_a_cluster_send_the_trace_and_a_node_that_is_lost_is_named(
    cluster: Any, chats: Chats, server: str, tmp_path: Path
) -> None:
    trace = tmp_path / "chats.parquet"
    write_trace(trace, chats(sessions=20, turns=3, every_ms=100, think_ms=500), Footer())

    done = subprocess.run(command(trace, server, cluster.address, tmp_path / "both", "--scale", "1,2"), capture_output=True)

    said = done.stderr.decode()
    assert done.returncode in (0, 3) and said.count("give or take") == 4 and said.count("2 nodes start at") == 2, said
    outcomes, torn = read_outcomes(tmp_path / "both", 0)
    assert (len(outcomes), torn, {one.error_kind for one in outcomes}) == (60, 0, {None})
    points = judge_run(tmp_path / "both").points
    assert [one.planned for one in points] == [one.completed for one in points] == [60, 120]
    assert all(one.lateness_ms is not None for one in points)
    for shard in json.loads((tmp_path / "both" / "run.json").read_text())["points"][0]["shards"]:
        offset = shard["clock_offset"]
        assert abs(offset["ms"]) <= offset["error_ms"], "both nodes have this machine's clock"

    lose_one(cluster, trace, server, tmp_path)


def lose_one(cluster: Any, trace: Path, server: str, tmp_path: Path) -> None:
    words = command(trace, server, cluster.address, tmp_path / "one", "--by", "time", "--scale", "0.1")
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stderr is not None
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if "0.1x:" in line:
                threading.Timer(5, cluster.remove_node, [cluster.worker_nodes.copy().pop()], {"allow_graceful": False}).start()
    assert process.returncode == 1 and any("was lost" in line for line in lines), "".join(lines)
    (point,) = judge_run(tmp_path / "one").points
    assert point.planned == 60 and 0 < point.completed < 60
    assert any("was lost" in note.seen for note in point.notes if note.kind == "stopped_early")
