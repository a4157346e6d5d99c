"""GoReplay files."""

import gzip
import json

from tracer.captures import goreplay
from tracer.record.capturing import import_capture

SEPARATOR = "\n🐵🙈🙉\n".encode()


def request(traffic, body, *, number=1, at_ns=0, took_ns=1_000, path="/v1/chat/completions"):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"1 {number:024x} {traffic.EPOCH_NS + at_ns} {took_ns}\nPOST {path} HTTP/1.1\r\nHost: gpu\r\n"
    more = f"authorization: {traffic.SECRET}\r\nX-Session-Id: CANARY-7\r\nContent-Length: {len(raw)}\r\n\r\n"
    return (head + more).encode() + raw + SEPARATOR


def response(
    traffic, body, *, number=1, at_ns=500_000_000, took_ns=1_500_000_000, head="Content-Type: application/json", status=200
):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    meta = f"2 {number:024x} {traffic.EPOCH_NS + at_ns} {took_ns}\nHTTP/1.1 {status} OK\r\n{head}\r\n\r\n"
    return meta.encode() + raw + SEPARATOR


def test_a_pair_is_the_row_that_live_recording_makes(tmp_path, traffic) -> None:
    asked, said = traffic.chat("CANARY-user"), traffic.answer()
    source = tmp_path / "x.gor"
    source.write_bytes(request(traffic, asked) + response(traffic, said))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    assert row["dispatch_ns"] == 1_000
    traffic.assert_same_row({**row, "dispatch_ns": 0}, traffic.live_row(report.key_path, asked, said))
    assert (report.source_format, report.footer.epoch_ns, report.secrets_in_source) == ("goreplay", traffic.EPOCH_NS, 1)
    traffic.assert_no_canary(tmp_path, source)


def test_a_chunked_and_compressed_stream_is_read(tmp_path, traffic) -> None:
    asked, packed = traffic.chat("a", stream=True), gzip.compress(traffic.stream("CANARY", " b"))
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (packed[:50], packed[50:])) + b"0\r\n\r\n"
    head = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nContent-Encoding: gzip"
    source = tmp_path / "x.gor"
    source.write_bytes(request(traffic, asked) + response(traffic, chunked, head=head))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, asked, packed, content_type="text/event-stream", encoding="gzip")
    traffic.assert_same_row({**row, "dispatch_ns": 0}, live, unknown={"ttft_ns", "itl_summary"})


def test_requests_without_responses_cut_responses_and_junk(tmp_path, traffic) -> None:
    source = tmp_path / "x.gor"
    stream = b"%x\r\n" % 100_000 + traffic.stream("CANARY")
    head = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
    source.write_bytes(
        request(traffic, traffic.chat("a"), at_ns=9)
        + request(traffic, traffic.chat("b"), number=2)
        + response(traffic, stream, number=2, head=head)
        + request(traffic, b"{}", number=3, path="/metrics")
        + b"CANARY junk"
        + SEPARATOR
        + b"1 abc"
    )

    report = import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [(row["error_kind"], row["http_status"], row["end_ns"]) for row in rows] == [
        ("connection_lost", 200, 2_000_000_000),
        (None, None, None),
    ]
    assert (report.bad_entries, report.losses["passed_through"], report.losses["answers_not_stored"]) == (2, 1, 1)
    traffic.assert_no_canary(tmp_path, source)


def test_the_separator_may_lie_across_reads(tmp_path, traffic, monkeypatch) -> None:
    source = tmp_path / "x.gor"
    source.write_bytes(b"".join(request(traffic, traffic.chat("a"), number=n) for n in range(3)))
    monkeypatch.setattr(goreplay, "_READ_BYTES", 7)

    assert import_capture(source, tmp_path / "x.parquet").rows == 3
