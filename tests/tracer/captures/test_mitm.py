"""Flow dumps written by mitmproxy's own writer."""

import gzip
import json

import pytest
from mitmproxy import connection, http
from mitmproxy.flow import Error
from mitmproxy.io import FlowWriter

from tracer.captures import mitm
from tracer.errors import TraceError
from tracer.record.capturing import import_capture


@pytest.fixture
def flow(traffic):
    def make(request, content=b"", *, path="/v1/chat/completions", at_s=0.0, headers=(), status=200, error=None, **response):
        one = http.HTTPFlow(
            connection.Client(peername=("127.0.0.1", 1), sockname=("127.0.0.1", 2)), connection.Server(address=None)
        )
        body = request if isinstance(request, bytes) or request is None else json.dumps(request).encode()
        one.request = http.Request.make("POST", f"http://gpu:8000{path}", body or b"", dict(headers))
        one.request.raw_content = body
        one.request.timestamp_start = traffic.EPOCH_S + at_s
        one.request.timestamp_end = one.request.timestamp_start
        if status is not None:
            kind = response.pop("content_type", "application/json")
            one.response = http.Response.make(status, b"", {"content-type": kind, **response.pop("headers_out", {})})
            one.response.raw_content = content
            one.response.timestamp_start = one.request.timestamp_start + 1
            one.response.timestamp_end = one.request.timestamp_start + 2 if error is None else None
        if error is not None:
            one.error = Error(error, one.request.timestamp_start + 2)
        return one

    return make


def dump(path, *flows):
    with open(path, "wb") as file:
        writer = FlowWriter(file)
        for one in flows:
            writer.add(one)
    return path


def test_a_dumped_flow_is_the_row_that_live_recording_makes(tmp_path, traffic, flow) -> None:
    request, response = traffic.chat("CANARY-user"), json.dumps(traffic.answer()).encode()
    source = dump(tmp_path / "x.mitm", flow(request, response, headers={"authorization": traffic.SECRET}))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, request, response)
    traffic.assert_same_row(row, live)
    assert (row["upstream"], row["arrival_ns"], row["client_id"]) == ("gpu:8000", 0, 0)
    assert (report.source_format, report.footer.source_format, report.secrets_in_source) == ("mitm", "mitm", 1)
    assert report.footer.epoch_ns == traffic.EPOCH_NS
    assert (report.bad_entries, report.quarantine) == (0, None)
    traffic.assert_no_canary(tmp_path, source)


def test_a_stored_stream_gives_its_answer_but_no_chunk_times(tmp_path, traffic, flow) -> None:
    request, content = traffic.chat("hello", stream=True), traffic.stream("CANARY", " of", " words")
    packed = gzip.compress(content)
    kinds = {"content_type": "text/event-stream", "headers_out": {"content-encoding": "gzip"}}
    source = dump(tmp_path / "x.mitm", flow(request, packed, **kinds))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, request, packed, content_type="text/event-stream", encoding="gzip")
    traffic.assert_same_row(row, live, unknown={"ttft_ns", "itl_summary"})
    assert (row["cached_tokens"], row["output_tokens"], row["bytes_out"]) == (64, 7, len(packed))


def test_a_flow_without_its_answer_keeps_times_and_prompt(tmp_path, traffic, flow) -> None:
    source = dump(tmp_path / "x.mitm", flow(traffic.chat("hello", stream=True), None, content_type="text/event-stream"))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    assert report.losses["answers_not_stored"] == 1
    assert (row["http_status"], row["error_kind"], row["end_ns"]) == (200, None, 2_000_000_000)
    assert (row["ttft_ns"], row["output_tokens"], row["bytes_out"], row["finish_reason"]) == (None, None, None, None)
    assert row["input_blocks"] and row["input_tokens_count_source"] == "tokenizer"


def test_flows_that_broke_have_the_kinds_of_live_recording(tmp_path, traffic, flow) -> None:
    part = traffic.stream("a")[:200]
    source = dump(
        tmp_path / "x.mitm",
        flow(traffic.chat("a"), part, error="Client disconnected.", content_type="text/event-stream"),
        flow(traffic.chat("b"), part, error="peer closed", content_type="text/event-stream", at_s=1),
        flow(traffic.chat("c"), status=None, error="connection refused", at_s=2),
        flow(traffic.chat("d"), b'{"error": {"message": "CANARY"}}', status=429, at_s=3),
        flow(traffic.chat("e"), status=None, at_s=4),
    )

    import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    kinds = [row["error_kind"] for row in rows]
    assert kinds == ["client_abort", "connection_lost", "connect", "http_status", "recorder_stopped"]
    assert [row["http_status"] for row in rows] == [200, 200, 502, 429, None]
    assert rows[0]["client_abort_ns"] == 2_000_000_000
    traffic.assert_no_canary(tmp_path, source)


def test_turns_out_of_order_are_sorted_and_linked(tmp_path, traffic, flow) -> None:
    first, second = traffic.chat("hello"), traffic.chat("hello", "CANARY-answer of a few words", "more")
    response = json.dumps(traffic.answer()).encode()
    source = dump(
        tmp_path / "x.mitm", flow(second, response, at_s=60), flow(first, response), flow(first, b"{}", path="/v1/models")
    )

    report = import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [row["arrival_ns"] for row in rows] == [0, 60 * 10**9]
    assert (rows[1]["parent_request_id"], rows[1]["turn"], rows[1]["think_ns"]) == (0, 1, 58 * 10**9)
    assert rows[1]["input_blocks"][: len(rows[0]["input_blocks"])] == rows[0]["input_blocks"]
    assert report.losses["passed_through"] == 1


