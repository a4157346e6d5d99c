"""Dynamo's Mooncake rows, agentic ones too, to requests and back."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.formats import BadRow, Detected, aiperf, dynamo, mooncake
from tracer.importing import detect, export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, write_trace


def lines(*rows: dict[str, Any]) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


def parse(*rows: dict[str, Any]) -> tuple[list[Request], list[BadRow], Detected]:
    bad, found = list[BadRow](), Detected()
    return list(dynamo.read(lines(*rows), found, bad.append)), bad, found


@st.composite
def sources(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Either name of a key, sessions, what waits for what, in any order of time."""
    rows: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 12))):
        tokens = draw(st.integers(0, 1600))
        count = -(-tokens // 512)
        times = st.integers(0, 500) | st.floats(0, 500)
        row: dict[str, Any] = {
            draw(st.sampled_from(["input_length", "input_tokens"])): tokens,
            draw(st.sampled_from(["output_length", "output_tokens"])): draw(st.integers(0, 90)),
            "hash_ids": draw(st.lists(st.integers(0, 4) | st.just(2**64 - 1), min_size=count, max_size=count)),
            "request_id": f"r{number}",
        }
        row |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "timestamp": times,
                    "delay_ms": times,
                    "tool_wait_ms": times,
                    "session_id": st.sampled_from("ab"),
                    "priority": st.integers(-2, 2),
                    "prefix_reset": st.booleans(),
                    "request_kind": st.sampled_from(["chat", "tool"]),
                },
            )
        )
        if number and draw(st.booleans()):
            row["wait_for"] = [f"r{draw(st.integers(0, number - 1))}"]
        rows.append(row)
    return rows


@given(sources())
@settings(max_examples=80, deadline=None)
def test_a_file_comes_back_row_by_row(source: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_bytes(b"".join(lines(*source)))

        import_trace(folder / "in.jsonl", folder / "t.parquet", source_format="dynamo", strict=True)
        export_trace(folder / "t.parquet", folder / "back.jsonl", "dynamo")

        assert [json.loads(one) for one in (folder / "back.jsonl").read_text().splitlines()] == source


def test_what_waits_comes_after_what_it_waits_for() -> None:
    rows, bad, _ = parse(
        {"request_id": "a", "timestamp": 100.0, "session_id": "s", "input_tokens": 600, "output_tokens": 5, "hash_ids": [0, 1]},
        {"request_id": "b", "wait_for": ["a"], "tool_wait_ms": 20, "delay": 5, "input_length": 512, "output_length": 1},
        {"request_id": "c", "delay": 50, "session_id": "s", "input_length": 700, "output_length": 5, "hash_ids": [0, 2]},
        {"request_id": "d", "wait_for": ["b", "c", "gone"], "timestamp": 1, "input_length": 9, "output_length": 1},
    )

    assert bad == []
    assert [row["arrival_ns"] // 10**6 for row in rows] == [100, 125, 150, 150]
    assert [row.get("wait_for") for row in rows] == [None, [0], None, [1, 2]]
    assert (rows[1]["think_ns"], rows[1]["tool_wait_ns"]) == (25 * 10**6, 20 * 10**6)
    assert (rows[2]["parent_request_id"], rows[2]["turn"], rows[2]["session_id"]) == (0, 1, 0)
    assert (rows[2]["input_blocks"], rows[2]["input_tail_id"]) == ([0], 2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_length": 600, "output_length": 5, "hash_ids": [1, 2, 3]}, "3 hash_ids for input_length 600, wanted 2"),
        ({"input_length": -1, "output_length": 5}, "input_length is -1"),
        ({"input_length": 1, "output_length": 5, "delay_ms": -3}, "delay is -3"),
        ({"input_length": 1}, "output_length"),
        ({"input_length": 1, "output_length": 5, "wait_for": "a"}, "wait_for"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(row: dict[str, Any], reason: str) -> None:
    good = {"input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    rows, bad, _ = parse(*[good] * 9, row, good)

    assert len(rows) == 10
    assert [one.line for one in bad] == [10]
    assert reason in bad[0].reason


def test_sessions_whose_turns_repeat_the_prompt_before_them_are_dynamos(tmp_path: Path) -> None:
    first = {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
    (tmp_path / "x").write_bytes(b"".join(lines(first, {**first, "delay": 9, "hash_ids": [0, 2]})))
    assert detect(tmp_path / "x") == "dynamo"
    (tmp_path / "x").write_bytes(b"".join(lines(first, {**first, "delay": 9, "hash_ids": [2, 3]})))
    assert detect(tmp_path / "x") == "aiperf"
    own = lines({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]})[0]
    assert mooncake.looks_like(own) and not dynamo.looks_like(own) and not aiperf.looks_like(own)


def test_any_trace_becomes_rows_that_wait(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "session_id": 0, "input_tokens": 40, "output_tokens": 3, "end_ns": 10**9},
        {"request_id": 1, "arrival_ns": 10**9, "input_tokens": 0},
        {"request_id": 2, "arrival_ns": 3 * 10**9, "session_id": 0, "input_tokens": 50, "output_tokens": 3, "kind": "chat"},
        {"request_id": 3, "arrival_ns": 4 * 10**9, "wait_for": [1, 2], "input_tokens": 16, "output_tokens": 3},
    ]
    write_trace(tmp_path / "t.parquet", rows, Footer())

    export_trace(tmp_path / "t.parquet", tmp_path / "out", "dynamo")
    import_trace(tmp_path / "out", tmp_path / "again.parquet")

    written = [json.loads(one) for one in (tmp_path / "out").read_text().splitlines()]
    assert [row.get("wait_for") for row in written] == [None, ["r0"], ["r2"]]
    assert [row.get("delay") for row in written] == [None, 2000.0, None]
    again = list(iter_requests(tmp_path / "again.parquet"))
    assert [(row["input_tokens"], row["wait_for"]) for row in again] == [(40, None), (50, [0]), (16, [1])]
