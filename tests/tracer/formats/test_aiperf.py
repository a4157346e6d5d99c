"""AIPerf's rows and sessions to requests and back, and any trace for it."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.formats import BadRow, Detected, aiperf, mooncake
from tracer.importing import detect, export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, write_trace


def lines(*rows: dict[str, Any]) -> list[bytes]:
    return [json.dumps(row).encode() + b"\n" for row in rows]


def parse(*rows: dict[str, Any]) -> tuple[list[Request], list[BadRow], Detected]:
    bad, found = list[BadRow](), Detected()
    return list(aiperf.read(lines(*rows), found, bad.append)), bad, found


def exported(folder: Path, name: str, rows: list[Request], footer: Footer | None = None) -> list[dict[str, Any]]:
    write_trace(folder / "t.parquet", rows, footer or Footer())
    export_trace(folder / "t.parquet", folder / name, name)
    return [json.loads(one) for one in (folder / name).read_text().splitlines()]


@st.composite
def sources(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Rows alone or in sessions, times and delays as ints or floats or none, ids of all, some or no blocks, further keys."""
    has_sessions = draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        tokens = draw(st.integers(0, 1600))
        full, rest = divmod(tokens, 512)
        times = st.integers(0, 500) | st.floats(0, 500)
        row: dict[str, Any] = {"input_length": tokens}
        row |= draw(st.fixed_dictionaries({}, optional={"timestamp": times, "delay": times, "output_length": st.integers(0, 90)}))
        if draw(st.booleans()):
            count = full + (rest > 0)
            row["hash_ids"] = draw(st.lists(st.integers(0, 4) | st.just(10**9), min_size=count, max_size=count))
        if has_sessions and draw(st.booleans()):
            row["session_id"] = draw(st.sampled_from("abc"))
        rows.append(row | draw(st.dictionaries(st.sampled_from(["extra", "note"]), st.just({"top_p": 0.5}))))
    return rows


@given(sources())
@settings(max_examples=80, deadline=None)
def test_a_file_comes_back_row_by_row(source: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_bytes(b"".join(lines(*source)))

        import_trace(folder / "in.jsonl", folder / "t.parquet", source_format="aiperf", strict=True)
        export_trace(folder / "t.parquet", folder / "back.jsonl", "aiperf")

        assert [json.loads(one) for one in (folder / "back.jsonl").read_text().splitlines()] == source


def test_a_turn_is_sent_after_all_turns_and_answers_before_it() -> None:
    rows, bad, found = parse(
        {"session_id": "a", "timestamp": 1000.5, "input_length": 32, "output_length": 16, "hash_ids": [7]},
        {"session_id": "b", "timestamp": 1500, "input_length": 32, "output_length": 16, "hash_ids": [7]},
        {"session_id": "a", "delay": 2000, "input_length": 20, "output_length": 5},
    )

    assert bad == []
    assert found.block_tokens == 16
    assert [row["input_tokens"] for row in rows] == [32, 32, 68]
    assert [row["arrival_ns"] for row in rows] == [1_000_500_000, 1_500_000_000, 3_000_500_000]
    assert [(row["session_id"], row["turn"], row.get("parent_request_id")) for row in rows] == [
        (0, 0, None),
        (1, 0, None),
        (0, 1, 0),
    ]
    assert rows[2]["think_ns"] == 2_000_000_000
    assert rows[0]["input_blocks"] == rows[1]["input_blocks"] == [0, 1]  # equal ids are equal tokens
    assert rows[2]["input_blocks"] == [0, 1, 2, 3]  # its own first turn, the answer to that, and 16 of its 20 tokens


def test_prompts_in_clear_are_not_kept() -> None:
    rows, bad, found = parse(
        {"timestamp": 0, "text_input": "the secret", "output_length": 3},
        {"timestamp": 1, "messages": [{"role": "user", "content": "the secret"}], "tools": [{"name": "the secret"}]},
        {"timestamp": 2, "payload": {"prompt": "the secret"}},
    )

    assert bad == []
    assert "secret" not in repr(rows)
    assert [row.get("input_tokens") for row in rows] == [None, None, None]
    assert "3 prompts in clear, not kept" in found.notes["read_as"]
    _, bad, _ = parse({"text_input": "the secret", "output_length": -1})
    assert bad[0].text == "" and "secret" not in bad[0].reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"timestamp": 1}, "wanted one of input_length, text_input"),
        ({"input_length": 1, "text_input": "x"}, "wanted one of input_length, text_input"),
        ({"input_length": -1}, "input_length is -1"),
        ({"input_length": 1, "delay": -1}, "delay is -1"),
        ({"input_length": 1, "timestamp": 1e300}, "timestamp is 1e+300"),
        ({"input_length": 1, "session_id": 5}, "session_id"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(row: dict[str, Any], reason: str) -> None:
    rows, bad, _ = parse({"input_length": 5}, row, {"input_length": 5})

    assert len(rows) == 2
    assert [one.line for one in bad] == [2]
    assert reason in bad[0].reason


def test_a_delay_shows_aiperf_and_mooncakes_own_rows_do_not(tmp_path: Path) -> None:
    own = lines({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]})[0]
    assert mooncake.looks_like(own) and not aiperf.looks_like(own)

    (tmp_path / "x").write_bytes(own + lines({"session_id": "a", "delay": 5, "input_length": 6})[0])
    assert detect(tmp_path / "x") == "aiperf"


