"""A server that stops for a while, and a client that is not given its time: both show, and only one is the server's fault."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from replay.report.reading import judge_run
from replay.results import read_outcomes
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

STALL_S = 1.5
COMMAND = [sys.executable, "-m", "chatreel"]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """(URL, pid) of a simulated server in a process of its own."""
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        yield "http://" + line.partition("http://")[2].split()[0].rstrip("/.,"), process.pid
        process.terminate()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Fifty requests a second for three and a half seconds."""
    rows: list[Request] = [
        {"request_id": i, "arrival_ns": i * 20_000_000, "input_tokens": 40, "output_tokens": 3} for i in range(175)
    ]
    write_trace(tmp_path / "t.parquet", rows, Footer())
    return tmp_path / "t.parquet"


def replaying(trace: Path, url: str) -> subprocess.Popen[bytes]:
    run = str(trace.with_name("run"))
    asked = [*COMMAND, "replay", str(trace), "--target", url, "--scale", "1", "-o", run]
    return subprocess.Popen(asked, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_outcomes(run_dir: Path) -> None:
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in run_dir.glob("point-0.outcomes-*")) and time.monotonic() < deadline:
        time.sleep(0.05)


def test_a_stall_of_the_server_is_in_the_tail_of_what_was_planned(trace: Path, server: tuple[str, int]) -> None:
    url, pid = server
    run_dir = trace.with_name("run")
    process = replaying(trace, url)
    wait_for_outcomes(run_dir)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STALL_S)
    os.kill(pid, signal.SIGCONT)
    process.wait(90)

    outcomes, _ = read_outcomes(run_dir, 0)
    firsts_ns = sorted(one.first_token_ns for one in outcomes if one.first_token_ns is not None)
    begin_ns, end_ns = max(pairwise(firsts_ns), key=lambda pair: pair[1] - pair[0])
    assert end_ns - begin_ns > 0.9 * STALL_S * 1e9
    sent = [one for one in outcomes if one.sent_ns is not None and begin_ns < one.sent_ns < end_ns]
    assert len(sent) > 10  # a client that waits for answers would have had one slow request in this time
    (point,) = judge_run(run_dir).points
    ttft = point.latency.ttft_schedule_ms
    assert ttft is not None and ttft.p99 > STALL_S * 500
    assert sum(point.errors.values()) == 0


def test_a_client_that_is_held_back_makes_the_run_invalid(trace: Path, server: tuple[str, int]) -> None:
    process = replaying(trace, server[0])
    wait_for_outcomes(trace.with_name("run"))
    held = threading.Thread(target=hold_back, args=(process,))
    held.start()
    code = process.wait(90)
    held.join()

    assert code == 3
    (point,) = judge_run(trace.with_name("run")).points
    assert not point.valid and point.regime == "invalid"
    assert point.lateness_ms is not None and point.lateness_ms.max > 100


def hold_back(process: subprocess.Popen[bytes]) -> None:
    """The client runs a fifth of the time at most, for as long as the trace lasts if nobody else wants the machine."""
    for _ in range(12):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
