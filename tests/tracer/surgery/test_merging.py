"""Two traces in one: nothing lost, nothing shared that was not."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.reuse import hit_curve, touches_as_in_source
from tracer.errors import TraceError
from tracer.formats.ids import ChainedIds
from tracer.schema import Footer, Request
from tracer.surgery.merging import merge_traces
from tracer.tracefile import iter_requests, read_footer, read_table, write_trace

words = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=10)


def save(path: Path, lists: list[list[int]], gap_ns: int = 10, footer: Footer | None = None) -> Path:
    chained = ChainedIds()
    rows: list[Request] = []
    for number, ids in enumerate(lists):
        row: Request = {"request_id": number, "arrival_ns": number * gap_ns, "session_id": number, "input_tokens": 16 * len(ids)}
        row |= {"input_blocks": chained.path(ids), "parent_request_id": number - 1 if number else None}
        row["segments"] = [{"role": "user", "kind": "user", "tokens": 1, "content_id": number}]
        rows.append(row)
    write_trace(path, rows, footer or Footer(losses={"bad_rows": 1}))
    return path


def hits(path: Path) -> int:
    return hit_curve(touches_as_in_source(read_table(path), read_footer(path))).hits_infinite


@given(words, words, st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_every_row_is_there_and_shares_only_what_it_shared(
    tmp_path_factory: pytest.TempPathFactory, a: list[list[int]], b: list[list[int]], gap_ns: int
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    paths = [save(folder / "a.parquet", a), save(folder / "b.parquet", b, gap_ns)]

    count = merge_traces(paths, folder / "both.parquet")

    rows = list(iter_requests(folder / "both.parquet"))
    assert count == len(rows) == len(a) + len(b)
    assert [row["request_id"] for row in rows] == list(range(count))
    assert sorted(row["arrival_ns"] for row in rows) == [row["arrival_ns"] for row in rows]
    assert hits(folder / "both.parquet") == hits(paths[0]) + hits(paths[1])
    assert len({row["session_id"] for row in rows}) == count
    assert len({part["content_id"] for row in rows for part in row["segments"] or []}) == count
    for row in rows:
        if (parent := row["parent_request_id"]) is not None:
            assert rows[parent]["session_id"] == (row["session_id"] or 0) - 1
    assert read_footer(folder / "both.parquet").losses == {"bad_rows": 2}


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    a = save(tmp_path / "a.parquet", [[0]])
    b = save(tmp_path / "b.parquet", [[0]], footer=Footer(block_tokens=512))

    with pytest.raises(TraceError, match="16 tokens in .*a.parquet, 512 tokens in .*b.parquet"):
        merge_traces([a, b], tmp_path / "c.parquet")
    with pytest.raises(TraceError, match="nothing to merge"):
        merge_traces([a], tmp_path / "c.parquet")
    with pytest.raises(TraceError, match="same file"):
        merge_traces([a, a], a)


def test_slices_that_overlap_are_refused(tmp_path: Path) -> None:
    from tracer.surgery.slicing import slice_trace

    a = save(tmp_path / "a.parquet", [[0], [1], [2]])
    slice_trace(a, tmp_path / "s.parquet", to_ns=20)
    slice_trace(a, tmp_path / "t.parquet", from_ns=10)

    with pytest.raises(TraceError, match="slices overlap; saw request 1 of the whole twice"):
        merge_traces([tmp_path / "s.parquet", tmp_path / "t.parquet"], tmp_path / "c.parquet")
