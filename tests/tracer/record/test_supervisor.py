"""Several proxies on one port: one recording, each request once, and the death of one costs the others nothing."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tracer.errors import TraceError
from tracer.record import RecordConfig, RecorderProcess, compact, start_recorder
from tracer.record.channel import GATHER_S
from tracer.tracefile import iter_requests, read_footer

CHAT = "/v1/chat/completions"


def body(model: str, text: str = "hello") -> bytes:
    return json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": text * 30}]}).encode()


def post(url: str, data: bytes) -> bytes:
    """On a connection of its own, since the kernel spreads connections, not requests."""
    target = urlsplit(url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
    try:
        connection.request("POST", CHAT, data, {"Content-Type": "application/json"})
        return connection.getresponse().read()
    finally:
        connection.close()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def two_proxies(server: str, folder: Path, **more: object) -> RecorderProcess:
    return start_recorder(RecordConfig(upstream=server, out=str(folder / "t.parquet"), workers=2, **more))


def open_streams(url: str, count: int) -> tuple[list[bytes], list[threading.Thread]]:
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(post(url, body("slow-stream")))) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    return answers, threads


def test_two_proxies_record_every_request_once_under_one_key(server: str, tmp_path: Path, scripts) -> None:
    with two_proxies(server, tmp_path) as recorder:
        before = time.time_ns()
        answers = [post(recorder.url, body("stream", f"{n} ")) for n in range(40)]
        after = time.time_ns()
        post(recorder.url, body("stream", "7 "))
        time.sleep(1.2)  # a flush
        lanes = sorted((tmp_path / "t.segments").glob("lane-*"))
        authorities = {path.parent.parent.name for path in tmp_path.rglob("mitmproxy-ca.pem")}
        sizes = [sum(path.stat().st_size for path in lane.glob("0*")) for lane in lanes]
        result = recorder.stop()
    rows = list(iter_requests(result.path))
    footer = read_footer(result.path)
    first = [row["input_blocks"][0] for row in rows]

    assert set(answers) == {b"".join(scripts.STREAM)}
    assert len(sizes) == 2 and min(sizes) > 1000  # both took part
    assert authorities == {"t.segments"}  # one for all: clients of a forward proxy trust one
    assert (result.rows, len(rows), len(set(first[:40]))) == (41, 41, 40)
    assert rows[40]["input_blocks"] == rows[7]["input_blocks"]  # same key, whichever proxy it went through
    assert result.losses == {"token_drift": 41}
    assert all(before <= footer.epoch_ns + row["arrival_ns"] <= after for row in rows[:40])
    assert [row["arrival_ns"] for row in rows] == sorted(row["arrival_ns"] for row in rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.key", "t.parquet"]


def test_stopping_lets_the_streams_of_all_proxies_end(server: str, tmp_path: Path, scripts) -> None:
    with two_proxies(server, tmp_path) as recorder:
        answers, threads = open_streams(recorder.url, 8)
        result = recorder.stop()
        for thread in threads:
            thread.join()

    assert answers == [b"".join(scripts.STREAM)] * 8
    assert Counter(row["finish_reason"] for row in iter_requests(result.path)) == {"stop": 8}


def test_a_second_signal_cuts_the_streams_of_all_proxies(server: str, tmp_path: Path) -> None:
    with two_proxies(server, tmp_path) as recorder:
        target = urlsplit(recorder.url)
        clients = [socket.create_connection((target.hostname, target.port), timeout=30) for _ in range(8)]
        data = body("endless")
        for client in clients:
            client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            assert client.recv(100)
        recorder.process.send_signal(signal.SIGINT)
        time.sleep(0.7)
        assert recorder.process.poll() is None  # it waits for the streams
        result = recorder.stop(timeout_s=20)
        for client in clients:
            client.close()

    assert Counter(row["error_kind"] for row in iter_requests(result.path)) == {"recorder_stopped": 8}


def test_a_killed_proxy_is_replaced_and_traffic_flows(
    server: str, tmp_path: Path, scripts, capfd: pytest.CaptureFixture[str]
) -> None:
    with two_proxies(server, tmp_path) as recorder:
        for n in range(10):
            post(recorder.url, body("stream", f"{n} "))
        lanes = children(recorder.process.pid)
        time.sleep(4 * GATHER_S)  # what a proxy has not handed over dies with it
        os.kill(lanes[0], signal.SIGKILL)
        time.sleep(0.3)
        meanwhile = [post(recorder.url, body("stream", f"{n} ")) for n in range(10, 20)]
        deadline = time.monotonic() + 30
        while len(list((tmp_path / "t.segments").glob("lane-*/000000.*"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)  # from the new writer's first file to the listening proxy
        replaced = children(recorder.process.pid)
        for n in range(20, 40):
            post(recorder.url, body("stream", f"{n} "))
        result = recorder.stop()
    rows = list(iter_requests(result.path))

    assert set(meanwhile) == {b"".join(scripts.STREAM)}
    assert len(lanes) == len(replaced) == 2 and lanes[0] not in replaced and lanes[1] in replaced
    assert "PROXY 1 OF 2 DIED" in capfd.readouterr().err
    assert result.losses["proxy_deaths"] == 1
    assert len(rows) == 40 and len({row["input_blocks"][0] for row in rows}) == 40


def test_a_killed_supervisor_leaves_segments_that_compact(server: str, tmp_path: Path) -> None:
    with two_proxies(server, tmp_path) as recorder:
        for n in range(20):
            post(recorder.url, body("stream", f"{n} "))
        lanes = children(recorder.process.pid)
        time.sleep(4 * GATHER_S)
        recorder.kill()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{lane}").exists() for lane in lanes) and time.monotonic() < deadline:
        time.sleep(0.1)

    result = compact(tmp_path / "t.segments")

    assert result.rows == 20
    assert not any(Path(f"/proc/{lane}").exists() for lane in lanes)


def test_a_port_that_another_recorder_shares_is_taken(server: str, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    with two_proxies(server, tmp_path) as recorder:
        port = urlsplit(recorder.url).port

        with pytest.raises(TraceError, match="cannot listen here"):
            two_proxies(server, tmp_path / "second", port=port)
    assert list((tmp_path / "second").iterdir()) == []


def test_what_no_proxy_can_do_says_why_and_leaves_nothing(server: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such tokenizer"):
        two_proxies(server, tmp_path, tokenizer="nonsense")
    with pytest.raises(TraceError, match="not a number of workers"):
        start_recorder(RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"), workers=0))
    assert list(tmp_path.iterdir()) == []
