"""Mooncake lines to rows and back."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.errors import TraceError
from tracer.formats import BadRow, Detected, mooncake
from tracer.schema import Footer, Request


def parse(lines: list[bytes], found: Detected | None = None) -> tuple[list[Request], list[BadRow], Detected]:
    bad: list[BadRow] = []
    found = found or Detected()
    return list(mooncake.read(lines, found, bad.append)), bad, found


def line(timestamp: Any = 0, tokens: Any = 600, output: Any = 5, ids: Any = (0, 1), **more: Any) -> bytes:
    row = {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}
    return json.dumps({**row, **more}).encode() + b"\n"


def footer_of(found: Detected) -> Footer:
    return Footer(source_format="mooncake", block_tokens=found.block_tokens, notes=found.notes)


@st.composite
def source_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Any ids, dense or not, chained or not; with or without an id for the partial last block; extra keys."""
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        tokens = draw(st.integers(0, 2100))
        full, rest = divmod(tokens, 512)
        count = full + (draw(st.booleans()) if rest else 0)
        ids = st.lists(st.integers(0, 9) | st.integers(0, 2**64 - 1), min_size=count, max_size=count)
        stamp = st.integers(0, 10**9) | st.floats(0, 1e9)
        row = {
            "timestamp": draw(stamp),
            "input_length": tokens,
            "output_length": draw(st.integers(0, 9000)),
            "hash_ids": draw(ids),
        }
        row |= draw(st.dictionaries(st.sampled_from(["session_id", "delay", "a:b"]), st.integers(0, 5), max_size=2))
        rows.append(row)
    return rows


@given(source_rows())
@settings(max_examples=150, deadline=None)
def test_reading_and_writing_gives_the_same_values_back(source: list[dict[str, Any]]) -> None:
    rows, bad, found = parse([json.dumps(row).encode() for row in source])
    for number, row in enumerate(rows):
        row["request_id"] = number

    written = [json.loads(one) for one in mooncake.write(rows, footer_of(found))]

    assert bad == []
    assert written == source


def test_the_partial_last_block_becomes_the_tail() -> None:
    rows, _, found = parse([line(1500, 1100, 7, [0, 1, 2]), line(2000, 1024, 9, [0, 1])])

    assert rows[0]["arrival_ns"] == 1_500_000_000
    assert (rows[0]["input_blocks"], rows[0]["input_tail_id"]) == ([0, 1], 2)
    assert rows[1]["input_blocks"] == [0, 1] and "input_tail_id" not in rows[1]
    assert (found.block_tokens, found.tail_rule, found.time_unit_ns) == (512, "ceil", 1_000_000)


def test_a_file_without_ids_for_partial_blocks_has_the_floor_rule() -> None:
    rows, bad, found = parse([line(0, 600, 5, [0])])

    assert bad == [] and found.tail_rule == "floor"
    assert rows[0]["input_blocks"] == [0] and "input_tail_id" not in rows[0]


def test_ids_that_had_to_be_renamed_are_kept_beside_the_row() -> None:
    rows, _, _ = parse([line(ids=[70, 71]), line(ids=[70, 5])])

    assert [(row["input_blocks"], row["input_tail_id"]) for row in rows] == [([0], 1), ([0], 2)]
    assert json.loads(rows[1]["source_extra"] or "") == {"hash_ids": [70, 5]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "truncated"),
        (b"not json\n", "malformed"),
        (b"\xff\xfe\n", "malformed"),
        (b"[1, 2]\n", "Expected `object`"),
        (b'{"timestamp": 1}\n', "input_length"),
        (line(tokens="600"), "input_length"),
        (line(tokens=-1, ids=[]), "input_length is -1"),
        (line(output=2**31), "output_length is 2147483648"),
        (line(timestamp=-5), "timestamp is -5"),
        (line(timestamp=2**62), "timestamp is"),
        (line(timestamp=None), "timestamp"),
        (line(tokens=5000, ids=[0, 1]), "2 hash_ids for input_length 5000, wanted 10"),
        (line(ids=[0, 1, 2]), "3 hash_ids for input_length 600, wanted 2"),
        (line(ids=[0, "x"]), "hash_ids"),
        (line(ids={"sys": [1]}), "hash_ids"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(text: bytes, reason: str) -> None:
    rows, bad, _ = parse([line(0), text, b"\n", line(10)])

    assert len(rows) == 2
    assert [one.line for one in bad] == [2]
    assert reason in bad[0].reason


def test_stamps_that_would_mean_a_thousand_requests_a_millisecond_are_seconds() -> None:
    lines = [line(k * 0.25) for k in range(40)]

    _, _, found = parse(lines)
    rows, _, again = parse(lines, Detected(in_seconds=found.in_seconds))

    assert found.in_seconds and again.in_seconds
    assert (rows[1]["arrival_ns"], again.time_unit_ns) == (250_000_000, 1)
    footer = footer_of(again)
    assert [json.loads(one)["timestamp"] for one in mooncake.write(rows, footer)] == [k * 0.25 for k in range(40)]


def test_stamps_of_a_busy_server_stay_milliseconds() -> None:
    _, _, found = parse([line(k * 2) for k in range(40)])

    assert not found.in_seconds


def test_smaller_blocks_become_every_32nd_id_with_a_fresh_id_for_the_rest() -> None:
    shared = list(range(64))
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "input_tokens": 1030, "output_tokens": 3, "input_blocks": shared},
        {
            "request_id": 1,
            "arrival_ns": 1_999_999,
            "input_tokens": 1034,
            "input_blocks": [*shared[:40], *range(64, 88)],
            "input_tail_id": 88,
        },
    ]

    written = [json.loads(one) for one in mooncake.write(rows, Footer())]

    assert [row["hash_ids"] for row in written] == [[0, 1, 2], [0, 3, 4]]
    assert written[1] == {"timestamp": 1, "input_length": 1034, "output_length": 0, "hash_ids": [0, 3, 4]}


def test_a_trace_without_prefixes_is_written_with_ids_that_nobody_shares() -> None:
    rows: list[Request] = [{"request_id": k, "arrival_ns": k, "input_tokens": 700} for k in range(2)]

    written = [json.loads(one) for one in mooncake.write(rows, Footer(source_format="azure"))]

    assert [row["hash_ids"] for row in written] == [[0, 1], [2, 3]]


def test_blocks_that_do_not_divide_512_tokens_are_refused() -> None:
    with pytest.raises(TraceError, match="1024 tokens a block, wanted a divisor of 512"):
        list(mooncake.write([], Footer(block_tokens=1024)))


def test_a_bailian_file_is_not_taken_for_mooncake() -> None:
    assert mooncake.looks_like(b"garbage\n" + line())
    assert not mooncake.looks_like(line(chat_id=1, parent_chat_id=-1, type="text", turn=1))
    assert not mooncake.looks_like(b"TIMESTAMP,ContextTokens,GeneratedTokens\n")
