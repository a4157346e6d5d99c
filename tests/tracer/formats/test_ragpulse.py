"""Prompts made of components to rows and back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.segments import segment_reuse
from tracer.errors import TraceError
from tracer.formats import BadRow, Detected, ragpulse
from tracer.importing import detect, export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, read_footer, read_table

FOLDER = Path(__file__).resolve().parents[4] / "shared/traces/ragpulse"


def row(at: str = "5", **components: list[int]) -> dict[str, Any]:
    hash_ids = {name: components.get(name, []) for name in ragpulse.COMPONENTS}
    return {"timestamp": at, "input_length": 60, "output_length": 7, "hash_ids": hash_ids, "session_id": "s"}


def parse(rows: list[dict[str, Any]], **lengths: int) -> list[Request]:
    side = [json.dumps({"any_id": int(name[1:]), "token_length": tokens}).encode() for name, tokens in lengths.items()]
    bad: list[BadRow] = []
    found = Detected(side_lines={"1_sys_prompt.jsonl": side} if side else {})
    read = list(ragpulse.read([json.dumps(one).encode() for one in rows], found, bad.append))
    assert bad == []
    return read


@pytest.mark.skipif(not FOLDER.exists(), reason="the public RAGPulse trace is not beside this checkout")
def test_the_real_trace_has_the_published_figures_and_comes_back(tmp_path: Path) -> None:
    source = FOLDER / "0_trace.jsonl"

    report = import_trace(source, tmp_path / "t.parquet", strict=True)
    export_trace(tmp_path / "t.parquet", tmp_path / "back.jsonl", "ragpulse")

    reuse = segment_reuse(read_table(tmp_path / "t.parquet", ["segments"]))
    assert (report.source_format, report.rows, report.inversions) == ("ragpulse", 7106, 1)
    assert reuse is not None
    assert (round(reuse.as_sent, 4), round(reuse.in_any_order, 4)) == (0.3153, 0.7203)
    assert reuse.as_sent < reuse.popular_first < reuse.in_any_order
    assert len({one["session_id"] for one in iter_requests(tmp_path / "t.parquet", ["session_id"])}) == 3990
    assert read_footer(tmp_path / "t.parquet").notes["component_lengths"] == "known"
    lines = [line for line in source.read_text().splitlines() if line]
    assert [json.loads(line) for line in (tmp_path / "back.jsonl").read_text().splitlines()] == [json.loads(one) for one in lines]


def test_components_are_laid_end_to_end_and_cut_into_blocks() -> None:
    first = row(sys_prompt=[8], passages_ids=[1, 2], user_input=[9])
    swapped = row(sys_prompt=[8], passages_ids=[2, 1], user_input=[9])

    rows = parse([first, swapped, first], i8=20, i1=20, i2=10, i9=4)

    # 16 + 4 of the system prompt, 12 of a passage and 8 more, ...: 54 tokens are three full blocks
    assert [one["input_blocks"] for one in rows] == [[0, 1, 2], [0, 3, 4], [0, 1, 2]]
    assert [(s["kind"], s["tokens"], s["content_id"]) for s in rows[1]["segments"] or []] == [
        ("system", 20, 0),
        ("passage", 10, 2),
        ("passage", 20, 1),
        ("user", 4, 3),
    ]


def test_without_side_files_there_are_segments_but_no_lengths_and_no_blocks(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row(sys_prompt=[8], user_input=[1])) + "\n\n")

    import_trace(tmp_path / "t.jsonl", tmp_path / "t.parquet", strict=True)

    (one,) = iter_requests(tmp_path / "t.parquet")
    assert detect(tmp_path / "t.jsonl") == "ragpulse"
    assert one["input_blocks"] is None and len(one["segments"] or []) == 2
    assert read_footer(tmp_path / "t.parquet").notes["component_lengths"].startswith("unknown")
    assert segment_reuse(read_table(tmp_path / "t.parquet", ["segments"])) is None


def test_a_broken_side_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row()) + "\n")
    (tmp_path / "2_passages.jsonl").write_text('{"passage_id": 1, "token_length": 2}\noops\n')

    with pytest.raises(TraceError, match="2_passages.jsonl:2: no length of a component; saw 'oops"):
        import_trace(tmp_path / "t.jsonl", tmp_path / "t.parquet")


@st.composite
def sources(draw: st.DrawFn) -> list[dict[str, Any]]:
    ids = st.lists(st.integers(0, 9) | st.integers(0, 2**53), max_size=4)
    stamps = st.integers(0, 10**6).map(str) | st.integers(0, 99) | st.sampled_from(["007", "+5"])
    rows = []
    for _ in range(draw(st.integers(1, 10))):
        components = draw(st.fixed_dictionaries({}, optional=dict.fromkeys(ragpulse.COMPONENTS, ids)))
        one: dict[str, Any] = {"timestamp": draw(stamps), "input_length": draw(st.integers(0, 99))}
        one |= {"output_length": draw(st.integers(0, 9)), "hash_ids": components}
        one["session_id"] = draw(st.sampled_from(["a", "b", ""]))
        rows.append(one | draw(st.dictionaries(st.just("more"), st.integers(), max_size=1)))
    return rows


@given(sources(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_rows_come_back_value_by_value(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], has_lengths: bool) -> None:
    folder = tmp_path_factory.mktemp("rag")
    (folder / "in").write_text("".join(json.dumps(one) + "\n" for one in rows))
    if has_lengths:
        side = [{"passage_id": k, "token_length": 3 * k} for k in range(9)]
        (folder / "2_passages.jsonl").write_text("".join(json.dumps(one) + "\n" for one in side))

    import_trace(folder / "in", folder / "t.parquet", source_format="ragpulse", strict=True)
    export_trace(folder / "t.parquet", folder / "back", "ragpulse")

    assert [json.loads(line) for line in (folder / "back").read_text().splitlines()] == rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"timestamp": "soon"}, "invalid literal"),
        ({"timestamp": "-4"}, "timestamp is -4"),
        ({"input_length": -1}, "input_length is -1"),
        ({"hash_ids": {"tools": [1]}}, "hash_ids has 'tools', wanted only sys_prompt"),
        ({"hash_ids": [1]}, "Expected `object`"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(change: dict[str, Any], reason: str) -> None:
    bad: list[BadRow] = []

    rows = list(ragpulse.read([json.dumps({**row(), **change}).encode(), json.dumps(row()).encode()], Detected(), bad.append))

    assert (len(rows), len(bad), bad[0].line) == (1, 1, 1)
    assert reason in bad[0].reason


def test_a_trace_without_components_is_refused() -> None:
    with pytest.raises(TraceError, match="request 0 without segments"):
        list(ragpulse.write([{"request_id": 0, "arrival_ns": 0}], Footer()))
