"""`force_usage` adds usage to the row and nothing to what the client gets; failed requests that come again are linked."""

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tracer.record import RecordConfig, start_recorder
from tracer.tracefile import iter_requests


def post(url: str, model: str, **more: object) -> bytes:
    target = urlsplit(url)
    body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": "hi"}], **more})
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)
    try:
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().read()
    finally:
        connection.close()


def test_the_client_gets_what_it_asked_for_and_the_row_has_usage(tmp_path: Path, scripts: Any, server: str) -> None:
    usage = next(event for event in scripts.STREAM if b"usage" in event)
    config = RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"), force_usage=True)
    with start_recorder(config) as recorder:
        silent = post(recorder.url, "stream")
        asking = post(recorder.url, "stream", stream_options={"include_usage": True})
        packed = post(recorder.url, "gzip")  # a server that packs all the same: passes as it is
        result = recorder.stop()

    assert silent == b"".join(event for event in scripts.STREAM if event != usage)
    assert asking == b"".join(scripts.STREAM)
    assert packed.startswith(b"\x1f\x8b")
    rows = list(iter_requests(result.path))
    assert [(row["output_tokens"], row["output_tokens_count_source"]) for row in rows] == [(5, "usage")] * 3


def test_a_failed_request_that_comes_again_is_a_retry(tmp_path: Path, server: str) -> None:
    with start_recorder(RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"))) as recorder:
        for model in ("error", "error", "stream", "stream"):
            post(recorder.url, model)
        result = recorder.stop()

    assert [row["retry_of"] for row in iter_requests(result.path)] == [None, 0, None, None]
