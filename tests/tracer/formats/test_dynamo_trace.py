"""Dynamo's request traces to rows and back."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.blocks import DenseIds
from tracer.formats import BadRow, Detected, dynamo_trace
from tracer.importing import detect, export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, write_trace

EPOCH_MS = 1_777_312_800_000


def record(at_ms: int = 0, tokens: int = 70, output: int = 7, hashes: Any = (17, 2**63), **more: Any) -> dict[str, Any]:
    replay = {"trace_block_size": 64, "input_length": tokens, "input_sequence_hashes": list(hashes)}
    request = {"request_id": f"r{at_ms}", "request_received_ms": EPOCH_MS + at_ms, "output_tokens": output, "replay": replay}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": EPOCH_MS + at_ms + 5,
        "request": {**request, **more},
    }


TOOL = {
    "schema": "dynamo.request.trace.v1",
    "event_type": "tool_end",
    "event_time_unix_ms": EPOCH_MS,
    "tool": {"tool_call_id": "c", "tool_class": "web", "duration_ms": 2.5},
}


def lines(*records: dict[str, Any]) -> list[bytes]:
    return [json.dumps(one).encode() + b"\n" for one in records]


def parse(*records: dict[str, Any]) -> tuple[list[Request], list[BadRow], Detected]:
    bad, found = list[BadRow](), Detected()
    return list(dynamo_trace.read(lines(*records), found, bad.append)), bad, found


@st.composite
def sources(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests in any order of arrival, with and without hashes, of answers too; times that ns can hold or not; tool events."""
    records: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 8))):
        tokens, output = draw(st.integers(0, 200)), draw(st.integers(0, 200))
        full = tokens // 64
        path = [f"{draw(st.integers(0, 2))}" for _ in range(-(-(tokens + output) // 64))]
        prefixes = [hash("/".join(path[: k + 1])) % 2**64 for k in range(len(path))]
        hashes = prefixes[:full] + ([hash(f"tail {number}") % 2**64] if tokens % 64 else [])
        one = record(draw(st.integers(0, 500)), tokens, output, hashes)
        request = one["request"]
        if draw(st.booleans()):
            request["replay"]["completion_sequence_hashes"] = prefixes
            if (tokens + output) % 64:
                request["replay"]["completion_sequence_hashes"][-1] = hash(f"last {number}") % 2**64
        times = st.floats(0, 10**6)
        request |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "ttft_ms": times,
                    "total_time_ms": times,
                    "avg_itl_ms": times,
                    "cached_tokens": st.integers(0, 90),
                    "input_tokens": st.just(tokens),
                    "model": st.sampled_from("mn"),
                    "worker": st.just({"decode_worker_id": 3}),
                    "finish_reason_metadata": st.just({"finish_reason": "stop", "tool_calls": [{"choice_index": 0}]}),
                },
            )
        )
        if draw(st.booleans()):
            one["agent_context"] = {"session_id": draw(st.sampled_from("ab"))}
        if draw(st.integers(0, 3)) == 0:
            records.append(copy.deepcopy(TOOL))
        records.append({"timestamp": 7, "event": one} if draw(st.booleans()) else one)
    return records + [copy.deepcopy(TOOL)] * draw(st.integers(0, 1))


