"""The real proxy in its own process, before a scripted server: traffic is untouched, rows are right, text stays out."""

import gzip
import http.client
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tracer.errors import TraceError
from tracer.record import RecordConfig, RecorderProcess, compact, start_recorder
from tracer.record.channel import take_normal_time
from tracer.tracefile import iter_requests, read_footer

CHAT = "/v1/chat/completions"
SECRETS = {"Authorization": "Bearer CANARY-key", "X-Session-Id": "CANARY-session", "Cookie": "CANARY-cookie"}


def body(model: str, text: str = "CANARY-prompt", **more: object) -> bytes:
    messages = [{"role": "system", "content": "CANARY-system " * 20}, {"role": "user", "content": text}]
    return json.dumps({"model": model, "stream": True, "messages": messages, "user": "CANARY-user", **more}).encode()


@dataclass
class Answer:
    status: int
    body: bytes
    arrivals: list[float] = field(default_factory=list)  # of each read, seconds


def post(url: str, data: bytes, path: str = CHAT, headers: dict[str, str] | None = None) -> Answer:
    target = urlsplit(url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        pieces, arrivals = [], []
        while piece := response.read1(65536):
            pieces.append(piece)
            arrivals.append(time.monotonic())
        return Answer(response.status, b"".join(pieces), arrivals)
    finally:
        connection.close()


def hang_up(url: str, data: bytes, after_s: float, read_bytes: int = 0) -> None:
    """Send a request, read a little, close the connection."""
    target = urlsplit(url)
    with socket.create_connection((target.hostname, target.port), timeout=30) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        while read_bytes > 0:
            read_bytes -= len(connection.recv(65536))
        time.sleep(after_s)


def worker_pid(recorder: RecorderProcess) -> int:
    pid = recorder.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def worker_with_time(recorder: RecorderProcess) -> int:
    """As on a machine with idle time: cores that other tests keep busy leave the worker none, where we may give it some."""
    worker = worker_pid(recorder)
    while os.sched_getscheduler(worker) != os.SCHED_IDLE and os.getpriority(os.PRIO_PROCESS, worker) < 19:
        time.sleep(0.01)  # it gives way once it is ready
    take_normal_time(worker)
    return worker


def all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def written(folder: Path, last: bytes) -> bytes:
    """All that is on the disk, once `last` is."""
    for _ in range(200):
        if last in (found := all_bytes(folder)):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{last!r} was not written within 20 s")


@dataclass
class Day:
    """One recording of everything that can go by."""

    answers: dict[str, Answer]
    rows: dict[str, dict[str, Any]]  # by model
    losses: dict[str, int]
    segments: bytes  # everything on disk before compaction
    folder: Path


@pytest.fixture(scope="module")
def day(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    folder = tmp_path_factory.mktemp("day")
    config = RecordConfig(upstream=server + "/v1", out=str(folder / "day.parquet"), chunk_times=True)
    with start_recorder(config) as recorder:
        worker_with_time(recorder)
        url = recorder.url
        answers = {name: post(url, body(name), headers=SECRETS) for name in ("stream", "slow-stream", "gzip", "error")}
        answers["whole"] = post(url, body("whole", stream=False), headers=SECRETS)
        answers["junk"] = post(url, body("stream")[:-1] + b',"model":"junk","max_tokens":"CANARY"}')
        target = urlsplit(url)
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
        connection.request("GET", "/v1/models?key=CANARY-query")
        response = connection.getresponse()
        answers["models"] = Answer(response.status, response.read())
        connection.close()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            post(url, body("reset"))
        hang_up(url, body("silent"), after_s=0.3)
        hang_up(url, body("endless"), after_s=0.2, read_bytes=400)
        segments = written(folder, b"endless")
        result = recorder.stop()
    rows = {row["model"]: dict(row) for row in iter_requests(result.path) if row["model"]}
    rows["junk"] = next(dict(row) for row in iter_requests(result.path) if not row["model"])
    yield Day(answers, rows, result.losses, segments, folder)


def test_bytes_out_equal_bytes_in(day: Day, scripts) -> None:
    stream = b"".join(scripts.STREAM)

    assert day.answers["stream"].body == day.answers["slow-stream"].body == stream
    assert day.answers["whole"].body == scripts.WHOLE
    assert gzip.decompress(day.answers["gzip"].body) == stream
    assert (day.answers["error"].status, day.answers["models"].status) == (400, 200)


def test_events_reach_the_client_one_by_one(day: Day, scripts) -> None:
    """The script waits 150 ms after each of its events: had they been held back, they would come in one piece."""
    arrivals = day.answers["slow-stream"].arrivals

    assert len(arrivals) == len(scripts.STREAM)
    assert all(later - earlier > 0.05 for earlier, later in zip(arrivals, arrivals[1:], strict=False))


def test_a_streamed_chat_becomes_a_row(day: Day, scripts) -> None:
    row = day.rows["slow-stream"]

    assert (row["http_status"], row["error_kind"], row["finish_reason"]) == (200, None, "stop")
    assert (row["input_tokens"], row["input_tokens_count_source"], row["output_tokens"]) == (999, "usage", 5)
    assert (row["kind"], row["endpoint"], row["stream"]) == ("chat", CHAT, True)
    assert len(row["input_blocks"]) >= 4 and row["output_blocks"]
    assert 0 < row["dispatch_ns"] < row["ttft_ns"] < row["end_ns"]
    assert len(row["chunk_delta_us"]) == 5 and row["itl_summary"]["count"] == 4
    assert min(row["chunk_delta_us"]) > 50_000
    assert row["bytes_out"] == len(b"".join(scripts.STREAM))


def test_other_answers_become_rows_too(day: Day) -> None:
    assert day.rows["gzip"]["finish_reason"] == "stop"
    assert (day.rows["error"]["http_status"], day.rows["error"]["error_kind"]) == (400, "http_status")
    assert (day.rows["whole"]["stream"], day.rows["whole"]["ttft_ns"], day.rows["whole"]["output_tokens"]) == (
        False,
        None,
        5,
    )
    assert day.rows["junk"]["http_status"] == 200


def test_a_reset_in_mid_stream_is_a_lost_connection_with_a_first_token(day: Day) -> None:
    row = day.rows["reset"]

    assert (row["error_kind"], row["http_status"]) == ("connection_lost", 200)
    assert row["ttft_ns"] is not None


def test_clients_that_hang_up_are_aborts_before_and_after_the_first_token(day: Day) -> None:
    before, after = day.rows["silent"], day.rows["endless"]

    assert before["error_kind"] == after["error_kind"] == "client_abort"
    assert before["ttft_ns"] is None and before["client_abort_ns"] > 200_000_000
    assert after["ttft_ns"] < after["client_abort_ns"]


def test_what_is_not_recorded_is_counted(day: Day) -> None:
    assert day.losses["passed_through"] == 1
    assert day.losses["requests_unreadable"] == 1
    assert day.losses["token_drift"] == 4  # the script says 999


def test_one_session_header_is_one_session(day: Day) -> None:
    named = [day.rows[name] for name in ("stream", "slow-stream", "gzip", "error", "whole")]

    assert len({row["session_id"] for row in named}) == 1
    assert sorted(row["turn"] for row in named) == [0, 1, 2, 3, 4]
    assert day.rows["silent"]["session_id"] != named[0]["session_id"]


def test_no_text_key_or_name_reaches_the_disk(day: Day) -> None:
    written = day.segments + all_bytes(day.folder)

    for secret in (b"CANARY", b"prompt_cache", b"Bearer"):
        assert secret not in written
    assert b"slow-stream" in written  # the search would have found it


def test_files_are_private_and_segments_gone(day: Day) -> None:
    assert sorted(path.name for path in day.folder.iterdir()) == ["day.key", "day.parquet"]
    for name in ("day.key", "day.parquet"):
        assert (day.folder / name).stat().st_mode & 0o777 == 0o600


def test_a_dead_upstream_is_a_502_and_a_row(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    with start_recorder(RecordConfig(upstream=f"127.0.0.1:{port}", out=str(tmp_path / "t.parquet"))) as recorder:
        answer = post(recorder.url, body("m"))
        result = recorder.stop()
    rows = list(iter_requests(result.path))

    assert answer.status == 502
    assert [(row["http_status"], row["error_kind"]) for row in rows] == [(502, "connect")]
    assert rows[0]["input_blocks"]


def test_stopping_lets_streams_end(server: str, tmp_path: Path, scripts) -> None:
    answers: list[Answer] = []
    with start_recorder(RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"))) as recorder:
        client = threading.Thread(target=lambda: answers.append(post(recorder.url, body("slow-stream"))))
        client.start()
        time.sleep(0.5)
        result = recorder.stop()
        client.join()

    assert answers[0].body == b"".join(scripts.STREAM)
    assert [row["finish_reason"] for row in iter_requests(result.path)] == ["stop"]


def test_a_second_signal_cuts_what_is_under_way(server: str, tmp_path: Path) -> None:
    with start_recorder(RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"))) as recorder:
        client = threading.Thread(target=hang_up, args=(recorder.url, body("endless"), 2.0, 400))
        client.start()
        time.sleep(0.5)
        recorder.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert recorder.process.poll() is None  # it waits for the stream
        result = recorder.stop(timeout_s=20)
        client.join()
    rows = list(iter_requests(result.path))

    assert [(row["error_kind"], row["end_ns"]) for row in rows] == [("recorder_stopped", None)]
    assert rows[0]["input_blocks"]


@dataclass
class Load:
    """Threads that send until told to stop, and remember when each answer was complete."""

    url: str
    served: list[float] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self.threads = [threading.Thread(target=self._send) for _ in range(4)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()

    def _send(self) -> None:
        while not self.stop.is_set():
            try:
                if post(self.url, body("stream")).body.endswith(b"[DONE]\n\n"):
                    self.served.append(time.monotonic())
            except (OSError, http.client.HTTPException):
                return
            time.sleep(0.01)  # the worker has idle time only, and on two cores a load without pause leaves none


@pytest.mark.parametrize("whole_group", [False, True])
def test_kill_9_under_load_loses_at_most_the_last_second(server: str, tmp_path: Path, whole_group: bool) -> None:
    """With the proxy alone killed, its worker writes all but what was not handed over yet; with both, a second is lost."""
    with start_recorder(RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"))) as recorder:
        worker = worker_with_time(recorder)
        with Load(recorder.url) as load:
            while len(load.served) < 60:
                time.sleep(0.05)
            time.sleep(1.0)
            killed_at = time.monotonic()
            os.kill(recorder.process.pid, signal.SIGKILL)
            if whole_group:
                os.kill(worker, signal.SIGKILL)
        recorder.kill()

    result = compact(tmp_path / "t.segments")

    whole_rows = [row for row in iter_requests(result.path) if row["finish_reason"] == "stop"]
    # half a second is far more than GATHER_S, but with every core busy the proxy hands over late
    must_have = [at for at in load.served if at < killed_at - (1.0 if whole_group else 0.5)]
    assert len(must_have) > 50
    assert len(whole_rows) >= len(must_have)


@pytest.mark.parametrize("has_room_later", [True, False])
def test_traffic_flows_while_the_disk_is_full(
    server: str, tmp_path: Path, scripts, capfd: pytest.CaptureFixture[str], has_room_later: bool
) -> None:
    """A file-size limit on the worker acts as the full disk, and can be lifted again."""
    with start_recorder(RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"))) as recorder:
        worker = worker_with_time(recorder)
        soft, hard = resource.prlimit(worker, resource.RLIMIT_FSIZE)
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (600, hard))
        answers = [post(recorder.url, body("stream")) for _ in range(20)]
        time.sleep(2.5)
        if has_room_later:
            resource.prlimit(worker, resource.RLIMIT_FSIZE, (soft, hard))
        result = recorder.stop()
    warnings = capfd.readouterr().err

    assert {answer.body for answer in answers} == {b"".join(scripts.STREAM)}
    assert "RECORDING HAS STOPPED" in warnings and "File too large" in warnings
    if has_room_later:
        assert (result.rows, result.losses.get("rows_lost_on_disk", 0)) == (20, 0)
    else:
        assert result.rows < 20
        assert result.losses["rows_lost_on_disk"] == 20 - result.rows
        assert "the trace lacks" in warnings


def test_a_worker_that_lags_costs_prompts_but_neither_rows_nor_traffic(server: str, tmp_path: Path, scripts) -> None:
    config = RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"), queue_bytes=400_000)
    with start_recorder(config) as recorder:
        worker = worker_pid(recorder)
        os.kill(worker, signal.SIGSTOP)
        answers = [post(recorder.url, body("stream", text=f"{n} " * 40_000)) for n in range(12)]
        os.kill(worker, signal.SIGCONT)
        result = recorder.stop()
    rows = list(iter_requests(result.path))

    assert {answer.body for answer in answers} == {b"".join(scripts.STREAM)}
    assert len(rows) == 12
    assert result.losses["prompts_shed"] == sum(row["input_blocks"] is None for row in rows) > 0
    assert {row["finish_reason"] for row in rows} == {"stop"}


def test_a_worker_that_dies_is_replaced_and_traffic_flows(server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with start_recorder(RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"))) as recorder:
        dead = worker_with_time(recorder)
        post(recorder.url, body("stream"))
        written(tmp_path, b"stream")
        os.kill(dead, signal.SIGKILL)
        without = post(recorder.url, body("whole"))
        time.sleep(1.5)  # the next worker starts after a second
        while worker_pid(recorder) == dead:
            time.sleep(0.1)
        post(recorder.url, body("gzip"))
        result = recorder.stop()

    assert without.status == 200
    assert "worker died" in capfd.readouterr().err
    assert result.losses["worker_deaths"] == 1
    models = {row["model"] for row in iter_requests(result.path)}
    assert {"stream", "gzip"} <= models


def test_an_earlier_recording_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"precious")
    (tmp_path / "u.segments").mkdir()

    for name, why in (("t", "exists already"), ("u", "chatreel compact")):
        with pytest.raises(TraceError, match=why):
            start_recorder(RecordConfig(upstream="http://127.0.0.1:9", out=str(tmp_path / f"{name}.parquet")))
    assert (tmp_path / "t.parquet").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokenizer": "nonsense"}, "no such tokenizer"),
        ({"upstream": "ftp://x"}, "not an upstream"),
        ({"upstream": "http://user:CANARY@x"}, "not an upstream"),
        ({"out": "trace.csv"}, "ends in .parquet"),
    ],
)
def test_what_cannot_be_recorded_says_why_and_leaves_nothing(tmp_path: Path, change: dict[str, str], why: str) -> None:
    config = {"upstream": "http://127.0.0.1:9", "out": str(tmp_path / "t.parquet"), **change}

    with pytest.raises(TraceError, match=why) as raised:
        start_recorder(RecordConfig(**config))
    assert "CANARY" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = RecordConfig(upstream="http://127.0.0.1:9", out=str(tmp_path / "t.parquet"), port=port)

        with pytest.raises(TraceError, match="cannot listen here"):
            start_recorder(config)
    assert list(tmp_path.iterdir()) == []


def test_a_given_key_makes_recordings_comparable(server: str, tmp_path: Path) -> None:
    key = tmp_path / "shared.key"
    key.write_text("07" * 32)
    ids = []
    for name in ("a", "b"):
        config = RecordConfig(upstream=server, out=str(tmp_path / f"{name}.parquet"), key_path=str(key))
        with start_recorder(config) as recorder:
            ids.append(read_footer(recorder.stop().path).hashes.key_id)

    assert ids[0] == ids[1]
    assert not (tmp_path / "a.key").exists()


def test_the_usual_limit_of_open_files_does_not_limit_connections(server: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with start_recorder(RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"))) as recorder:
            limits = resource.prlimit(recorder.process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert limits == (hard, hard)
