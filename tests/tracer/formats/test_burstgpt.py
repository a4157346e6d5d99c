"""Six and eight columns of BurstGPT to rows and back."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.formats import BadRow, Detected, burstgpt
from tracer.importing import detect, export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, read_footer

SHORT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
LONG = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def cells(path: Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_bytes().decode(), newline="")))


def there_and_back(folder: Path, text: str) -> tuple[list[Request], str]:
    """The rows, and the text that comes back."""
    (folder / "in.csv").write_bytes(text.encode())
    import_trace(folder / "in.csv", folder / "t.parquet", source_format="burstgpt", strict=True)
    export_trace(folder / "t.parquet", folder / "back.csv", "burstgpt")
    return list(iter_requests(folder / "t.parquet")), (folder / "back.csv").read_bytes().decode()


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_six_columns_come_back_as_they_were(tmp_path: Path, end: str) -> None:
    text = (SHORT + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n").replace("\n", end)

    rows, back = there_and_back(tmp_path, text)

    assert back == text
    assert detect(tmp_path / "in.csv") == "burstgpt"
    assert [row["arrival_ns"] for row in rows] == [0, 40 * 10**9]
    assert [row["error_kind"] for row in rows] == [None, "no_tokens"]
    assert [(row["model"], row["kind"]) for row in rows] == [("ChatGPT", "Conversation log"), ("GPT-4", "API log")]
    assert [(row["input_tokens"], row["output_tokens"]) for row in rows] == [(472, 18), (1087, 0)]
    assert rows[0]["source_extra"] is None and rows[0]["session_id"] is None
    assert read_footer(tmp_path / "t.parquet").time_unit_ns == 10**9


def test_eight_columns_have_sessions_and_ends(tmp_path: Path) -> None:
    text = LONG + (
        "19440110.0,conv_7,12.345,GPT-4,10,5,15,Conversation log\n"
        "19440111.25,,3,ChatGPT,20,6,26,API log\n"
        "19440112.5,conv_7,,GPT-4,30,7,99,Conversation log\n"
    )

    rows, back = there_and_back(tmp_path, text)

    assert back == text
    assert [row["arrival_ns"] for row in rows] == [0, 1_250_000_000, 2_500_000_000]
    assert [row["session_id"] for row in rows] == [0, None, 0]
    assert [row["end_ns"] for row in rows] == [12_345_000_000, 3_000_000_000, None]
    assert read_footer(tmp_path / "t.parquet").time_unit_ns == 10**6


def test_cells_with_commas_and_quotes_are_read_as_csv(tmp_path: Path) -> None:
    rows, back = there_and_back(tmp_path, SHORT + '5,"a, ""b""",1,2,3,API log\n')

    assert rows[0]["model"] == 'a, "b"'
    assert back == SHORT + '5,"a, ""b""",1,2,3,API log\n'


@st.composite
def sources(draw: st.DrawFn) -> list[list[str]]:
    """Any order of time, any way of writing seconds and counts, names with what CSV must quote, totals that are wrong."""
    is_long = draw(st.booleans())
    stamps = st.integers(0, 10**9).map(str) | st.floats(0, 4e9).map(str) | st.sampled_from(["007", "1.50", "0.1234567891234"])
    counts = st.integers(0, 2**31 - 1).map(str) | st.sampled_from(["0", "00"])
    names = st.text(st.sampled_from('ab ,"é'), max_size=4)
    long = [names, st.just("") | stamps] if is_long else []
    row = st.tuples(stamps, *long, names, counts, counts, counts, names)
    return [(LONG if is_long else SHORT).strip().split(","), *map(list, draw(st.lists(row, min_size=1, max_size=9)))]


@given(sources(), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=80, deadline=None)
def test_rows_come_back_cell_by_cell(tmp_path_factory: pytest.TempPathFactory, source: list[list[str]], end: str) -> None:
    folder = tmp_path_factory.mktemp("burst")
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerows(source)

    there_and_back(folder, text.getvalue())

    assert cells(folder / "back.csv") == source


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"5,m,1,2,3\n", "5 columns, wanted 6"),
        (b"soon,m,1,2,3,API log\n", "Timestamp is 'soon'"),
        (b"-5,m,1,2,3,API log\n", "Timestamp is '-5'"),
        (b"nan,m,1,2,3,API log\n", "Timestamp is 'nan'"),
        (b"1e99,m,1,2,3,API log\n", "Timestamp is '1e99'"),
        (b"5,m,1.5,2,3,API log\n", "Request tokens is '1.5'"),
        (b"5,m,1,2147483648,3,API log\n", "Response tokens is '2147483648'"),
        (b"5,m,1,2,,API log\n", "Total tokens is ''"),
        (b'5,"m,1,2,3,API log\n', "unexpected end of data"),
        (b"5,m\r,1,2,3,API log\n", "a line end inside the row"),
        (b"5,\xff,1,2,3,API log\n", "can't decode"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(text: bytes, reason: str) -> None:
    good, bad = b"5,m,1,2,3,API log\n", list[BadRow]()

    rows = list(burstgpt.read([SHORT.encode(), good, text, b"\n", good], Detected(), bad.append))

    assert len(rows) == 2
    assert [one.line for one in bad] == [3]
    assert reason in bad[0].reason


def test_a_file_without_a_header_is_told() -> None:
    bad: list[BadRow] = []

    list(burstgpt.read([b"5,m,1,2,3,API log\n"], Detected(), bad.append))

    assert bad[0].reason.startswith("no header, wanted Timestamp,Session ID")
    assert not burstgpt.looks_like(b"TIMESTAMP,ContextTokens,GeneratedTokens\n")


def test_a_trace_of_another_source_has_eight_columns() -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "session_id": 4, "model": "a\nb", "input_tokens": 7, "output_tokens": 2, "end_ns": 5},
        {"request_id": 1, "arrival_ns": 1_500_000_000, "input_tokens": 9, "output_tokens": 3, "error_kind": "stream_error"},
    ]

    written = b"".join(burstgpt.write(rows, Footer())).decode()

    assert written == LONG + "0.0,4,5e-09,a b,7,2,9,Conversation log\n1.5,,,,9,0,9,API log\n"
