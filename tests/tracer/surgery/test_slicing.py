"""Slices: what is in them, what they keep, and that they make the whole again."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.errors import TraceError
from tracer.schema import Footer, Request
from tracer.surgery.merging import merge_traces
from tracer.surgery.slicing import head, slice_trace
from tracer.tracefile import iter_requests, read_footer, write_trace


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    rows: list[Request] = []
    at = 0
    for number in range(draw(st.integers(1, 20))):
        at += draw(st.integers(0, 3))
        row: Request = {"request_id": number, "arrival_ns": at, "session_id": draw(st.integers(0, 3)), "input_tokens": 32}
        row["input_blocks"] = [0, draw(st.integers(1, 9))]
        if number and draw(st.booleans()):
            row["parent_request_id"] = draw(st.integers(0, number - 1))
        if number and draw(st.booleans()):
            row["wait_for"] = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=3, unique=True))
        if draw(st.booleans()):
            row["source_extra"] = '{"delay":3}'
        rows.append(row)
    return rows


def save(folder: Path, rows: list[Request], footer: Footer | None = None) -> Path:
    write_trace(folder / "whole.parquet", rows, footer or Footer(epoch_ns=1000))
    return folder / "whole.parquet"


@given(traces(), st.lists(st.integers(0, 40), max_size=3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_slices_put_together_again_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Request], cuts: list[int], backwards: bool
) -> None:
    folder = tmp_path_factory.mktemp("slices")
    whole = save(folder, rows)
    bounds = [0, *sorted(cuts), 1000]
    parts = []
    for number, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if any(start <= row["arrival_ns"] < end for row in rows):
            parts.append(folder / f"{number}.parquet")
            slice_trace(whole, parts[-1], from_ns=start, to_ns=end)
    if len(parts) < 2:
        return

    merge_traces(parts[::-1] if backwards else parts, folder / "again.parquet")

    assert list(iter_requests(folder / "again.parquet")) == list(iter_requests(whole))
    assert read_footer(folder / "again.parquet") == read_footer(whole)


def test_a_slice_counts_time_and_requests_anew_and_names_only_requests_that_it_holds(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "input_blocks": [0, 1]},
        {"request_id": 1, "arrival_ns": 50, "input_blocks": [0, 2], "parent_request_id": 0, "wait_for": [0]},
        {"request_id": 2, "arrival_ns": 70, "input_blocks": [0, 3], "parent_request_id": 1, "wait_for": [0, 1]},
        {"request_id": 3, "arrival_ns": 90},
    ]

    count = slice_trace(save(tmp_path, rows), tmp_path / "s.parquet", from_ns=40, to_ns=90)

    first, second = iter_requests(tmp_path / "s.parquet")
    assert count == 2 and read_footer(tmp_path / "s.parquet").epoch_ns == 1040
    assert (first["request_id"], first["arrival_ns"], first["parent_request_id"], first["wait_for"]) == (0, 10, None, [])
    assert (second["request_id"], second["arrival_ns"], second["parent_request_id"], second["wait_for"]) == (1, 30, 0, [0])
    assert second["input_blocks"] == [0, 3]  # ids of the whole


def test_a_slice_of_a_slice_knows_its_place_in_the_whole(tmp_path: Path) -> None:
    rows: list[Request] = [{"request_id": k, "arrival_ns": 10 * k, "parent_request_id": k - 1 if k else None} for k in range(6)]
    whole = save(tmp_path, rows)
    slice_trace(whole, tmp_path / "late.parquet", from_ns=20)
    slice_trace(tmp_path / "late.parquet", tmp_path / "later.parquet", from_ns=20)
    slice_trace(tmp_path / "late.parquet", tmp_path / "middle.parquet", to_ns=20)
    head(whole, tmp_path / "head.parquet", 2)

    parts = [tmp_path / f"{name}.parquet" for name in ("head", "middle", "later")]
    merge_traces(parts, tmp_path / "again.parquet")

    assert list(iter_requests(tmp_path / "again.parquet")) == list(iter_requests(whole))


def test_some_sessions_only(tmp_path: Path) -> None:
    rows: list[Request] = [{"request_id": k, "arrival_ns": k, "session_id": k % 2} for k in range(6)]

    slice_trace(save(tmp_path, rows), tmp_path / "s.parquet", keep=lambda row: row.get("session_id") == 1)

    assert [row["arrival_ns"] for row in iter_requests(tmp_path / "s.parquet")] == [1, 3, 5]


def test_an_empty_slice_and_a_slice_onto_its_source_are_refused(tmp_path: Path) -> None:
    whole = save(tmp_path, [{"request_id": 0, "arrival_ns": 0}])

    with pytest.raises(TraceError, match="no request is left"):
        slice_trace(whole, tmp_path / "s.parquet", from_ns=5)
    with pytest.raises(TraceError, match="same file"):
        slice_trace(whole, whole)
    with pytest.raises(TraceError, match="no requests asked for"):
        head(whole, tmp_path / "s.parquet", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["whole.parquet"]
