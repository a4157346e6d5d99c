"""CSV logs of gateways."""

import csv
import json

import pytest

from tracer.errors import TraceError
from tracer.record.capturing import import_capture

HEAD = ["timestamp", "request_json", "response_json", "status", "duration_ms"]


def table(path, head, *rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def test_a_row_is_the_row_that_live_recording_makes(tmp_path, traffic) -> None:
    request, response = traffic.chat('CANARY, "user"\nof two lines', "x" * 200_000, "y"), traffic.answer()
    row = ["2025-10-09 08:53:20", json.dumps(request), json.dumps(response), 200, 2000.0]
    source = table(tmp_path / "x.csv", HEAD, row)

    report = import_capture(source, tmp_path / "x.parquet")

    (row,) = traffic.rows_of(tmp_path / "x.parquet")
    unknown = {"dispatch_ns", "bytes_in", "bytes_out"}
    traffic.assert_same_row(row, traffic.live_row(report.key_path, request, response), unknown=unknown)
    assert (report.source_format, report.footer.epoch_ns) == ("gateway_csv", traffic.EPOCH_NS)
    traffic.assert_no_canary(tmp_path, source)


def test_columns_may_be_few_and_in_any_order_and_bad_rows_are_counted(tmp_path, traffic) -> None:
    request = json.dumps(traffic.chat("a"))
    rows = [[request, traffic.EPOCH_S * 1000], ["CANARY", 5], [request, "CANARY"], [request], [], ["{", 1]]
    source = table(tmp_path / "x.csv", ["Request_JSON", "TIMESTAMP"], *rows)

    report = import_capture(source, tmp_path / "x.parquet")

    assert (report.rows, report.bad_entries, report.footer.epoch_ns) == (1, 4, traffic.EPOCH_NS)
    traffic.assert_no_canary(tmp_path, source)


def test_a_table_without_requests_is_refused(tmp_path) -> None:
    source = table(tmp_path / "x.csv", ["timestamp", "prompt"], [1, "CANARY"])

    with pytest.raises(TraceError, match="request_json") as caught:
        import_capture(source, tmp_path / "x.parquet", source_format="gateway_csv")

    assert "CANARY" not in str(caught.value)
