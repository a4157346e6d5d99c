"""Files for load generators: what all of them refuse, and what GuideLLM's and inference-perf's hold."""

import json
import math
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.formats import guidellm, inference_perf
from tracer.formats.ids import FirstSeen, LaidOut
from tracer.formats.targets import prompt_ids, sendable
from tracer.importing import TARGETS
from tracer.schema import Footer, Request

ROWS: list[Request] = [
    {"request_id": 0, "arrival_ns": 0, "input_tokens": 40, "output_tokens": 3, "input_blocks": [0, 1], "end_ns": 1_500_000_000},
    {"request_id": 1, "arrival_ns": 1_250_000_400, "input_tokens": 40, "output_tokens": 4, "input_blocks": [0, 2]},
]


def test_guidellm_reads_seconds_and_as_many_ids_as_blocks() -> None:
    written = [json.loads(one) for one in guidellm.write(ROWS, Footer(), Counter())]

    assert written == [
        {"timestamp": 0.0, "input_length": 40, "output_length": 3, "hash_ids": [0, 1, 2], "duration": 1.5},
        {"timestamp": 1.2500004, "input_length": 40, "output_length": 4, "hash_ids": [0, 3, 4], "duration": None},
    ]


@pytest.mark.parametrize("epoch_ns", [None, 1_700_158_546_680_590_000])
def test_inference_perf_reads_a_header_and_stamps_of_six_digits(epoch_ns: int | None) -> None:
    header, *lines = b"".join(inference_perf.write(ROWS, Footer(epoch_ns=epoch_ns), Counter())).decode().splitlines()

    assert header == "TIMESTAMP,ContextTokens,GeneratedTokens"
    stamps, counts = zip(*((line.split(",")[0], line.split(",")[1:]) for line in lines), strict=True)
    assert counts == (["40", "3"], ["40", "4"])
    first, second = (datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S.%f") for stamp in stamps)
    assert (second - first).total_seconds() == 1.25
    assert (first - datetime(1970, 1, 1)).total_seconds() == (epoch_ns or 0) / 10**9


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("block_tokens", [16, 64, 512])
def test_a_targets_usage_names_the_file(name: str, block_tokens: int) -> None:
    said = TARGETS[name].usage("/x/file.jsonl", Footer(block_tokens=block_tokens), 12)

    assert "/x/file.jsonl" in said
    assert str(block_tokens) in said or name in ("inference_perf", "dynamo_trace")


def test_what_no_tool_can_send_is_counted() -> None:
    losses: Counter[str] = Counter()
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "input_tokens": 0, "output_tokens": 1, "input_blocks": []},
        {"request_id": 1, "arrival_ns": 0, "output_tokens": 1},
        {"request_id": 2, "arrival_ns": 0, "input_tokens": 5, "error_kind": "timeout", "input_blocks": []},
        {"request_id": 3, "arrival_ns": 0, "input_tokens": 5, "output_tokens": 2, "input_blocks": []},
    ]

    sent = list(sendable(rows, losses))

    assert [(row["request_id"], row["output_tokens"]) for row in sent] == [(2, 1), (3, 2)]
    assert losses == {
        "requests without a known prompt length: left out": 2,
        "requests without output: they ask for 1 token": 1,
    }


@st.composite
def prompts(draw: st.DrawFn) -> Request:
    tokens = draw(st.integers(0, 100))
    named = draw(st.integers(0, tokens // 16))
    row: dict[str, Any] = {
        "input_tokens": tokens,
        "input_blocks": draw(st.lists(st.integers(0, 9), min_size=named, max_size=named)),
    }
    if draw(st.booleans()):
        row["input_tail_id"] = draw(st.integers(0, 9))
    return row  # type: ignore[return-value]


@given(st.lists(prompts(), max_size=8))
@settings(max_examples=100, deadline=None)
def test_every_block_of_a_prompt_has_an_id_and_unnamed_ones_one_of_their_own(rows: list[Request]) -> None:
    numbers = FirstSeen()

    written = [prompt_ids(row, 16, numbers) for row in rows]

    assert [len(ids) for ids in written] == [math.ceil((row["input_tokens"] or 0) / 16) for row in rows]
    named: dict[int, int] = {}
    seen = Counter(one for ids in written for one in ids)
    for row, ids in zip(rows, written, strict=True):
        blocks = row["input_blocks"] or []
        for block, one in zip(blocks, ids, strict=False):
            assert named.setdefault(block, one) == one
        tail = row.get("input_tail_id")
        is_tail_sent = tail is not None and len(blocks) == (row["input_tokens"] or 0) // 16 and len(ids) > len(blocks)
        if is_tail_sent:
            assert named.setdefault(tail, ids[-1]) == ids[-1]  # type: ignore[arg-type]
        assert all(seen[one] == 1 for one in ids[len(blocks) :]) or is_tail_sent


def test_contents_laid_end_to_end_share_blocks_as_far_as_they_are_equal() -> None:
    laid_out = LaidOut(16)

    assert laid_out.path([("a", 20), ("b", 12)]) == [0, 1]
    assert laid_out.path([("a", 20), ("c", 12)]) == [0, 2]
    assert laid_out.path([("a", 32)]) == [0, 3]
    assert laid_out.path([("a", 15)]) == []
