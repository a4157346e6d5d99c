"""LiteLLM's logging payloads and spend log rows."""

import json

import pytest

from tracer.record.capturing import import_capture

UNKNOWN = {"dispatch_ns", "ttft_ns", "itl_summary", "bytes_in", "bytes_out", "http_status"}


def payload(traffic, request, response, **more):
    parameters = {name: request[name] for name in request.keys() - {"model", "messages", "prompt", "stream"}}
    return {
        "id": "chatcmpl-1",
        "litellm_call_id": "CANARY-call",
        "trace_id": "CANARY-trace",
        "call_type": "acompletion",
        "status": "success",
        "stream": request.get("stream", False),
        "startTime": float(traffic.EPOCH_S),
        "endTime": traffic.EPOCH_S + 2.0,
        "completionStartTime": traffic.EPOCH_S + 2.0,
        "model": request["model"],
        "model_parameters": parameters,
        "messages": request.get("messages", request.get("prompt")),
        "response": response,
        "prompt_tokens": 91,
        "completion_tokens": 7,
        "cache_hit": None,
        "metadata": {"user_api_key_hash": "CANARY-hash"},
        "hidden_params": {"usage_object": traffic.USAGE},
        **more,
    }


def write(path, *entries, as_array=False):
    text = json.dumps(entries, indent=1) if as_array else "\n".join(json.dumps(entry) for entry in entries)
    path.write_text(text)
    return path


@pytest.mark.parametrize("as_array", [False, True])
def test_a_payload_is_the_row_that_live_recording_makes(tmp_path, traffic, as_array) -> None:
    tools = [{"type": "function", "function": {"name": "CANARY-tool"}}]
    request, response = traffic.chat("CANARY-user", tools=tools, tool_choice="auto"), traffic.answer()
    source = write(tmp_path / "x.jsonl", payload(traffic, request, response), as_array=as_array)

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    traffic.assert_same_row(row, traffic.live_row(report.key_path, request, response), unknown=UNKNOWN)
    assert (report.source_format, report.footer.epoch_ns, row["client_id"]) == ("litellm", traffic.EPOCH_NS, 0)
    assert (report.secrets_in_source, report.bad_entries) == (0, 0)
    traffic.assert_no_canary(tmp_path, source)


def test_the_first_token_of_a_stream_is_known(tmp_path, traffic) -> None:
    request = traffic.chat("a", stream=True)
    source = write(tmp_path / "x.jsonl", payload(traffic, request, traffic.answer(), completionStartTime=traffic.EPOCH_S + 0.25))

    import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    assert (row["ttft_ns"], row["end_ns"], row["stream"], row["itl_summary"]) == (250_000_000, 2_000_000_000, True, None)


def test_completions_and_failures_and_what_is_left_out(tmp_path, traffic) -> None:
    chat = traffic.chat("a")
    raw = {"model": "m", "prompt": "once upon a time " * 9}
    source = write(
        tmp_path / "x.jsonl",
        payload(traffic, raw, traffic.completion(), call_type="atext_completion"),
        payload(traffic, chat, None, status="failure", error_str="CANARY", error_information={"error_code": "429"}),
        payload(traffic, chat, {}, status="failure", error_information={"error_class": "CANARY"}),
        payload(traffic, chat, traffic.answer(), cache_hit=True),
        payload(traffic, chat, traffic.answer(), cache_hit="True"),
        payload(traffic, chat, {}, call_type="aembedding"),
        payload(traffic, chat, {}, startTime="CANARY"),
    )

    report = import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [(row["kind"], row["http_status"], row["error_kind"]) for row in rows] == [
        ("completion", None, None),
        ("chat", 429, "http_status"),
        ("chat", None, "stream_error"),
    ]
    assert (report.losses["cache_hits"], report.losses["passed_through"], report.bad_entries) == (2, 1, 1)
    traffic.assert_no_canary(tmp_path, source)


def test_redacted_logs_keep_lengths_and_times(tmp_path, traffic) -> None:
    redacted = traffic.chat("a") | {"messages": [{"role": "user", "content": "redacted-by-litellm"}]}
    source = write(tmp_path / "x.jsonl", payload(traffic, redacted, traffic.answer("redacted-by-litellm")))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    assert (row["input_tokens"], row["output_tokens"], row["cached_tokens"], row["model"]) == (91, 7, 64, "m-1")
    assert (row["input_blocks"], row["input_tail_id"], row["output_blocks"], row["kind"]) == (None, None, None, "chat")
    assert report.losses["requests_not_stored"] == 1


def test_spend_log_rows_hold_the_request_as_it_was_sent(tmp_path, traffic) -> None:
    request = traffic.chat("CANARY-user", stream=True)
    row = {
        "request_id": "chatcmpl-1",
        "call_type": "acompletion",
        "api_key": "CANARY-hash",
        "startTime": "2025-10-09T08:53:20.000Z",
        "endTime": "2025-10-09T08:53:22Z",
        "completionStartTime": "2025-10-09T08:53:21Z",
        "model": "openai/m-1",
        "prompt_tokens": 91,
        "completion_tokens": 7,
        "messages": "{}",
        "response": json.dumps(traffic.answer()),
        "proxy_server_request": json.dumps(request),
        "session_id": "CANARY-session",
        "status": "success",
        "cache_hit": "False",
        "metadata": json.dumps({"usage_object": traffic.USAGE}),
    }
    source = write(tmp_path / "x.json", row, as_array=True)

    report = import_capture(source, tmp_path / "x.parquet")

    (found,) = traffic.rows_of(tmp_path / "x.parquet")
    assert found["ttft_ns"] == 1_000_000_000
    live = traffic.live_row(report.key_path, request, traffic.answer())
    traffic.assert_same_row({**found, "ttft_ns": None}, live, unknown=UNKNOWN)
    traffic.assert_no_canary(tmp_path, source)


def test_turns_are_linked_though_each_has_a_session_of_its_own(tmp_path, traffic) -> None:
    said = traffic.answer("fine")
    first = payload(traffic, traffic.chat("hello"), said, session_id="1", trace_id="1")
    later = {"startTime": traffic.EPOCH_S + 9, "endTime": traffic.EPOCH_S + 10, "session_id": "2", "trace_id": "2"}
    source = write(tmp_path / "x.jsonl", payload(traffic, traffic.chat("hello", "fine", "more"), said, **later), first)

    import_capture(source, tmp_path / "x.parquet")

    assert [(row["session_id"], row["turn"]) for row in traffic.rows_of(tmp_path / "x.parquet")] == [(0, 0), (0, 1)]
