"""Sessions with sub-agents to rows and back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.reuse import hit_curve, touches_as_in_source
from tracer.formats import BadRow, Detected, weka
from tracer.importing import detect, export_trace, import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, read_footer, read_table

FOLDER = Path(__file__).resolve().parents[4] / "shared/traces/weka-cc"
GOLDEN = {  # requests, block references, unique blocks, prefix hits
    "0026": (3, 822, 313, 509),
    "0040": (6, 24_335, 4_085, 20_250),
    "0086": (24, 9_799, 585, 9_214),
    "0129": (24, 20_325, 1_294, 19_031),
    "0164": (67, 48_649, 3_520, 45_129),
    "0291": (32, 35_209, 3_606, 31_603),
    "0312": (18, 12_721, 878, 11_843),
    "0331": (42, 35_909, 1_429, 34_480),
    "0482": (21, 19_337, 1_372, 17_965),
}


def request(t: float, asked: int, ids: list[int], **more: Any) -> dict[str, Any]:
    row = {"t": t, "type": "n", "model": "m", "in": asked, "out": 5, "hash_ids": ids, "stop": "tool_use"}
    return {**row, "api_time": 2.5, "think_time": 0.25, **more}


def session(*requests: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "one", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": list(requests), **more}


def parse(*lines: bytes) -> tuple[list[Request], list[BadRow], Detected]:
    bad: list[BadRow] = []
    found = Detected()
    return list(weka.read(lines, found, bad.append)), bad, found


@pytest.mark.skipif(not FOLDER.exists(), reason="the public WEKA sessions are not beside this checkout")
@pytest.mark.parametrize("name", GOLDEN)
def test_a_real_session_has_the_published_figures_and_comes_back(name: str, tmp_path: Path) -> None:
    source, trace, back = FOLDER / f"trace_{name}.json", tmp_path / "t.parquet", tmp_path / "back.json"

    report = import_trace(source, trace, strict=True)
    export_trace(trace, back, "weka")

    footer = read_footer(trace)
    touches = touches_as_in_source(read_table(trace), footer)
    curve = hit_curve(touches)
    assert (report.source_format, report.bad_rows) == ("weka", 0)
    assert (report.rows, curve.references, curve.unique, curve.hits_infinite) == GOLDEN[name]
    assert (footer.tail_rule, footer.block_tokens, footer.hashes.scope) == ("floor", 64, "local")
    assert all(len(row["input_blocks"] or []) == (row["input_tokens"] or 0) // 64 for row in iter_requests(trace))
    assert json.loads(back.read_bytes()) == json.loads(source.read_bytes())


@pytest.mark.skipif(not FOLDER.exists(), reason="the public WEKA sessions are not beside this checkout")
def test_all_sessions_in_one_file_share_nothing_and_come_back(tmp_path: Path) -> None:
    sources = [json.loads(path.read_bytes()) for path in sorted(FOLDER.glob("*.json"))]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sources))

    import_trace(tmp_path / "all.jsonl", tmp_path / "t.parquet", strict=True)
    export_trace(tmp_path / "t.parquet", tmp_path / "back.jsonl", "weka")

    curve = hit_curve(touches_as_in_source(read_table(tmp_path / "t.parquet"), read_footer(tmp_path / "t.parquet")))
    assert curve.hits_infinite == sum(hits for *_, hits in GOLDEN.values())
    assert [json.loads(line) for line in (tmp_path / "back.jsonl").read_text().splitlines()] == sources


def test_a_sub_agent_waits_for_who_started_it_and_is_waited_for(tmp_path: Path) -> None:
    agent = {"t": 4.0, "type": "subagent", "agent_id": "a1", "status": "completed"}
    agent |= {"requests": [request(0.0, 70, [4], think_time=0.0), request(3.0, 140, [4, 5])]}
    whole = session(
        request(0.0, 70, [1]), request(3.0, 130, [1, 2]), agent, request(5.0, 130, [1, 3]), request(20.0, 200, [1, 3, 6])
    )
    source = tmp_path / "one.json"
    source.write_text(json.dumps(whole, indent=1))

    report = import_trace(source, tmp_path / "t.parquet", strict=True)
    export_trace(tmp_path / "t.parquet", tmp_path / "back.json", "weka")

    rows = list(iter_requests(tmp_path / "t.parquet"))
    assert detect(source) == "weka" and report.inversions == 1
    assert [row["arrival_ns"] // 10**9 for row in rows] == [0, 3, 4, 5, 7, 20]
    assert [row["agent_id"] for row in rows] == [None, None, "a1", None, "a1", None]
    assert [row["turn"] for row in rows] == [0, 1, None, 2, None, 3]
    assert [row["wait_for"] for row in rows] == [None, [0], [1], [1], [2], [3, 4]]
    assert [row["parent_request_id"] for row in rows] == [None, 0, 1, 1, 2, 3]
    assert [row["input_blocks"] for row in rows] == [[0], [0, 1], [2], [0, 3], [2, 4], [0, 3, 5]]
    assert [row["end_ns"] for row in rows] == [2_500_000_000] * 6
    assert json.loads((tmp_path / "back.json").read_text()) == whole


@st.composite
def sessions(draw: st.DrawFn) -> dict[str, Any]:
    numbers = st.integers(0, 10**6).map(lambda ms: ms / 1000) | st.floats(0, 1000)

    def one() -> dict[str, Any]:
        asked = draw(st.integers(0, 400))
        ids = st.lists(st.integers(1, 6) | st.integers(0, 2**62), min_size=asked // 64, max_size=asked // 64)
        row = {"t": draw(numbers), "type": draw(st.sampled_from(["n", "s"])), "in": asked, "out": draw(st.integers(0, 9))}
        row |= {"hash_ids": draw(ids)}
        more: dict[str, st.SearchStrategy[Any]] = {
            "api_time": numbers,
            "ttft": numbers,
            "stop": st.sampled_from(["", "end_turn", None]),
            "model": st.just("m"),
        }
        more |= {"think_time": numbers, "input_types": st.just(["text"])}
        return row | draw(st.fixed_dictionaries({}, optional=more))

    requests: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.integers(0, 3)):
            requests.append(one())
        else:
            nested = [one() for _ in range(draw(st.integers(0, 3)))]
            requests.append({"t": draw(numbers), "type": "subagent", "agent_id": draw(st.text(max_size=2)), "requests": nested})
    requests.append(one())
    return session(*requests, **draw(st.dictionaries(st.sampled_from(["tool_tokens", "totals"]), st.integers(0, 9))))


@given(st.lists(sessions(), min_size=1, max_size=3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_sessions_come_back_value_by_value(tmp_path_factory: pytest.TempPathFactory, many: list[Any], is_document: bool) -> None:
    folder = tmp_path_factory.mktemp("weka")
    many = many[:1] if is_document else many
    (folder / "in").write_text(json.dumps(many[0], indent=2) if is_document else "".join(json.dumps(one) + "\n" for one in many))

    report = import_trace(folder / "in", folder / "t.parquet", source_format="weka", strict=True)
    export_trace(folder / "t.parquet", folder / "back", "weka")

    text = (folder / "back").read_text()
    assert [json.loads(text)] == many if is_document else [json.loads(line) for line in text.splitlines()] == many
    assert hit_curve(touches_as_in_source(read_table(folder / "t.parquet"), report.footer)).references == sum(
        len(row["input_blocks"] or []) for row in iter_requests(folder / "t.parquet")
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"requests": 3}\n', "requests is 3, wanted a list"),
        (b'{"requests": [], "block_size": 16}\n', "block_size is 16, wanted 64"),
        (b"{}\n", "requests is None"),
        (b"[]\n", "Expected `object`"),
        (b"{\n", "truncated"),
        (json.dumps(session(request(0, 130, [1]))).encode(), "1 hash_ids for in 130, wanted 2"),
        (json.dumps(session(request(-1, 64, [1]))).encode(), "t is -1"),
        (json.dumps(session(request(0, -64, []))).encode(), "in is -64"),
        (json.dumps(session({"t": 0})).encode(), "missing required field"),
        (json.dumps(session({"type": "subagent", "requests": []})).encode(), "Expected `float`"),
    ],
)
def test_a_bad_session_is_named_with_its_reason_and_the_others_are_read(text: bytes, reason: str) -> None:
    good = json.dumps(session(request(0, 64, [1]))).encode() + b"\n"

    rows, bad, _ = parse(good, text, good)

    assert len(rows) == 2
    assert [one.line for one in bad] == [2]
    assert reason in bad[0].reason


def test_a_trace_of_another_source_becomes_a_session_each_with_ids_from_one() -> None:
    rows: list[Request] = [
        {"request_id": 0, "arrival_ns": 0, "session_id": 4, "input_tokens": 130, "input_blocks": list(range(8))},
        {"request_id": 1, "arrival_ns": 10**9, "input_tokens": 64, "output_tokens": 2},
        {"request_id": 2, "arrival_ns": 2 * 10**9, "session_id": 4, "input_tokens": 190, "input_blocks": list(range(11))},
    ]

    written = [json.loads(one) for one in weka.write(rows, Footer())]

    assert [[(r["t"], r["hash_ids"]) for r in one["requests"]] for one in written] == [[(0, [1, 2]), (2, [1, 2])], [(0, [1])]]
