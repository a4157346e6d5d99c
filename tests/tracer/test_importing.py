"""Public trace files in and out, with everything that can be wrong about them."""

import gzip
import hashlib
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer import importing
from tracer.errors import TraceError
from tracer.importing import export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, read_footer, write_trace

TRACES = Path(__file__).resolve().parents[3] / "shared/traces"
MOONCAKE = TRACES / "mooncake/conversation_trace.head.jsonl"
AZURE = TRACES / "azure2023/AzureLLMInferenceTrace_conv.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake_lines(*stamps_ms: int) -> str:
    rows = [{"timestamp": at, "input_length": 600, "output_length": 5, "hash_ids": [0, k + 1]} for k, at in enumerate(stamps_ms)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def parsed(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the public Mooncake trace is not beside this checkout")
def test_mooncake_comes_back_row_by_row_and_its_grid_and_tail_rule_are_found(tmp_path: Path) -> None:
    report = import_trace(MOONCAKE, tmp_path / "m.parquet")
    count = export_trace(tmp_path / "m.parquet", tmp_path / "back.jsonl", "mooncake").rows

    assert (report.source_format, report.rows, report.bad_rows, report.inversions) == ("mooncake", 7980, 0, 0)
    assert count == 7980
    assert parsed(tmp_path / "back.jsonl") == parsed(MOONCAKE)
    footer = read_footer(tmp_path / "m.parquet")
    assert (footer.time_grid_ns, footer.tail_rule, footer.block_tokens) == (3_000_000_000, "ceil", 512)
    assert footer.source_sha256 == hashlib.sha256(MOONCAKE.read_bytes()).hexdigest()


@pytest.mark.skipif(not AZURE.exists(), reason="the public Azure trace is not beside this checkout")
def test_azure_comes_back_byte_by_byte(tmp_path: Path) -> None:
    report = import_trace(AZURE, tmp_path / "a.parquet")
    count = export_trace(tmp_path / "a.parquet", tmp_path / "back.csv", "azure").rows

    assert (report.source_format, report.rows, count) == ("azure", 19_366, 19_366)
    assert report.footer.time_grid_ns is None
    assert (tmp_path / "back.csv").read_bytes() == AZURE.read_bytes()


def test_bad_rows_are_set_aside_with_line_and_reason(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    source.write_text(mooncake_lines(0) + "oops\n" + mooncake_lines(10))

    report = import_trace(source, tmp_path / "m.parquet")

    assert (report.rows, report.bad_rows) == (2, 1)
    assert report.footer.losses == {"bad_rows": 1}
    assert report.quarantine == tmp_path / "m.parquet.rejected.jsonl"
    assert [(row["line"], row["text"]) for row in parsed(report.quarantine)] == [(2, "oops")]  # type: ignore[index]


def test_a_later_clean_import_leaves_no_old_quarantine(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    source.write_text(mooncake_lines(0) + "oops\n")
    import_trace(source, tmp_path / "m.parquet")
    source.write_text(mooncake_lines(0))

    report = import_trace(source, tmp_path / "m.parquet")

    assert report.quarantine is None
    assert not (tmp_path / "m.parquet.rejected.jsonl").exists()


def test_strict_stops_at_the_first_bad_row_and_writes_nothing(tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_text(HEADER + "2023-11-16 18:15:46,1,2\n2023-11-16 18:15:47,1,two\n")

    with pytest.raises(TraceError) as caught:
        import_trace(source, tmp_path / "a.parquet", strict=True)

    assert str(caught.value).startswith(f"{source}:3: 'two' is no count, wanted 0 .. 2147483647; saw")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.parametrize("run_rows", [100_000, 2])
def test_rows_out_of_order_are_sorted_stably_and_exported_as_they_were(
    tmp_path: Path, run_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "SORT_RUN_ROWS", run_rows)
    source = tmp_path / "m.jsonl"
    source.write_text(mooncake_lines(50, 20, 70, 20, 10))

    report = import_trace(source, tmp_path / "m.parquet")
    export_trace(tmp_path / "m.parquet", tmp_path / "back.jsonl", "mooncake")

    rows = list(iter_requests(tmp_path / "m.parquet"))
    assert report.inversions == 3  # 20 after 50, 20 after 70, 10 after 20
    assert [row["arrival_ns"] // 10**6 for row in rows] == [0, 10, 10, 40, 60]
    assert [row["input_tail_id"] for row in rows] == [1, 2, 3, 4, 5]  # first-seen order of the sorted rows
    assert parsed(tmp_path / "back.jsonl") == parsed(source)


@st.composite
def mooncake_sources(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows in any order of time, whole or split milliseconds, ids dense or not, keys beyond the four."""
    rows = []
    for _ in range(draw(st.integers(1, 15))):
        tokens = draw(st.integers(0, 1600))
        count = -(-tokens // 512)
        row = {
            "timestamp": draw(st.integers(0, 500) | st.floats(0, 500)),
            "input_length": tokens,
            "output_length": draw(st.integers(0, 900)),
            "hash_ids": draw(st.lists(st.integers(0, 4) | st.just(10**9), min_size=count, max_size=count)),
        }
        rows.append(row | draw(st.dictionaries(st.sampled_from(["session_id", "delay"]), st.integers(0, 3))))
    return rows


@given(mooncake_sources(), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=40, deadline=None)
def test_a_mooncake_file_comes_back_row_by_row_whatever_its_order(source: list[dict[str, Any]], end: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "m.jsonl").write_bytes("".join(json.dumps(row) + end for row in source).encode())

        report = import_trace(folder / "m.jsonl", folder / "m.parquet", source_format="mooncake", strict=True)
        export_trace(folder / "m.parquet", folder / "back.jsonl", "mooncake")

        assert (report.rows, report.bad_rows) == (len(source), 0)
        stamps_ns = [round(row["timestamp"] * 10**6) for row in source]
        assert report.inversions == sum(b < a for a, b in pairwise(stamps_ns))
        assert parsed(folder / "back.jsonl") == source


@given(
    st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 9000), st.integers(0, 900), st.integers(0, 3)), min_size=1),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "+00:00"]),
    st.integers(0, 7),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_an_azure_file_comes_back_byte_by_byte_whatever_its_order(
    rows: list[tuple[int, int, int, int]], end: str, zone: str, digits: int, has_images: bool
) -> None:
    lines = [HEADER.strip() + ",NumImages" * has_images]
    for at, asked, answered, images in rows:
        second, fraction = divmod(at, 10**7)
        stamp = f"2024-05-10 00:00:{second:02d}" + f".{fraction:07d}"[: digits + 1] * (digits > 0) + zone
        lines.append(f"{stamp},{asked},{answered}" + f",{images}" * has_images)
    content = "".join(line + end for line in lines).encode()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a.csv").write_bytes(content)

        report = import_trace(folder / "a.csv", folder / "a.parquet", strict=True)
        export_trace(folder / "a.parquet", folder / "back.csv", "azure")

        assert report.rows == len(rows)
        assert (folder / "back.csv").read_bytes() == content


def test_azure_time_counts_from_the_earliest_row_and_keeps_its_wall_clock(tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_text(HEADER + "2023-11-16 00:00:05.5,1,2\n2023-11-16 00:00:03.5,3,4\n")

    report = import_trace(source, tmp_path / "a.parquet")
    export_trace(tmp_path / "a.parquet", tmp_path / "back.csv", "azure")

    assert report.footer.epoch_ns == 1_700_092_803_500_000_000
    assert [row["arrival_ns"] for row in iter_requests(tmp_path / "a.parquet")] == [0, 2 * 10**9]
    assert (tmp_path / "back.csv").read_text() == source.read_text()


def test_a_mooncake_file_in_seconds_is_read_in_seconds(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    source.write_text(mooncake_lines(*(k // 2 for k in range(60))))

    report = import_trace(source, tmp_path / "m.parquet")
    export_trace(tmp_path / "m.parquet", tmp_path / "back.jsonl", "mooncake")

    assert report.footer.notes["timestamp_unit"] == "s"
    assert [row["arrival_ns"] for row in iter_requests(tmp_path / "m.parquet")][-1] == 29 * 10**9
    assert parsed(tmp_path / "back.jsonl") == parsed(source)


def test_a_trace_without_a_wall_clock_can_be_written_for_azure(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    source.write_text(mooncake_lines(0, 1500))
    import_trace(source, tmp_path / "m.parquet")

    export_trace(tmp_path / "m.parquet", tmp_path / "m.csv", "azure")

    assert (tmp_path / "m.csv").read_text() == (HEADER + "1970-01-01 00:00:00.0000000,600,5\n1970-01-01 00:00:01.5000000,600,5\n")


@pytest.mark.parametrize(
    ("content", "source_format", "message"),
    [
        (b"", None, r"format not recognised; saw '', wanted one of azure, burstgpt, .*mooncake, csv. .*--map"),
        (b"hello\n", None, "format not recognised; saw 'hello'"),
        (b"PAR1....", None, "this is a Parquet file already"),
        (b"hello\n", "mooncake", "no usable row of format mooncake; saw JSON is malformed"),
        (b"", "azure", "no usable row of format azure; saw no row at all"),
        (b"hello\n", "burst", "no such format; saw 'burst', wanted azure or burstgpt"),
    ],
)
def test_a_file_of_no_known_format_names_the_known_ones(
    tmp_path: Path, content: bytes, source_format: str | None, message: str
) -> None:
    source = tmp_path / "file"
    source.write_bytes(content)

    with pytest.raises(TraceError, match=message):
        import_trace(source, tmp_path / "out.parquet", source_format=source_format)

    assert not (tmp_path / "out.parquet").exists()


def test_a_missing_source_an_unwritable_result_and_the_source_itself_are_user_errors(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    source.write_text(mooncake_lines(0))
    import_trace(source, tmp_path / "m.parquet")

    with pytest.raises(TraceError, match="cannot be read; saw No such file"):
        import_trace(tmp_path / "absent", tmp_path / "out.parquet", source_format="azure")
    with pytest.raises(TraceError, match="cannot write here"):
        import_trace(source, tmp_path / "no/folder/out.parquet")
    with pytest.raises(TraceError, match="cannot write here"):
        export_trace(tmp_path / "m.parquet", tmp_path / "no/folder/out.jsonl", "mooncake")
    with pytest.raises(TraceError, match="same file"):
        import_trace(source, source)
    with pytest.raises(TraceError, match="same file"):
        export_trace(tmp_path / "m.parquet", tmp_path / "m.parquet", "mooncake")
    assert source.read_text() == mooncake_lines(0)


GZIPPED: list[tuple[str, str]] = [
    ("mooncake", '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'),
    ("azure", HEADER + "2023-11-16 18:15:46.5,1,2\n"),
    ("burstgpt", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,m,1,2,3,API log\n"),
    (
        "bailian",
        '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 6.1, "input_length": 3, "output_length": 1, "type": "text", '
        '"turn": 1, "hash_ids": [0]}\n',
    ),
    (
        "weka",
        '{"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0, "type": "n", "in": 5, "out": 2, '
        '"hash_ids": []}]}',
    ),
    (
        "ragpulse",
        '{"timestamp": "8", "input_length": 3, "output_length": 1, "hash_ids": {"sys_prompt": [1], "passages_ids": []}, '
        '"session_id": "s"}\n',
    ),
    ("aiperf", '{"session_id": "a", "input_length": 3, "output_length": 1, "delay": 5}\n'),
    ("dynamo", '{"request_id": "a", "timestamp": 1.0, "input_length": 3, "output_length": 1, "hash_ids": [7]}\n'),
    (
        "dynamo_trace",
        '{"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 9, "request": {"request_id": '
        '"1", "request_received_ms": 5, "output_tokens": 2}}\n',
    ),
    ("timed_trace", '{"timestamp": 0.5, "input_length": 33, "output_length": 1, "hash_ids": [1, 2, 3]}\n'),
    ("csv", "arrival_s,input_tokens,output_tokens\n1,2,3\n"),
]


def test_every_format_stands_in_the_test_below() -> None:
    assert {name for name, _ in GZIPPED} == set(importing.FORMATS)


@pytest.mark.parametrize(("name", "text"), GZIPPED)
def test_every_format_is_known_and_read_gzipped_as_it_is_plain(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "plain").write_text(text)
    (tmp_path / "small.gz").write_bytes(gzip.compress(text.encode()))
    if name != "csv":  # asked last, after captures
        assert importing.detect(tmp_path / "plain") == importing.detect(tmp_path / "small.gz") == name

    plain = import_trace(tmp_path / "plain", tmp_path / "plain.parquet", source_format=name, strict=True)
    small = import_trace(tmp_path / "small.gz", tmp_path / "small.parquet", source_format=name, strict=True)

    assert plain.rows == 1
    assert plain.footer == small.footer
    assert list(iter_requests(tmp_path / "plain.parquet")) == list(iter_requests(tmp_path / "small.parquet"))


def test_a_cut_gzip_file_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    whole = gzip.compress(mooncake_lines(*range(0, 90_000, 3)).encode())
    (tmp_path / "m.gz").write_bytes(whole[: len(whole) // 2])

    with pytest.raises(TraceError, match=r"m.gz: compressed file is cut or damaged"):
        import_trace(tmp_path / "m.gz", tmp_path / "m.parquet")

    assert [path.name for path in tmp_path.iterdir()] == ["m.gz"]


def test_progress_of_a_gzip_file_counts_bytes_on_disk(tmp_path: Path) -> None:
    source = tmp_path / "m.gz"
    source.write_bytes(gzip.compress(mooncake_lines(*range(0, 90_000, 3)).encode()))
    told: list[tuple[int, int]] = []

    import_trace(source, tmp_path / "m.parquet", on_progress=lambda done, size: told.append((done, size)))

    size = source.stat().st_size
    assert all(0 <= done <= size for done, _ in told)
    assert told[-1] == (size, size)


def test_an_export_names_what_it_leaves_out(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "input_tokens": 600, "input_blocks": [0], "model": "m", "ttft_ns": 5},
        {"request_id": 1, "arrival_ns": 1_500_000, "input_tokens": 700, "input_blocks": [0], "model": "m"},
    ]
    write_trace(tmp_path / "t.parquet", rows, Footer())

    done = export_trace(tmp_path / "t.parquet", tmp_path / "m.jsonl", "mooncake")

    assert done.rows == 2
    assert done.losses == {"model": 2, "ttft_ns": 1, "times finer than 1 ms": 1, "sharing below 512 tokens": 2}
    assert done.usage is None


def test_another_format_than_the_sources_is_written_in_order_of_time(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    source.write_text(mooncake_lines(50, 20, 70))
    import_trace(source, tmp_path / "m.parquet")

    export_trace(tmp_path / "m.parquet", tmp_path / "x", "timed_trace")

    assert [row["timestamp"] for row in parsed(tmp_path / "x")] == [0.0, 0.03, 0.05]  # type: ignore[index]


def test_a_failed_export_leaves_no_file(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    source.write_text(mooncake_lines(0))
    import_trace(source, tmp_path / "m.parquet")

    with pytest.raises(TraceError, match="wanted azure or burstgpt or .* or inference_perf"):
        export_trace(tmp_path / "m.parquet", tmp_path / "x", "nosuch")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.jsonl", "m.parquet"]


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    source = tmp_path / "m.jsonl"
    source.write_text(mooncake_lines(*range(0, 9000, 3)))
    told: list[tuple[int, int]] = []

    import_trace(source, tmp_path / "m.parquet", on_progress=lambda done, size: told.append((done, size)))

    size = source.stat().st_size
    assert told[-1] == (size, size)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
