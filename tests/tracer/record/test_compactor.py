"""Segments of any state become a trace: sorted, linked, dense, with every loss counted."""

import os
from pathlib import Path

import msgspec
import pytest

from tracer.errors import TraceError
from tracer.record.compactor import compact
from tracer.record.messages import Begun, Header, Row, Totals
from tracer.record.writer import SegmentWriter, lock_folder, segment_paths
from tracer.tracefile import iter_requests, read_footer

HEADER = Header(producer="chatreel 1", epoch_ns=77, key_id="abc", tokenizer="cl100k", template="chatml", block_tokens=16)


def digest(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers)


def row(flow: int, arrival_ns: int, **more: object) -> Row:
    columns = {"end_ns": 10, "http_status": 200, "endpoint": "/v1/completions"}
    return Row(flow=flow, arrival_ns=arrival_ns, row=columns, **more)


def segment(folder: Path, *records: object, header: Header = HEADER) -> None:
    folder.mkdir(exist_ok=True)
    writer = SegmentWriter(folder, msgspec.msgpack.encode(header), 0)
    for record in records:
        writer.add(msgspec.msgpack.encode(record))
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "t.segments"


def test_rows_are_sorted_linked_and_numbered_in_first_seen_order(folder: Path) -> None:
    segment(
        folder,
        row(2, 50, input_hashes=digest(5, 6, 7), input_tail=digest(8), client=b"bbbbbbbb", extends=[b"s"]),
        row(1, 20, input_hashes=digest(5, 6), input_tail=digest(9), output_hashes=digest(7), leaves=[b"s"]),
    )
    segment(folder, row(3, 10, input_hashes=digest(5), client=b"aaaaaaaa"))

    result = compact(folder)
    rows = list(iter_requests(result.path))

    assert [one["arrival_ns"] for one in rows] == [10, 20, 50]
    assert [one["request_id"] for one in rows] == [0, 1, 2]
    assert [one["input_blocks"] for one in rows] == [[0], [0, 1], [0, 1, 3]]
    assert [one["input_tail_id"] for one in rows] == [None, 2, 4]
    assert [one["output_blocks"] for one in rows] == [[], [3], []]
    assert [one["client_id"] for one in rows] == [0, None, 1]
    assert [one["parent_request_id"] for one in rows] == [None, None, 1]
    assert [one["session_id"] for one in rows] == [0, 1, 1]
    assert (rows[2]["turn"], rows[2]["think_ns"]) == (1, 20)
    assert not folder.exists()


def test_the_footer_says_how_it_was_hashed_and_what_was_lost(folder: Path) -> None:
    segment(folder, Totals(counts={"token_drift": 1}), row(1, 5), Totals(counts={"token_drift": 3, "rows_lost": 2}))

    result = compact(folder, counts={"rows_lost": 4, "passed_through": 0})
    footer = read_footer(result.path)

    assert footer.losses == result.losses == {"token_drift": 3, "rows_lost": 4}
    assert (footer.epoch_ns, footer.time_unit_ns, footer.block_tokens) == (77, 1, 16)
    assert (footer.hashes.tokenizer, footer.hashes.key_id, footer.hashes.scope) == ("cl100k", "abc", "global")


def test_requests_under_way_at_a_crash_are_counted(folder: Path) -> None:
    segment(folder, Begun(flow=1, arrival_ns=1), Begun(flow=2, arrival_ns=2), row(1, 1))

    assert compact(folder).losses == {"requests_unfinished": 1}


def test_a_torn_tail_is_cut_and_counted(folder: Path) -> None:
    segment(folder, row(1, 5), row(2, 6))
    path = segment_paths(folder)[0]
    path.write_bytes(path.read_bytes()[:-3])

    result = compact(folder)

    assert result.rows == 1
    assert result.losses["torn_segments"] == 1
    assert result.losses["torn_bytes"] > 3


def test_a_row_written_twice_counts_once(folder: Path) -> None:
    segment(folder, row(1, 5), row(2, 6))
    segment(folder, row(2, 6), row(3, 7))

    assert compact(folder).rows == 3


def test_an_empty_recording_is_an_empty_trace(folder: Path) -> None:
    segment(folder, Totals(counts={}))

    result = compact(folder)

    assert (result.rows, list(iter_requests(result.path))) == (0, [])


def test_the_trace_path_names_the_recording_too(folder: Path) -> None:
    segment(folder, row(1, 5))

    assert compact(folder.with_suffix(".parquet"), keep_segments=True).path == folder.with_suffix(".parquet")
    assert folder.exists()


def test_what_cannot_be_compacted_says_why_and_is_kept(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no recording here"):
        compact(tmp_path / "none")
    folder.mkdir()
    with pytest.raises(TraceError, match="nothing was recorded"):
        compact(folder)
    segment(folder, row(1, 5))
    segment(folder, row(2, 5), header=msgspec.structs.replace(HEADER, key_id="other"))
    with pytest.raises(TraceError, match="different recordings"):
        compact(folder)
    assert len(segment_paths(folder)) == 2


def test_a_trace_is_never_overwritten_and_a_running_recording_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracer.record.compactor.LOCK_WAIT_S", 0)
    segment(folder, row(1, 5))
    held = lock_folder(folder, wait_s=0)
    with pytest.raises(TraceError, match="still runs"):
        compact(folder)
    os.close(held)
    folder.with_suffix(".parquet").write_bytes(b"precious")

    with pytest.raises(TraceError, match="exists already"):
        compact(folder)
    assert folder.with_suffix(".parquet").read_bytes() == b"precious"
