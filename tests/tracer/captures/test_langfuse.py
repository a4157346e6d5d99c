"""Langfuse observations."""

import json

import pytest

from tracer.record.capturing import import_capture

UNKNOWN = {"dispatch_ns", "ttft_ns", "itl_summary", "bytes_in", "bytes_out", "http_status"}


def observation(traffic, request, response, **more):
    choice = response["choices"][0] if response else {}
    return {
        "id": "1",
        "traceId": "CANARY-trace",
        "type": "GENERATION",
        "startTime": "2025-10-09T08:53:20.000Z",
        "endTime": "2025-10-09T08:53:22.000Z",
        "completionStartTime": "2025-10-09T08:53:20.250Z" if request.get("stream") else None,
        "model": request["model"],
        "modelParameters": {name: str(request[name]) for name in ("max_tokens", "temperature", "top_p") if name in request},
        "input": request.get("messages", request.get("prompt")),
        "output": choice.get("message", choice.get("text")),
        "usageDetails": {"input": 27, "input_cached_tokens": 64, "output": 4, "output_reasoning_tokens": 3, "total": 98},
        "level": "DEFAULT",
        "metadata": {"finish_reason": choice.get("finish_reason")},
        **more,
    }


def snake(entry):
    """As blob exports write it, JSON in text."""
    names = {"".join(f"_{c.lower()}" if c.isupper() else c for c in name): value for name, value in entry.items()}
    names["provided_model_name"] = names.pop("model")
    names |= {"start_time": "2025-10-09 08:53:20.000000", "end_time": "2025-10-09 08:53:22.000000"}
    return names | {name: json.dumps(names[name]) for name in ("input", "output", "usage_details", "model_parameters")}


def write(path, *entries):
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


@pytest.mark.parametrize("shape", ["lines", "array", "page", "snake"])
def test_an_observation_is_the_row_that_live_recording_makes(tmp_path, traffic, shape) -> None:
    request, response = traffic.chat("CANARY-user"), traffic.answer()
    one = observation(traffic, request, response)
    entry = {"lines": one, "array": [one], "page": {"data": [one], "meta": {}}, "snake": snake(one)}[shape]
    source = write(tmp_path / "x.jsonl", entry)

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, request, response)
    traffic.assert_same_row({**row, "stream": row["stream"] or False}, live, unknown=UNKNOWN)
    assert (report.source_format, report.footer.epoch_ns) == ("langfuse", traffic.EPOCH_NS)
    traffic.assert_no_canary(tmp_path, source)


def test_streams_have_a_first_token_and_sessions_their_name(tmp_path, traffic) -> None:
    request = traffic.chat("a", stream=True)
    named = {"sessionId": "CANARY-session", "userId": "CANARY-user"}
    source = write(tmp_path / "x.jsonl", *(observation(traffic, request, traffic.answer(), **named) for _ in range(2)))

    import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [(row["ttft_ns"], row["stream"]) for row in rows] == [(250_000_000, True)] * 2
    assert {row["session_id"] for row in rows} == {row["client_id"] for row in rows} == {0}
    traffic.assert_no_canary(tmp_path, source)


def test_raw_prompts_tools_errors_and_what_is_left_out(tmp_path, traffic) -> None:
    tools = {"messages": traffic.chat("a")["messages"], "tools": [{"type": "function", "function": {"name": "CANARY"}}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}
    source = write(
        tmp_path / "x.jsonl",
        observation(traffic, {"model": "m", "prompt": "once upon a time"}, traffic.completion()),
        observation(traffic, traffic.chat("a"), None, input=tools, output=call),
        observation(traffic, traffic.chat("a"), None, level="ERROR", statusMessage="CANARY"),
        observation(traffic, traffic.chat("a"), None, input=None),
        observation(traffic, traffic.chat("a"), None, type="SPAN"),
        observation(traffic, traffic.chat("a"), None, startTime="CANARY"),
    )

    report = import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [(row["kind"], row["tools_count"], row["tool_calls_out"], row["error_kind"]) for row in rows] == [
        ("completion", None, None, None),
        ("chat", 1, 1, None),
        ("chat", None, None, "stream_error"),
        ("chat", None, None, None),
    ]
    assert (rows[3]["input_tokens"], rows[3]["input_blocks"]) == (91, None)
    assert (report.bad_entries, report.losses["passed_through"], report.losses["requests_not_stored"]) == (1, 1, 1)
    traffic.assert_no_canary(tmp_path, source)
