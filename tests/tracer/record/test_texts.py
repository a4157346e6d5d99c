"""`--keep-text` says so, and writes what was said and nothing else; without it no such file is ever there."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tracer.errors import TraceError
from tracer.record import RecordConfig, compact, record, start_recorder
from tracer.record.exchange import ExchangeFacts
from tracer.record.messages import Ended, Started, WorkerConfig
from tracer.record.privacy import create_key
from tracer.record.texts import TEXT_WARNING, texts_path
from tracer.record.worker import Worker, build
from tracer.tracefile import iter_requests, read_footer
from tracer.wire import CHAT, RESPONSES

SECRETS = {"Authorization": "Bearer SECRET-key", "Cookie": "SECRET-cookie", "X-Session-Id": "SECRET-session"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}, "headers": {"k": "SECRET-tool"}}
PICTURE = {"type": "image_url", "image_url": {"url": "https://x/?sig=SECRET-picture"}}


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in texts_path(out).read_bytes().splitlines()]


def a_worker(tmp_path: Path) -> Worker:
    create_key(tmp_path / "t.key")
    (tmp_path / "t.segments").mkdir()
    config = WorkerConfig(
        folder=str(tmp_path / "t.segments"),
        key_path=str(tmp_path / "t.key"),
        tokenizer="cl100k",
        chunk_times=False,
        epoch_ns=0,
        producer="test",
        keep_text=True,
    )
    return build(config, 0)


def test_kept_text_holds_what_was_said_and_no_secret(server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.parquet"
    said = [{"type": "text", "text": "what is this?"}, PICTURE]
    with start_recorder(RecordConfig(upstream=server, out=str(out), keep_text=True)) as recorder:
        for model, stream in (("stream", True), ("whole", False)):
            asked = {"model": model, "stream": stream, "messages": [{"role": "user", "content": said}], "tools": [TOOL]}
            httpx.post(recorder.url + CHAT, json={**asked, "user": "SECRET-user"}, headers=SECRETS)
        recorder.stop()

    streamed, whole = lines_of(out)
    assert streamed["messages"][0]["content"].startswith("what is this?[image ")
    assert streamed["tools"] == [TOOL["function"]]
    assert streamed["answer"] == {"text": "".join(f" CANARY-answer{n}" for n in range(5))}
    assert (whole["model"], whole["answer"]) == ("whole", {"text": "CANARY-answer"})
    assert [line["arrival_ns"] for line in (streamed, whole)] == [row["arrival_ns"] for row in iter_requests(out)]
    assert texts_path(out).stat().st_mode & 0o077 == 0
    assert b"SECRET" not in texts_path(out).read_bytes()
    assert b"CANARY" not in out.read_bytes() and b"what is this" not in out.read_bytes()
    assert read_footer(out).notes == {"text": "t.text.jsonl"}
    assert TEXT_WARNING in capfd.readouterr().err


def test_the_texts_of_a_recorder_that_was_killed_are_joined_by_compact(tmp_path: Path) -> None:
    worker = a_worker(tmp_path)
    tools = [{"type": "mcp", "server_url": "https://x", "authorization": "SECRET"}]
    for flow, arrival_ns in ((1, 20), (2, 10)):
        body = json.dumps({"model": "m", "input": f"question {flow}", "tools": tools}).encode()
        worker.take(Started(flow=flow, arrival_ns=arrival_ns, endpoint=RESPONSES, body=body))
    facts = ExchangeFacts(text="partly", tool_text="look{}", is_truncated=True)
    worker.take(Ended(flow=2, arrival_ns=10, endpoint=RESPONSES, facts=facts))
    worker.tick(10**9)  # and never closed, but by the kernel
    for writer in (worker._writer, worker._builder.texts.segments):
        writer._file.close()

    compact(tmp_path / "t.segments")

    first, second = lines_of(tmp_path / "t.parquet")
    assert (first["arrival_ns"], first["messages"]) == (10, [{"role": "user", "content": "question 2"}])
    assert first["answer"] == {"text": "partly", "tool_calls": "look{}", "is_truncated": True}
    assert (second["arrival_ns"], "answer" in second, second["tools"]) == (20, False, [{}])


def test_texts_that_stand_there_already_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t.text.jsonl").write_text("old\n")

    with pytest.raises(TraceError, match="exists already"):
        record(RecordConfig(upstream="http://127.0.0.1:9", out=str(tmp_path / "t.parquet"), keep_text=True))

    assert [path.name for path in tmp_path.iterdir()] == ["t.text.jsonl"]
