"""Two traces in one: nothing lost, nothing shared that was not."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.reuse import hit_curve, touches_as_in_source
from tracer.errors import TraceError
from tracer.formats.ids import ChainedIds
from tracer.schema import Footer, HashScheme, Request
from tracer.surgery.merging import merge_traces
from tracer.surgery.slicing import slice_trace
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
    a = save(tmp_path / "a.parquet", [[0], [1], [2]])
    slice_trace(a, tmp_path / "s.parquet", to_ns=20)
    slice_trace(a, tmp_path / "t.parquet", from_ns=10)

    with pytest.raises(TraceError, match="slices overlap; saw request 1 of the whole twice"):
        merge_traces([tmp_path / "s.parquet", tmp_path / "t.parquet"], tmp_path / "c.parquet")


def test_slices_with_gaps_are_one_again_and_never_twice_the_same_request(tmp_path: Path) -> None:
    footer = Footer(epoch_ns=5, tail_rule="floor")
    whole = save(tmp_path / "a.parquet", [[0], [0, 1], [0, 1, 2], [1], [0, 2]], footer=footer)
    odd, even, late = (tmp_path / f"{name}.parquet" for name in ("odd", "even", "late"))
    slice_trace(whole, odd, keep=lambda row: row["request_id"] % 2 == 1)
    slice_trace(whole, even, keep=lambda row: row["request_id"] % 2 == 0)
    slice_trace(even, late, from_ns=15)

    merge_traces([even, odd], tmp_path / "again.parquet")
    merge_traces([late, odd], tmp_path / "most.parquet")

    assert list(iter_requests(tmp_path / "again.parquet")) == list(iter_requests(whole))
    assert read_footer(tmp_path / "again.parquet") == read_footer(whole)
    most = list(iter_requests(tmp_path / "most.parquet"))
    assert [(row["arrival_ns"], row["parent_request_id"]) for row in most] == [(10, None), (20, 0), (30, 1), (40, 2)]
    with pytest.raises(TraceError, match="slices overlap; saw request 2 of the whole twice"):
        merge_traces([even, late], tmp_path / "twice.parquet")
    with pytest.raises(TraceError, match="slices overlap"):
        merge_traces([tmp_path / "most.parquet", odd], tmp_path / "twice.parquet")
    merge_traces([tmp_path / "most.parquet", _first(whole, tmp_path / "first.parquet")], tmp_path / "all.parquet")
    assert list(iter_requests(tmp_path / "all.parquet")) == list(iter_requests(whole))


def _first(whole: Path, path: Path) -> Path:
    slice_trace(whole, path, to_ns=5)
    return path


def test_what_both_say_of_their_blocks_is_kept(tmp_path: Path) -> None:
    footers = [Footer(tail_rule="ceil", hashes=HashScheme(tokenizer=name, template="t", scope="local")) for name in ("a", "b")]
    paths = [save(tmp_path / f"{k}.parquet", [[0]], footer=footer) for k, footer in enumerate(footers)]

    merge_traces(paths, tmp_path / "both.parquet")

    both = read_footer(tmp_path / "both.parquet")
    assert both.tail_rule == "ceil" and both.hashes == HashScheme(tokenizer=None, template="t", scope="local")
