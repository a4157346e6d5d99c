"""OTLP JSON with GenAI spans."""

import json

import pytest

from tracer.record.capturing import import_capture

UNKNOWN = {"dispatch_ns", "ttft_ns", "itl_summary", "bytes_in", "bytes_out", "http_status"}


def any_value(value):
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [any_value(one) for one in value]}}
        case dict():
            return {"kvlistValue": {"values": pairs(value)}}
    return {"stringValue": value}


def pairs(values):
    return [{"key": name, "value": any_value(value)} for name, value in values.items()]


def span(traffic, attributes, *, events=(), **more):
    return {
        "name": "chat m-1",
        "startTimeUnixNano": str(traffic.EPOCH_NS),
        "endTimeUnixNano": str(traffic.EPOCH_NS + 2_000_000_000),
        "attributes": pairs(attributes),
        "events": [{"name": "e", "attributes": pairs(event)} for event in events],
        "status": {},
        **more,
    }


def write(path, *spans):
    batch = {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": spans}]}]}
    path.write_text(json.dumps(batch) + "\n")
    return path


def parts(message):
    return {"role": message["role"], "parts": [{"type": "text", "content": message["content"]}]}


def asked(request):
    names = ("model", "max_tokens", "temperature", "top_p")
    return {"gen_ai.operation.name": "chat"} | {f"gen_ai.request.{name}": request[name] for name in names}


def usage():
    return {
        "gen_ai.usage.input_tokens": 91,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.usage.reasoning.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["stop"],
    }


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("in_event", [False, True])
def test_a_span_with_messages_is_the_row_that_live_recording_makes(tmp_path, traffic, as_text, in_event) -> None:
    request, response = traffic.chat("CANARY-user"), traffic.answer()
    system, *others = [parts(message) for message in request["messages"]]
    said = {**parts(response["choices"][0]["message"]), "finish_reason": "stop"}
    content = {"gen_ai.system_instructions": system["parts"], "gen_ai.input.messages": others, "gen_ai.output.messages": [said]}
    if as_text:
        content = {name: json.dumps(value) for name, value in content.items()}
    attributes = asked(request) | usage()
    one = span(traffic, attributes, events=[content]) if in_event else span(traffic, attributes | content)
    source = write(tmp_path / "x.jsonl", one)

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    traffic.assert_same_row(row, traffic.live_row(report.key_path, request, response), unknown=UNKNOWN)
    assert (report.source_format, report.footer.epoch_ns) == ("otel", traffic.EPOCH_NS)
    traffic.assert_no_canary(tmp_path, source)


@pytest.mark.parametrize(
    ("role", "content", "said"),
    [
        ("gen_ai.prompt.{}.role", "gen_ai.prompt.{}.content", "gen_ai.completion.0.content"),
        (
            "llm.input_messages.{}.message.role",
            "llm.input_messages.{}.message.content",
            "llm.output_messages.0.message.content",
        ),
    ],
)
def test_older_names_give_the_same_row(tmp_path, traffic, role, content, said) -> None:
    request, response = traffic.chat("CANARY-user"), traffic.answer()
    attributes = asked(request) | {"gen_ai.usage.prompt_tokens": 91, "gen_ai.usage.completion_tokens": 7}
    attributes |= {"gen_ai.response.finish_reasons": ["stop"], said: response["choices"][0]["message"]["content"]}
    for number, message in enumerate(request["messages"]):
        attributes |= {role.format(number): message["role"], content.format(number): message["content"]}
    source = write(tmp_path / "x.json", span(traffic, attributes))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, request, response)
    traffic.assert_same_row(row, live, unknown=UNKNOWN | {"cached_tokens", "reasoning_tokens"})
    traffic.assert_no_canary(tmp_path, source)


def test_tools_streams_sessions_and_servers(tmp_path, traffic) -> None:
    call = {"type": "tool_call", "id": "1", "name": "CANARY", "arguments": {"a": 1}}
    answer = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "response": "CANARY"}]}
    turns = [parts({"role": "user", "content": "a"}), {"role": "assistant", "parts": [call]}, answer]
    attributes = asked(traffic.chat("a")) | {
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.conversation.id": "CANARY-conversation",
        "gen_ai.tool.definitions": json.dumps([{"type": "function", "name": "CANARY"}]),
        "gen_ai.input.messages": json.dumps(turns),
        "gen_ai.output.messages": [{"role": "assistant", "parts": [call], "finish_reason": "tool_call"}],
        "server.address": "gpu",
        "server.port": 8000,
    }
    source = write(tmp_path / "x.json", span(traffic, attributes), span(traffic, attributes))

    import_capture(source, tmp_path / "x.parquet")

    row, again = traffic.rows_of(tmp_path / "x.parquet")
    assert (row["ttft_ns"], row["stream"], row["tools_count"], row["upstream"]) == (250_000_000, True, 1, "gpu:8000")
    assert (row["finish_reason"], row["tool_calls_out"]) == ("tool_calls", 1)
    assert (row["session_id"], again["session_id"], again["turn"]) == (0, 0, 1)
    traffic.assert_no_canary(tmp_path, source)


def test_spans_without_messages_errors_and_other_spans(tmp_path, traffic) -> None:
    request = asked(traffic.chat("a"))
    source = write(
        tmp_path / "x.json",
        span(traffic, request | usage()),
        span(traffic, request | {"error.type": "429"}),
        span(traffic, request | {"error.type": "CANARY"}, status={"code": 2, "message": "CANARY"}),
        span(traffic, {"http.route": "CANARY"}),
        span(traffic, {**request, "gen_ai.operation.name": "execute_tool"}),
        span(traffic, request, startTimeUnixNano="CANARY"),
    )

    report = import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [(row["http_status"], row["error_kind"]) for row in rows] == [
        (None, None),
        (429, "http_status"),
        (None, "stream_error"),
    ]
    assert (rows[0]["input_tokens"], rows[0]["input_blocks"], rows[0]["max_tokens"]) == (91, None, 50)
    assert (report.losses["passed_through"], report.bad_entries) == (2, 1)
    traffic.assert_no_canary(tmp_path, source)