def dense(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with hashes numbered in the order in which they come."""
    numbers: DenseIds[int] = DenseIds()
    result = copy.deepcopy(records)
    for one in result:
        replay = one.get("event", one).get("request", {}).get("replay", {})
        for name in ("input_sequence_hashes", "completion_sequence_hashes"):
            if name in replay:
                replay[name] = [numbers[value] for value in replay[name]]
    return result


@given(sources())
@settings(max_examples=80, deadline=None)
def test_a_file_comes_back_with_other_names_for_its_hashes(source: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_bytes(b"".join(lines(*source)))

        import_trace(folder / "in.jsonl", folder / "t.parquet", strict=True)
        export_trace(folder / "t.parquet", folder / "back.jsonl", "dynamo_trace")

        back = [json.loads(one) for one in (folder / "back.jsonl").read_text().splitlines()]
        assert dense(back) == dense(source)


def test_a_record_becomes_a_request() -> None:
    extra = {"ttft_ms": 82.4, "total_time_ms": 1000.1, "cached_tokens": 64, "model": "m"}
    one = record(250, 70, 60, [17, 4], **extra, finish_reason_metadata={"finish_reason": "tool_calls", "tool_calls": [{}, {}]})
    one["request"]["replay"]["completion_sequence_hashes"] = [17, 9, 8]
    one["agent_context"] = {"session_id": "run-42"}

    rows, bad, found = parse(TOOL, record(), one)

    assert bad == []
    assert (found.epoch_ns, found.block_tokens) == (EPOCH_MS * 10**6, 64)
    row = rows[1]
    assert (row["arrival_ns"], row["ttft_ns"], row["end_ns"]) == (250_000_000, 82_400_000, 1_000_100_000)
    assert (row["input_blocks"], row["input_tail_id"], row["output_blocks"]) == ([0], 2, [3])
    assert (row["finish_reason"], row["tool_calls_out"], row["session_id"]) == ("tool_calls", 2, 0)
    assert (row["input_tokens"], row["output_tokens"], row["cached_tokens"], row["model"]) == (70, 60, 64, "m")


def test_neither_hashes_nor_payloads_are_kept() -> None:
    payload = {"schema": "dynamo.request.trace.v1", "event_type": "request_payload", "payload": {"prompt": "the secret"}}

    rows, bad, found = parse(payload, record(hashes=[123456789, 987654321]))

    assert bad == [] and len(rows) == 1
    assert not any(word in repr(rows) for word in ("secret", "123456789", "987654321"))
    assert found.notes["read_as"] == "1 payloads left out"
    _, bad, _ = parse({**payload, "event_type": 5})
    assert bad[0].text == "" and "secret" not in bad[0].reason


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (record(hashes=[1]), "1 input_sequence_hashes for 70 tokens, wanted 2"),
        (record(output=-1), "output_tokens is -1"),
        (record(ttft_ms=-0.5), "ttft_ms is -0.5"),
        ({**record(), "request": {"request_id": "1"}}, "request_received_ms"),
        ({"schema": "dynamo.request.trace.v1", "event_type": "request_end"}, "request_end without request"),
        ({"schema": "dynamo.request.trace.v1"}, "event_type"),
    ],
)
def test_a_bad_line_is_named_with_its_reason_and_the_others_are_read(wrong: dict[str, Any], reason: str) -> None:
    rows, bad, _ = parse(record(), wrong, record(9))

    assert len(rows) == 2
    assert [one.line for one in bad] == [2]
    assert reason in bad[0].reason


def test_blocks_of_another_size_are_bad_rows() -> None:
    other = record(tokens=32)
    other["request"]["replay"] |= {"trace_block_size": 16}

    _, bad, _ = parse(record(), other)

    assert "trace_block_size is 16, wanted 64" in bad[0].reason


def test_any_trace_becomes_records_that_are_read_again(tmp_path: Path) -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "session_id": 3, "input_tokens": 32, "output_tokens": 20, "input_blocks": [0, 1]},
        {"request_id": 1, "arrival_ns": 10**9, "input_tokens": 40, "output_tokens": 20, "input_blocks": [0, 2], "end_ns": 10**9},
    ]
    rows[0]["output_blocks"] = [3]
    write_trace(tmp_path / "t.parquet", rows, Footer(epoch_ns=EPOCH_MS * 10**6))

    export_trace(tmp_path / "t.parquet", tmp_path / "out", "dynamo_trace")
    import_trace(tmp_path / "out", tmp_path / "again.parquet")

    assert detect(tmp_path / "out") == "dynamo_trace"
    again = list(iter_requests(tmp_path / "again.parquet"))
    wanted = [(0, 32, 20, [0, 1], [2], 0, None), (10**9, 40, 20, [0, 3], None, 1, 10**9)]
    names = ("arrival_ns", "input_tokens", "output_tokens", "input_blocks", "output_blocks", "session_id", "end_ns")
    assert [tuple(row[name] for name in names) for row in again] == wanted  # type: ignore[literal-required]