def test_times_and_numbers_that_cannot_be_are_left_out(tmp_path, traffic, flow) -> None:
    backwards, late, odd = flow(traffic.chat("a"), b"{}"), flow(traffic.chat("b"), b"{}"), flow(traffic.chat("c"), b"{}", at_s=1)
    backwards.response.timestamp_end = traffic.EPOCH_S - 5.0
    late.request.timestamp_start = 1e30
    odd.response.status_code = 10**9
    source = dump(tmp_path / "x.mitm", backwards, late, odd)

    report = import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [(row["end_ns"], row["http_status"]) for row in rows] == [(None, 200), (2_000_000_000, None)]
    assert report.bad_entries == 1


def test_other_apis_are_read_by_their_own_parsers(tmp_path, traffic, flow) -> None:
    said = {"type": "message", "content": [{"type": "text", "text": "CANARY"}], "stop_reason": "end_turn"}
    said["usage"] = {"input_tokens": 30, "output_tokens": 5, "cache_read_input_tokens": 61}
    request = {"model": "m", "max_tokens": 9, "system": "CANARY", "messages": [{"role": "user", "content": "CANARY"}]}
    source = dump(tmp_path / "x.mitm", flow(request, json.dumps(said).encode(), path="/v1/messages?beta=true"))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, request, said, "/v1/messages")
    traffic.assert_same_row(row, live)
    assert (row["input_tokens"], row["cached_tokens"]) == (91, 61)
    traffic.assert_no_canary(tmp_path, source)


def test_a_cut_dump_gives_its_whole_flows_and_counts_the_loss(tmp_path, traffic, flow) -> None:
    response = json.dumps(traffic.answer()).encode()
    source = dump(tmp_path / "x.mitm", flow(traffic.chat("a"), response), flow(traffic.chat("b"), response, at_s=1))
    source.write_bytes(source.read_bytes()[:-500])

    report = import_capture(source, tmp_path / "x.parquet")

    assert (report.rows, report.losses["torn_captures"], report.bad_entries) == (1, 1, 1)
    assert json.loads((tmp_path / "x.parquet.rejected.jsonl").read_text())["place"] == "flow 2"
    traffic.assert_no_canary(tmp_path, source)


def test_strict_stops_at_a_cut_and_leaves_nothing(tmp_path, traffic, flow) -> None:
    source = dump(tmp_path / "x.mitm", flow(traffic.chat("a"), b"{}"), flow(traffic.chat("b"), b"{}"))
    source.write_bytes(source.read_bytes()[:-5])

    with pytest.raises(TraceError, match="flow 2: cut or damaged"):
        import_capture(source, tmp_path / "x.parquet", strict=True)

    assert list(tmp_path.iterdir()) == [source]


def test_every_cut_of_a_dump_is_read_up_to_it(tmp_path, traffic, flow) -> None:
    source = dump(tmp_path / "x.mitm", flow({"model": "m", "messages": []}, b"{}"))
    data, path = source.read_bytes(), tmp_path / "cut"
    faults = []

    for size in range(1, len(data), 7):
        path.write_bytes(data + data[:size])
        with open(path, "rb") as file:
            assert len(list(mitm.read(file, faults.append))) == 1

    assert len(faults) == len(range(1, len(data), 7))


def test_any_damaged_byte_costs_flows_and_nothing_else(tmp_path, traffic, flow) -> None:
    source = dump(tmp_path / "x.mitm", flow({"model": "m", "messages": []}, b"{}"))
    data, path = source.read_bytes(), tmp_path / "damaged"

    for at in range(0, len(data), 11):
        for byte in b"9:x":
            path.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :] + data)
            with open(path, "rb") as file:
                assert len(list(mitm.read(file, lambda _: None))) <= 2


def test_a_whole_dump_becomes_the_trace_that_recording_that_traffic_gives(tmp_path, traffic, flow) -> None:
    """Two clients with three turns each and a shared system prompt: the same ids, sessions, parents and think times."""
    turns = []
    for number in range(6):
        said = [text for n in range(number // 2) for text in (f"question {n}", f"CANARY-answer {n}")]
        request = json.dumps(traffic.chat(*said, f"question {number // 2}")).encode()
        response = json.dumps(traffic.answer(f"CANARY-answer {number // 2}")).encode()
        turns.append((number * 10, f"Bearer CANARY-{number % 2}", request, response))
    flows = [flow(asked, said, at_s=at_s, headers={"authorization": who}) for at_s, who, asked, said in turns]
    source = dump(tmp_path / "x.mitm", *reversed(flows))

    report = import_capture(source, tmp_path / "x.parquet")

    recorded = traffic.recorded(tmp_path / "live.parquet", report.key_path, turns)
    assert traffic.rows_of(tmp_path / "x.parquet") == recorded
    assert [row["turn"] for row in recorded] == [0, 0, 1, 1, 2, 2]
    assert len({row["session_id"] for row in recorded}) == 2
