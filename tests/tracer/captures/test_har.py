"""HARs as mitmproxy and browsers write them."""

import base64
import json

import pytest

from tracer.errors import TraceError
from tracer.record.capturing import import_capture


def entry(traffic, request, text, *, at_s=0, status=200, kind="application/json", path="/v1/chat/completions", **content):
    body = json.dumps(request)
    return {
        "startedDateTime": f"2025-10-09T08:53:{20 + at_s:02d}.000Z",
        "time": 2000.0,
        "request": {
            "method": "POST",
            "url": f"https://gpu.example{path}?key=CANARY-query",
            "headers": [{"name": "Authorization", "value": traffic.SECRET}, {"name": "Cookie", "value": "CANARY-cookie"}],
            "postData": {"mimeType": "application/json", "text": body},
            "bodySize": len(body),
        },
        "response": {
            "status": status,
            "headers": [{"name": "Content-Type", "value": kind}, {"name": "Content-Encoding", "value": "br"}],
            "content": {"size": 10, "mimeType": kind, **({"text": text} if text is not None else {}), **content},
            "bodySize": len(text.encode()) if text else -1,
        },
        "timings": {"send": 0.5, "wait": 900.0, "receive": 1099.5},
    }


def har(path, *entries, creator="browser"):
    path.write_text(json.dumps({"log": {"version": "1.2", "creator": {"name": creator}, "entries": entries}}))
    return path


def test_an_entry_is_the_row_that_live_recording_makes(tmp_path, traffic) -> None:
    request, response = traffic.chat("CANARY-user"), json.dumps(traffic.answer())
    source = har(tmp_path / "x.har", entry(traffic, request, response))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    traffic.assert_same_row(row, traffic.live_row(report.key_path, request, response.encode()), unknown={"dispatch_ns"})
    assert (row["upstream"], row["client_id"]) == ("gpu.example:443", 0)
    assert (report.source_format, report.footer.epoch_ns, report.secrets_in_source) == ("har", traffic.EPOCH_NS, 1)
    traffic.assert_no_canary(tmp_path, source)


def test_streams_are_read_and_their_times_stay_unknown(tmp_path, traffic) -> None:
    request, sse = traffic.chat("hello", stream=True), traffic.stream("CANARY", " words")
    text = base64.b64encode(sse).decode()
    one = entry(traffic, request, text, kind="text/event-stream", encoding="base64")
    one["response"]["bodySize"] = -1
    source = har(tmp_path / "x.har", one)

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, request, sse, content_type="text/event-stream")
    traffic.assert_same_row(row, live, unknown={"dispatch_ns", "ttft_ns", "itl_summary", "bytes_out"})
    assert row["bytes_out"] is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mitmproxy's whole addon package comes along
def test_an_archive_by_mitmproxy_round_trips(tmp_path, traffic) -> None:
    from mitmproxy.addons.savehar import SaveHar
    from mitmproxy.test import tflow

    flow = tflow.tflow(resp=True)
    flow.request.method, flow.request.path = "POST", "/v1/chat/completions"
    flow.request.content = json.dumps(traffic.chat("hello")).encode()
    flow.response.content = json.dumps(traffic.answer()).encode()
    flow.response.headers["content-type"] = "application/json"
    source = tmp_path / "x.har"
    source.write_text(json.dumps(SaveHar().make_har([flow])))

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    live = traffic.live_row(report.key_path, flow.request.content, flow.response.content, end_ns=3_000_000_000)
    traffic.assert_same_row(row, live, unknown={"dispatch_ns"})
    assert report.footer.epoch_ns == 946681200 * 10**9


def test_entries_without_an_answer_failed_entries_and_others(tmp_path, traffic) -> None:
    failed = entry(traffic, traffic.chat("b"), None, status=0, at_s=1)
    source = har(
        tmp_path / "x.har",
        entry(traffic, traffic.chat("a"), None, kind="text/event-stream"),
        failed,
        entry(traffic, {}, "{}", path="/v1/models"),
        {"startedDateTime": "CANARY", "request": {"method": "POST", "url": "http://h/v1/completions"}, "response": {}},
        "CANARY",
    )

    report = import_capture(source, tmp_path / "x.parquet")

    rows = traffic.rows_of(tmp_path / "x.parquet")
    assert [(row["http_status"], row["error_kind"]) for row in rows] == [(200, None), (None, "connection_lost")]
    assert (report.losses["answers_not_stored"], report.losses["passed_through"], report.bad_entries) == (1, 1, 2)
    traffic.assert_no_canary(tmp_path, source)


def test_numbers_that_no_column_can_hold_are_unknown(tmp_path, traffic) -> None:
    one = entry(traffic, traffic.chat("a"), "{}", status=10**12)
    one["time"], one["response"]["bodySize"], one["request"]["bodySize"] = 1e300, 1e300, -1
    source = har(tmp_path / "x.har", one)

    import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    assert (row["http_status"], row["end_ns"], row["bytes_out"], row["bytes_in"]) == (None,) * 4


def test_a_cut_archive_gives_its_whole_entries(tmp_path, traffic) -> None:
    source = har(tmp_path / "x.har", *(entry(traffic, traffic.chat(str(n)), "{}", at_s=n) for n in range(3)))
    source.write_bytes(source.read_bytes()[:-300])

    report = import_capture(source, tmp_path / "x.parquet")

    assert (report.rows, report.losses["torn_captures"]) == (2, 1)


@pytest.mark.parametrize("text", ['{"log": {}}', '{"log": 5}', '{"log": {"entries": 5}}', '{"log": {"entries": []}}', '{"log'])
def test_what_holds_no_entries_is_refused(tmp_path, text) -> None:
    source = tmp_path / "x.har"
    source.write_text(text)

    with pytest.raises(TraceError):
        import_capture(source, tmp_path / "x.parquet", source_format="har")

    assert list(tmp_path.iterdir()) == [source]
