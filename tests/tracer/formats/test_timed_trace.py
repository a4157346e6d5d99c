"""vLLM's timed traces to rows and back, and any trace as one."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.formats import BadRow, Detected, mooncake, timed_trace
from tracer.importing import detect, export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, write_trace


def line(timestamp: Any = 0.0, tokens: Any = 40, output: Any = 5, ids: Any = (0, 1, 2), **more: Any) -> bytes:
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}
    return json.dumps({**row, **more}).encode() + b"\n"


def parse(lines: list[bytes]) -> tuple[list[Request], list[BadRow], Detected]:
    bad, found = list[BadRow](), Detected()
    return list(timed_trace.read(lines, found, bad.append)), bad, found


@st.composite
def sources(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any order of time, any block size, ids dense or not, with or without one for a partial block, none at all, extra keys."""
    size = draw(st.sampled_from([16, 64, 512]))
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        tokens = draw(st.integers(0, 4 * size))
        full, rest = divmod(tokens, size)
        count = full + (draw(st.booleans()) if rest else 0)
        row = {
            "timestamp": draw(st.integers(0, 500) | st.floats(0, 500)),
            "input_length": tokens,
            "output_length": draw(st.integers(0, 900)),
            "hash_ids": draw(st.lists(st.integers(0, 4) | st.just(10**9), min_size=count, max_size=count)),
        }
        if draw(st.integers(0, 5)) == 0:
            del row["hash_ids"]
        rows.append(row | draw(st.dictionaries(st.sampled_from(["priority", "user"]), st.integers(0, 3))))
    full_rows = [{"timestamp": 0, "input_length": k * size, "output_length": 1, "hash_ids": [*range(k)]} for k in range(2, 14)]
    return full_rows + rows  # whole blocks of many lengths: only one size explains them


@given(sources())
@settings(max_examples=60, deadline=None)
def test_a_file_comes_back_row_by_row(source: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in source))

        import_trace(folder / "in.jsonl", folder / "t.parquet", source_format="timed_trace", strict=True)
        export_trace(folder / "t.parquet", folder / "back.jsonl", "timed_trace")

        assert [json.loads(one) for one in (folder / "back.jsonl").read_text().splitlines()] == source


def test_block_size_and_seconds_are_found() -> None:
    rows, bad, found = parse([line(0.0), line(1.5, 64, 3, [0, 1, 3, 4])])

    assert bad == []
    assert (found.block_tokens, found.notes["timestamp_unit"]) == (16, "s")
    assert [(row["arrival_ns"], row["input_blocks"], row.get("input_tail_id")) for row in rows] == [
        (0, [0, 1], 2),
        (1_500_000_000, [0, 1, 3, 4], None),
    ]


def test_requests_every_minute_and_a_half_are_taken_for_milliseconds() -> None:
    rows, _, found = parse([line(k * 90) for k in range(10)])

    assert found.notes["timestamp_unit"] == "ms"
    assert rows[1]["arrival_ns"] == 90 * 10**6
    assert "--timed-trace-sec-multiplier 0.001" in timed_trace.usage(
        "x", Footer(source_format="timed_trace", notes=found.notes), 10
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "truncated"),
        (line(tokens=-1, ids=[]), "input_length is -1"),
        (line(timestamp=-1), "timestamp is -1"),
        (line(timestamp="0"), "timestamp"),
        (line(ids=[0, 1, 2, 3]), "4 hash_ids for input_length 40, wanted 3"),
        (b'{"timestamp": 1, "input_length": 4}\n', "output_length"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(text: bytes, reason: str) -> None:
    rows, bad, _ = parse([line(), line(), text, line(1)])

    assert len(rows) == 3
    assert [one.line for one in bad] == [3]
    assert reason in bad[0].reason


def test_blocks_of_512_tokens_are_mooncakes_and_others_are_not(tmp_path: Path) -> None:
    mooncakes = b"".join(line(k, 600, 5, [0, k + 1]) for k in range(5)) + line(5, 600, 5, [0, 1, 2])
    assert mooncake.looks_like(mooncakes) and not timed_trace.looks_like(mooncakes)

    (tmp_path / "x.jsonl").write_bytes(line() + line(1, 64, 3, [0, 1, 3, 4]))
    assert detect(tmp_path / "x.jsonl") == "timed_trace"
    (tmp_path / "x.jsonl").write_bytes(b'{"timestamp": 1, "input_length": 4, "output_length": 4}\n')
    assert detect(tmp_path / "x.jsonl") == "timed_trace"


def test_any_trace_becomes_seconds_and_an_id_for_every_block(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "input_tokens": 40, "output_tokens": 3, "input_blocks": [0, 1], "model": "m"},
        {"request_id": 1, "arrival_ns": 1_250_000_000, "input_tokens": 40, "input_blocks": [0, 2], "input_tail_id": 3},
        {"request_id": 2, "arrival_ns": 2_000_000_000, "output_tokens": 9},
        {"request_id": 3, "arrival_ns": 3_000_000_000, "input_tokens": 32, "output_tokens": 1},
    ]
    write_trace(tmp_path / "t.parquet", rows, Footer())

    done = export_trace(tmp_path / "t.parquet", tmp_path / "out.jsonl", "timed_trace")

    assert [json.loads(one) for one in (tmp_path / "out.jsonl").read_text().splitlines()] == [
        {"timestamp": 0.0, "input_length": 40, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 1.25, "input_length": 40, "output_length": 1, "hash_ids": [0, 3, 4]},
        {"timestamp": 3.0, "input_length": 32, "output_length": 1, "hash_ids": [5, 6]},
    ]
    assert done.rows == 3
    assert done.losses == {
        "model": 1,
        "requests without output: they ask for 1 token": 1,
        "requests without a known prompt length: left out": 1,
        "requests without known blocks: they share nothing": 1,
    }
    assert done.usage is not None and "--timed-trace-chunk-hash-size 16 " in done.usage and "--num-prompts 3 " in done.usage


def test_what_was_written_is_read_again_as_the_same_requests(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": k, "arrival_ns": k * 10**9, "input_tokens": 48, "output_tokens": 3, "input_blocks": [0, 1, k + 2]}
        for k in range(5)
    ]
    write_trace(tmp_path / "t.parquet", rows, Footer())

    export_trace(tmp_path / "t.parquet", tmp_path / "out.jsonl", "timed_trace")
    import_trace(tmp_path / "out.jsonl", tmp_path / "again.parquet")

    again = list(iter_requests(tmp_path / "again.parquet"))
    assert [{key: row[key] for key in rows[0]} for row in again] == rows  # type: ignore[literal-required]
