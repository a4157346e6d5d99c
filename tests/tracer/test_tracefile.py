"""Trace files: what goes in comes out, in any of the readers that users have."""

import typing
from pathlib import Path

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer import schema, tracefile
from tracer.errors import TraceError
from tracer.schema import Footer, HashScheme, Request

ids = st.lists(st.integers(0, 2**31 - 1), max_size=40)
rows = st.lists(
    st.fixed_dictionaries(
        {"arrival_ns": st.integers(0, 2**62)},
        optional={
            "input_blocks": st.none() | ids,
            "output_blocks": ids,
            "input_tokens": st.none() | st.integers(0, 2**31 - 1),
            "model": st.none() | st.text(max_size=20),
            "stream": st.booleans(),
            "temperature": st.floats(0, 2),
            "wait_for": st.lists(st.integers(0, 2**62), max_size=3),
            "segments": st.lists(
                st.fixed_dictionaries(
                    {
                        "role": st.just("user"),
                        "kind": st.just("user"),
                        "tokens": st.integers(0, 9),
                        "content_id": st.just(3),
                    }
                ),
                max_size=2,
            ),
            "source_extra": st.text(max_size=30),
        },
    ),
    max_size=30,
).map(lambda rows: [{"request_id": i, **row} for i, row in enumerate(sorted(rows, key=lambda r: r["arrival_ns"]))])


@given(rows)
@settings(max_examples=30, deadline=None)
def test_rows_come_back_as_written(tmp_path_factory: pytest.TempPathFactory, written: list[Request]) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.parquet"
    full = [{name: row.get(name) for name in schema.SCHEMA.names} for row in written]

    tracefile.write_trace(path, written, Footer())

    assert list(tracefile.iter_requests(path, batch_rows=7)) == full
    assert tracefile.scan(path).collect().height == tracefile.count_requests(path) == len(written)


def test_schema_table_and_row_type_name_the_same_columns() -> None:
    assert schema.SCHEMA.names == list(typing.get_type_hints(Request))


def test_footer_survives() -> None:
    footer = Footer(time_grid_ns=3, block_tokens=512, tail_rule="ceil", hashes=HashScheme(key_id="k"), losses={"torn": 2})

    assert Footer.from_json(footer.to_json()) == footer


def test_polars_and_duckdb_read_the_file_directly(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    tracefile.write_trace(path, [{"request_id": 0, "arrival_ns": 5, "input_blocks": [1, 2]}], Footer())

    assert pl.read_parquet(path)["input_blocks"].to_list() == [[1, 2]]
    assert duckdb.sql(f"select arrival_ns, input_blocks, ttft_ns from '{path}'").fetchall() == [(5, [1, 2], None)]


def test_unsorted_rows_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"

    with pytest.raises(TraceError, match=r"sorted.*saw 1, wanted >= 2"):
        tracefile.write_trace(path, [{"request_id": 0, "arrival_ns": 2}, {"request_id": 1, "arrival_ns": 1}], Footer())

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "not a chatreel trace"), (b'{"timestamp": 0}', "chatreel import"), (None, "no such file")],
)
def test_a_wrong_file_is_named_with_the_next_step(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(TraceError, match=message):
        tracefile.read_footer(path)


def test_a_foreign_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(path)

    with pytest.raises(TraceError, match="not a chatreel trace"):
        tracefile.read_footer(path)