def test_any_trace_becomes_rows_in_float_milliseconds(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "input_tokens": 40, "output_tokens": 3, "input_blocks": [0, 1]},
        {"request_id": 1, "arrival_ns": 1_500_000, "input_tokens": 40, "output_tokens": 4, "input_blocks": [0, 2]},
    ]

    assert exported(tmp_path, "aiperf", rows) == [
        {"timestamp": 0.0, "input_length": 40, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 1.5, "input_length": 40, "output_length": 4, "hash_ids": [0, 3, 4]},
    ]


def test_sessions_become_turns_that_hold_what_is_new(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "session_id": 0, "input_tokens": 40, "output_tokens": 8, "input_blocks": [0, 1]},
        {"request_id": 1, "arrival_ns": 10**9, "session_id": 1, "input_tokens": 33, "output_tokens": 2, "input_blocks": [0, 2]},
        {
            "request_id": 2,
            "arrival_ns": 2 * 10**9,
            "session_id": 0,
            "input_tokens": 60,
            "output_tokens": 1,
            "think_ns": 5 * 10**8,
        },
        {"request_id": 3, "arrival_ns": 3 * 10**9, "session_id": 0, "input_tokens": 70, "output_tokens": 6, "end_ns": 10**9},
        {"request_id": 4, "arrival_ns": 6 * 10**9, "session_id": 0, "input_tokens": 80, "output_tokens": 6},
        {"request_id": 5, "arrival_ns": 7 * 10**9, "session_id": 0, "input_tokens": 20, "output_tokens": 6, "input_blocks": [0]},
    ]

    written = exported(tmp_path, "aiperf_sessions", rows)

    assert written == [
        {"session_id": "s0-r0", "timestamp": 0.0, "input_length": 40, "hash_ids": [0, 1, 2], "output_length": 8},
        {"session_id": "s1-r1", "timestamp": 1000.0, "input_length": 33, "hash_ids": [0, 3, 4], "output_length": 2},
        {"session_id": "s0-r0", "delay": 500.0, "input_length": 12, "output_length": 1},
        {"session_id": "s0-r0", "timestamp": 3000.0, "input_length": 9, "output_length": 6},
        {"session_id": "s0-r0", "delay": 2000.0, "input_length": 4, "output_length": 6},
        {"session_id": "s0-r5", "timestamp": 7000.0, "input_length": 20, "hash_ids": [0, 5], "output_length": 6},
    ]


def test_sessions_read_again_have_the_lengths_that_they_had(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": k, "arrival_ns": k * 10**9, "session_id": 0, "turn": k, "input_tokens": 40 * (k + 1), "output_tokens": 8}
        for k in range(4)
    ]
    exported(tmp_path, "aiperf_sessions", rows)

    import_trace(tmp_path / "aiperf_sessions", tmp_path / "again.parquet", source_format="aiperf")

    again = list(iter_requests(tmp_path / "again.parquet"))
    assert [(row["input_tokens"], row["turn"], row["arrival_ns"]) for row in again] == [
        (40 * (k + 1), k, k * 10**9) for k in range(4)
    ]


def test_agents_in_one_session_do_not_go_on_with_each_others_turns(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "session_id": 0, "input_tokens": 40, "output_tokens": 8},
        {"request_id": 1, "arrival_ns": 1, "session_id": 0, "agent_id": "x", "input_tokens": 90, "output_tokens": 8},
        {"request_id": 2, "arrival_ns": 2, "session_id": 0, "parent_request_id": 0, "input_tokens": 50, "output_tokens": 8},
        {"request_id": 3, "arrival_ns": 3, "session_id": 0, "parent_request_id": 0, "input_tokens": 70, "output_tokens": 8},
    ]

    written = exported(tmp_path, "aiperf_sessions", rows)

    assert [(row["session_id"], row["input_length"]) for row in written] == [
        ("s0-r0", 40),
        ("s0-r1", 90),
        ("s0-r0", 2),
        ("s0-r3", 70),
    ]
