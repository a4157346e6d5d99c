"""CSV of anybody's own: columns by name, units by name or by size."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.errors import TraceError
from tracer.formats import BadRow, Detected, named_csv
from tracer.importing import export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, read_footer, write_trace


def parse(text: str, columns: str | None = None) -> tuple[list[Request], list[BadRow], Detected]:
    bad, found = list[BadRow](), Detected(columns=named_csv.parse_map(columns) if columns else {})
    return list(named_csv.read(text.encode().splitlines(keepends=True), found, bad.append)), bad, found


def test_columns_are_named_by_the_user() -> None:
    text = "note;ts;p;c;who;conv;llm\nthe secret;1.5;374;44;u1;a;m\nx;2.25;20;3;u2;a;\n"

    rows, bad, found = parse(text, "arrival=ts,input=p,output=c,client=who,session=conv,model=llm")

    assert bad == []
    assert rows == [
        {
            "arrival_ns": 1_500_000_000,
            "input_tokens": 374,
            "input_tokens_count_source": "import",
            "output_tokens": 44,
            "output_tokens_count_source": "import",
            "client_id": 0,
            "session_id": 0,
            "model": "m",
        },
        {
            "arrival_ns": 2_250_000_000,
            "input_tokens": 20,
            "input_tokens_count_source": "import",
            "output_tokens": 3,
            "output_tokens_count_source": "import",
            "client_id": 1,
            "session_id": 0,
        },
    ]
    assert found.time_unit_ns == 10**6
    assert found.notes["read_as"].endswith("; times in s; 1 other columns left out")
    assert "secret" not in json.dumps(found.notes)


@pytest.mark.parametrize(
    ("name", "stamps", "gap_ns", "epoch_ns", "said"),
    [
        ("ts", ["0", "1.5"], 1_500_000_000, None, "times in s"),
        ("ts", ["0", "90"], 90_000_000, None, "times in ms"),
        ("arrival_ms", ["0", "1.5"], 1_500_000, None, "times in ms"),
        ("ts_us", ["0", "90"], 90_000, None, "times in us"),
        ("ts", ["1700000000", "1700000001.25"], 1_250_000_000, 1_700_000_000 * 10**9, "times in s since 1970"),
        ("ts", ["1700000000000", "1700000001250"], 1_250_000_000, 1_700_000_000 * 10**9, "times in ms since 1970"),
        ("ts", ["1700000000000000", "1700000001250000"], 1_250_000_000, 1_700_000_000 * 10**9, "times in us since 1970"),
        ("ts", ["1700000000000000000", "1700000001250000001"], 1_250_000_001, 1_700_000_000 * 10**9, "times in ns since 1970"),
        ("ts", ["2023-11-14T22:13:20Z", "2023-11-14T22:13:21.25Z"], 1_250_000_000, 1_700_000_000 * 10**9, "ISO stamps"),
        ("ts", ["2023-11-14 22:13:20", "2023-11-15 00:13:21+02:00"], 10**9, 1_700_000_000 * 10**9, "ISO stamps"),
    ],
)
def test_units_are_found(name: str, stamps: list[str], gap_ns: int, epoch_ns: int | None, said: str) -> None:
    text = f"{name},input_tokens,output_tokens\n" + "".join(f"{stamp},1,2\n" for stamp in stamps)

    rows, bad, found = parse(text, f"arrival={name},input=input_tokens,output=output_tokens")

    assert bad == []
    assert rows[1]["arrival_ns"] - rows[0]["arrival_ns"] == gap_ns
    assert found.epoch_ns == epoch_ns
    assert said in found.notes["read_as"]


def test_durations_have_the_unit_of_their_name() -> None:
    text = "timestamp,prompt_tokens,completion_tokens,ttft_ms,duration\n5,1,2,12.5,3\n6,1,2,,\n"

    rows, _, _ = parse(text)

    assert [(row.get("ttft_ns"), row.get("end_ns")) for row in rows] == [(12_500_000, 3_000_000_000), (None, None)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("soon,1,2", "arrival is 'soon'"),
        ("-1,1,2", "arrival is '-1'"),
        ("9999999999999,1,2", "arrival is '9999999999999', too large"),
        ("1,1.5,2", "input is '1.5'"),
        ("1,1,2147483648", "output is '2147483648'"),
        ("1,1", "2 columns, wanted 3"),
        ('"1,1,2', "unexpected end of data"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(line: str, reason: str) -> None:
    rows, bad, _ = parse(f"ts,isl,osl\n0,1,2\n{line}\n\n2,3.0,4\n")

    assert [row.get("input_tokens") for row in rows] == [1, 3]
    assert [one.line for one in bad] == [3]
    assert reason in bad[0].reason
    assert bad[0].text == ""  # a log of one's own may hold prompts, and this goes to disk


def test_a_map_that_does_not_fit_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("when,p,c\n1,2,3\n")
    columns = {"arrival": "ts", "input": "p"}

    with pytest.raises(TraceError, match=r"x.csv:1: a column is not there or not named; saw when, p, c, wanted ts, output"):
        import_trace(tmp_path / "x.csv", tmp_path / "t.parquet", source_format="csv", columns=columns)
    with pytest.raises(TraceError, match="--map is not understood; saw 'arrival=ts,prompt=p'"):
        named_csv.parse_map("arrival=ts,prompt=p")
    with pytest.raises(TraceError, match="at most once"):
        named_csv.parse_map("arrival=ts,arrival=p")


def test_only_usual_names_for_time_and_both_lengths_look_like_a_trace() -> None:
    assert named_csv.looks_like(b"Timestamp;Prompt_Tokens;completion_tokens\n")
    assert not named_csv.looks_like(b"timestamp,prompt_tokens,request_json\n")
    assert not named_csv.looks_like(b"hello\n")


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[Request], int | None]:
    counts = st.integers(0, 2**31 - 1)
    optional: dict[str, Any] = {
        "model": st.text(st.sampled_from('ab,"é'), min_size=1, max_size=4),
        "ttft_ns": st.integers(0, 10**12),
        "end_ns": st.integers(0, 10**12),
        "cached_tokens": counts,
    }
    gaps = draw(st.lists(st.integers(0, 10**10), min_size=1, max_size=9))
    rows: list[Request] = []
    for number in range(len(gaps)):
        row: Request = {"request_id": number, "arrival_ns": sum(gaps[1 : number + 1])}
        row["input_tokens"], row["output_tokens"], row["session_id"] = draw(counts), draw(counts), number
        rows.append(row | draw(st.fixed_dictionaries({}, optional=optional)))
    return rows, draw(st.none() | st.integers(10**18, 2 * 10**18))


@given(traces())
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read_again_as_the_same_requests(trace: tuple[list[Request], int | None]) -> None:
    rows, epoch_ns = trace
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_trace(folder / "t.parquet", rows, Footer(epoch_ns=epoch_ns))

        export_trace(folder / "t.parquet", folder / "x.csv", "csv")
        import_trace(folder / "x.csv", folder / "again.parquet", source_format="csv", strict=True)

        again = list(iter_requests(folder / "again.parquet"))
        wanted = [{key: row.get(key) for key in (*named_csv.HOLDS, "arrival_ns")} for row in rows]
        assert [{key: row[key] for key in wanted[0]} for row in again] == wanted  # type: ignore[literal-required]
        assert read_footer(folder / "again.parquet").epoch_ns == epoch_ns
