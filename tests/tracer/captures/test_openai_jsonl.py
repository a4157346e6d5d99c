"""Plain request logs."""

import json

import pytest

from tracer.record.capturing import import_capture

UNKNOWN = {"dispatch_ns", "ttft_ns", "itl_summary", "bytes_in", "bytes_out"}


def lines(path, *values):
    path.write_bytes(b"".join(json.dumps(value).encode() + b"\n" for value in values))
    return path


@pytest.mark.parametrize("name", ["request", "body"])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_line_with_both_bodies_is_the_row_that_live_recording_makes(tmp_path, traffic, name, as_text) -> None:
    request, response = traffic.chat("CANARY-user"), traffic.answer()
    shown = json.dumps(request) if as_text else request
    line = {"timestamp": traffic.EPOCH_S, name: shown, "response": response, "status": 200, "duration_ms": 2000}
    source = lines(tmp_path / "x.jsonl", line)

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    traffic.assert_same_row(row, traffic.live_row(report.key_path, request, response), unknown=UNKNOWN)
    assert (report.source_format, report.footer.epoch_ns) == ("openai_jsonl", traffic.EPOCH_NS)
    assert row["upstream"] is None
    traffic.assert_no_canary(tmp_path, source)


def test_a_bare_request_has_arrival_and_prompt_and_nothing_else(tmp_path, traffic) -> None:
    request = {"model": "m", "prompt": "once upon a time " * 20, "max_tokens": 9}
    source = lines(tmp_path / "x.jsonl", {**request, "timestamp": "2025-10-09T08:53:20Z"})

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, request, None, traffic.COMPLETIONS)
    traffic.assert_same_row(row, live, unknown=UNKNOWN | {"http_status", "end_ns", "error_kind"})
    assert report.footer.epoch_ns == traffic.EPOCH_NS


def test_a_stream_kept_as_text_and_a_batch_answer_are_read(tmp_path, traffic) -> None:
    streamed = {"ts": traffic.EPOCH_S, "request": traffic.chat("a", stream=True), "response": traffic.stream("x", "y").decode()}
    batch = {
        "created": traffic.EPOCH_S + 1,
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": "hello"},
        "response": {"status_code": 200, "body": traffic.completion()},
    }
    source = lines(tmp_path / "x.jsonl", streamed, batch)

    import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [(row["finish_reason"], row["output_tokens"], row["http_status"]) for row in rows] == [
        ("stop", 7, None),
        ("length", 7, 200),
    ]
    assert [row["error_kind"] for row in rows] == [None, None]


def test_raw_prompts_that_continue_an_answer_are_linked_even_if_logged_first(tmp_path, traffic) -> None:
    text = "once upon a time there was " * 10
    first = {"timestamp": traffic.EPOCH_S, "request": {"model": "m", "prompt": text}, "response": traffic.completion(" a king")}
    second = {"timestamp": traffic.EPOCH_S + 9, "request": {"model": "m", "prompt": text + " a king who"}}
    source = lines(tmp_path / "x.jsonl", second, first)

    import_capture(source, tmp_path / "x.parquet")

    assert [row["turn"] for row in traffic.rows_of(tmp_path / "x.parquet")] == [0, 1]


def test_bad_lines_are_named_without_their_text(tmp_path, traffic) -> None:
    good = {"timestamp": traffic.EPOCH_S, **traffic.chat("CANARY-user")}
    source = lines(
        tmp_path / "x.jsonl",
        good,
        {**good, "timestamp": "CANARY-time"},
        {**good, "timestamp": float("nan")},
        ["CANARY"],
        {"timestamp": 5, "CANARY": 1},
        good,
    )
    with open(source, "ab") as file:
        file.write(b'{"timestamp": 5, "messages": "CANARY')

    report = import_capture(source, tmp_path / "x.parquet")

    rejected = [json.loads(line) for line in (tmp_path / "x.parquet.rejected.jsonl").read_text().splitlines()]
    assert (report.rows, report.bad_entries) == (2, 5)
    assert [one["place"] for one in rejected] == ["line 2", "line 3", "line 4", "line 5", "line 7"]
    traffic.assert_no_canary(tmp_path, source)


def test_sessions_are_told_apart_by_the_key_of_the_log(tmp_path, traffic) -> None:
    one = {"request": traffic.chat("CANARY-user")}
    stamped = [{**one, "timestamp": traffic.EPOCH_S + n, "session_id": f"CANARY-{n % 2}"} for n in range(4)]
    source = lines(tmp_path / "x.jsonl", *stamped)

    import_capture(source, tmp_path / "x.parquet")

    assert [row["session_id"] for row in traffic.rows_of(tmp_path / "x.parquet")] == [0, 1, 0, 1]
    traffic.assert_no_canary(tmp_path, source)
