"""Linked chats to rows and back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.errors import TraceError
from tracer.formats import BadRow, Detected, bailian
from tracer.importing import detect, export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.surgery.slicing import slice_trace
from tracer.tracefile import iter_requests


def chat(number: int = 0, parent: int = -1, at: Any = 0.0, ids: Any = (0, 1), **more: Any) -> dict[str, Any]:
    row = {"chat_id": number, "parent_chat_id": parent, "timestamp": at, "input_length": 20, "output_length": 5}
    return {**row, "type": "text", "turn": 1, "hash_ids": list(ids), **more}


def parse(*rows: dict[str, Any]) -> tuple[list[Request], Detected]:
    found, bad = Detected(), list[BadRow]()
    read = list(bailian.read([json.dumps(one).encode() for one in rows], found, bad.append))
    assert bad == []
    return read, found


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def parsed(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_links_become_parents_and_sessions() -> None:
    first, other = chat(7, at=61.114), chat(9, at=62.0, type="image")
    second, branch = chat(12, 7, at=70.5, turn=2), chat(13, 7, at=71.0, turn=2)

    rows, found = parse(first, other, second, branch)

    assert [row["arrival_ns"] for row in rows] == [61_114_000_000, 62_000_000_000, 70_500_000_000, 71_000_000_000]
    assert [row.get("parent_request_id") for row in rows] == [None, None, 0, 0]
    assert [row["session_id"] for row in rows] == [0, 1, 0, 0]
    assert [row["turn"] for row in rows] == [0, 0, 1, 1]
    assert [row["kind"] for row in rows] == ["text", "image", "text", "text"]
    assert (found.block_tokens, found.tail_rule, found.time_unit_ns) == (16, "ceil", 1_000_000)
    assert (rows[0]["input_blocks"], rows[0]["input_tail_id"]) == ([0], 1)


def test_chats_below_a_parent_that_is_missing_or_late_are_one_session() -> None:
    rows, _ = parse(chat(5, 3), chat(6, 3), chat(8, 5), chat(3, 2), chat(4))

    assert [row["session_id"] for row in rows] == [0, 0, 0, 0, 1]
    assert [row.get("parent_request_id") for row in rows] == [None, None, 0, None, None]


def test_without_ids_for_partial_blocks_the_rule_is_floor() -> None:
    rows, found = parse(chat(ids=[0]))

    assert found.tail_rule == "floor" and "input_tail_id" not in rows[0]


def test_parents_are_renumbered_where_rows_were_not_in_order_of_time(tmp_path: Path) -> None:
    source = [chat(1, at=9.0), chat(2, 1, at=12.5, turn=2), chat(3, at=4.0, ids=[8, 9])]

    report = import_trace(write_lines(tmp_path / "in", source), tmp_path / "t.parquet", strict=True)
    export_trace(tmp_path / "t.parquet", tmp_path / "back", "bailian")

    rows = list(iter_requests(tmp_path / "t.parquet"))
    assert (detect(tmp_path / "in"), report.inversions) == ("bailian", 1)
    assert [row["parent_request_id"] for row in rows] == [None, None, 1]
    assert [row["input_blocks"] for row in rows] == [[0], [2], [2]]
    assert parsed(tmp_path / "back") == source


def test_a_slice_is_written_with_ids_of_one_kind(tmp_path: Path) -> None:
    source = [chat(1), chat(2, at=1.0, ids=[7, 8]), chat(3, at=2.0, ids=[0, 9])]
    import_trace(write_lines(tmp_path / "in", source), tmp_path / "t.parquet")

    slice_trace(tmp_path / "t.parquet", tmp_path / "s.parquet", from_ns=10**9)
    export_trace(tmp_path / "s.parquet", tmp_path / "back", "bailian")

    assert [(row["chat_id"], row["hash_ids"]) for row in parsed(tmp_path / "back")] == [(2, [0, 1]), (3, [2, 3])]


@st.composite
def sources(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any order of time, links to chats that are there, come later or never; ids dense or not, chained or not."""
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        tokens = draw(st.integers(0, 70))
        full, rest = divmod(tokens, 16)
        count = full + (draw(st.booleans()) if rest else 0)
        ids = draw(st.lists(st.integers(0, 5) | st.integers(-9, 2**63), min_size=count, max_size=count))
        stamp = st.integers(0, 10**7).map(lambda ms: ms / 1000) | st.floats(0, 4e9) | st.integers(0, 99)
        row = chat(draw(st.integers(0, 12)), draw(st.integers(-1, 12)), draw(stamp), ids, input_length=tokens)
        row |= {"turn": draw(st.integers(1, 9) | st.integers(-2, 2**40)), "type": draw(st.text(max_size=3))}
        rows.append(row | draw(st.dictionaries(st.sampled_from(["more", "place"]), st.none() | st.integers(0, 3))))
    return rows


@given(sources())
@settings(max_examples=80, deadline=None)
def test_rows_come_back_value_by_value(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("bailian")

    import_trace(write_lines(folder / "in", rows), folder / "t.parquet", strict=True)
    export_trace(folder / "t.parquet", folder / "back", "bailian")

    assert parsed(folder / "back") == rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hash_ids": [0]}, None),
        ({"hash_ids": [0, 1, 2]}, "3 hash_ids for input_length 20, wanted 2 (one per 16 tokens)"),
        ({"hash_ids": [0, "x"]}, "hash_ids"),
        ({"timestamp": -1.5}, "timestamp is -1.5"),
        ({"timestamp": "1.5"}, "timestamp"),
        ({"output_length": 2**31}, "output_length is 2147483648"),
        ({"chat_id": None}, "chat_id"),
        ({"type": None}, "type"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(change: dict[str, Any], reason: str | None) -> None:
    bad: list[BadRow] = []
    lines = [json.dumps(one).encode() + b"\n" for one in (chat(), {**chat(1), **change}, chat(2))]

    rows = list(bailian.read([lines[0], b"\n", *lines[1:]], Detected(), bad.append))

    assert len(rows) == (3 if reason is None else 2)
    assert [one.line for one in bad] == ([] if reason is None else [3])
    assert reason is None or reason in bad[0].reason


def test_a_trace_of_another_source_gets_links_from_its_sessions() -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "session_id": 4, "input_tokens": 33, "input_blocks": [5, 6]},
        {"request_id": 1, "arrival_ns": 10**6, "input_tokens": 10, "output_tokens": 2, "media": ["image"]},
        {"request_id": 2, "arrival_ns": 2 * 10**9, "session_id": 4, "input_tokens": 32, "input_blocks": [5, 6]},
        {"request_id": 3, "arrival_ns": 3 * 10**9, "parent_request_id": 1, "turn": 1, "input_tokens": 0},
    ]

    written = [json.loads(one) for one in bailian.write(rows, Footer())]

    assert [(row["chat_id"], row["parent_chat_id"], row["turn"], row["type"]) for row in written] == [
        (0, -1, 1, "text"),
        (1, -1, 1, "image"),
        (2, 0, 2, "text"),
        (3, 1, 2, "text"),
    ]
    assert [row["hash_ids"] for row in written] == [[0, 1, 2], [3], [0, 1], []]
    assert written[1]["timestamp"] == 0.001


def test_blocks_that_do_not_divide_16_tokens_are_refused() -> None:
    with pytest.raises(TraceError, match="512 tokens a block, wanted a divisor of 16"):
        list(bailian.write([], Footer(block_tokens=512)))
