"""Laws of generated traces, whatever the workload."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.generating import generate_trace
from synth.model import Workload, load_workload, presets, workload_from_table
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.blocks import Blocks, first_unchained
from tracer.errors import TraceError
from tracer.tracefile import iter_requests, read_footer, read_table


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    lengths = st.one_of(
        st.integers(1, 100),
        st.lists(st.integers(1, 60), min_size=1, max_size=4),
        st.fixed_dictionaries({"p50": st.just(20), "p99": st.integers(20, 300)}),
        st.fixed_dictionaries({"mean": st.integers(1, 60)}),
        st.fixed_dictionaries({"min": st.just(1), "max": st.integers(1, 60)}),
    )
    process = draw(st.sampled_from([{"process": "poisson"}, {"process": "gamma", "cv": 3.0}]))
    table: dict[str, Any] = {
        "requests": draw(st.integers(1, 80)),
        "arrivals": {**process, "sessions_per_s": draw(st.sampled_from([0.01, 1.0, 50.0]))},
        "system_prompts": {"count": draw(st.integers(1, 5)), "tokens": draw(lengths), "zipf": draw(st.floats(0, 3))},
        "documents": {"count": draw(st.integers(1, 4)), "tokens": draw(lengths), "per_session": draw(st.integers(0, 3))},
        "turns": draw(st.one_of(st.integers(1, 6), st.just({"mean": 3.0}))),
        "think_s": draw(st.sampled_from([0, 5, {"mean": 20}])),
        "input_tokens": draw(lengths),
        "output_tokens": draw(lengths),
        "input_output_correlation": draw(st.floats(-1, 1)),
        "max_conversation_tokens": draw(st.sampled_from([200, 100_000])),
    }
    if draw(st.booleans()):
        table["messages_per_request"] = draw(st.sampled_from([2, {"min": 1, "max": 5}]))
        table["system_prompts"]["count"], table["documents"]["per_session"] = 1, 0
    if draw(st.booleans()):
        table["arrivals"] |= {"diurnal_amplitude": 1.0, "diurnal_period_s": 100.0}
    if draw(st.booleans()):
        table["duration_s"] = 1000.0
    return workload_from_table(table)


def generated(folder: Path, workload: Workload, seed: int, name: str = "t") -> tuple[list[dict[str, Any]], Path]:
    path = folder / f"{name}.parquet"
    generate_trace(workload, seed, path)
    return [dict(row) for row in iter_requests(path)], path


@given(workloads(), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_generated_trace_obeys_the_block_laws(
    tmp_path_factory: pytest.TempPathFactory, workload: Workload, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("laws")
    try:
        rows, path = generated(folder, workload, seed)
    except TraceError as error:
        assert "no request arrives in this time" in str(error)
        return

    assert_ids_are_dense_and_chained(rows)
    assert_block_counts_follow_lengths(rows)
    assert_sessions_extend_themselves(rows)
    assert_report_equals_analysis(workload, seed, path)


def assert_ids_are_dense_and_chained(rows: list[dict[str, Any]]) -> None:
    seen: dict[int, None] = {}
    for row in rows:
        tail = [] if row["input_tail_id"] is None else [row["input_tail_id"]]
        seen |= dict.fromkeys([*row["input_blocks"], *tail, *row["output_blocks"]])
    assert list(seen) == list(range(len(seen)))
    full = [row["input_blocks"] + row["output_blocks"] for row in rows]
    tails = [row["input_blocks"] + [row["input_tail_id"]] for row in rows if row["input_tail_id"] is not None]
    assert first_unchained(Blocks.from_lists(full + tails)) is None


def assert_block_counts_follow_lengths(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert len(row["input_blocks"]) == row["input_tokens"] // 16
        total = (row["input_tokens"] + row["output_tokens"]) // 16
        assert len(row["input_blocks"]) + len(row["output_blocks"]) == total
        assert (row["input_tail_id"] is not None) == (row["input_tokens"] % 16 > 0)
        assert row["max_tokens"] == row["output_tokens"]


def assert_sessions_extend_themselves(rows: list[dict[str, Any]]) -> None:
    by_id = {row["request_id"]: row for row in rows}
    assert list(by_id) == list(range(len(rows)))
    assert [row["arrival_ns"] for row in rows] == sorted(row["arrival_ns"] for row in rows)
    for row in rows:
        if row["turn"] == 0:
            assert row["parent_request_id"] is None and row["think_ns"] is None
            continue
        parent = by_id[row["parent_request_id"]]
        assert (parent["session_id"], parent["turn"] + 1) == (row["session_id"], row["turn"])
        assert row["arrival_ns"] == parent["arrival_ns"] + parent["end_ns"] + row["think_ns"]
        history = parent["input_blocks"] + parent["output_blocks"]
        assert row["input_blocks"][: len(history)] == history
        assert row["input_tokens"] > parent["input_tokens"] + parent["output_tokens"]
    firsts = [row["session_id"] for row in rows if row["turn"] == 0]
    assert firsts == list(range(len(firsts)))


def assert_report_equals_analysis(workload: Workload, seed: int, path: Path) -> None:
    report = generate_trace(workload, seed, path.with_name("again.parquet"))
    table, footer = read_table(path), read_footer(path)

    curve = hit_curve(touches_as_engine(table, footer))

    assert report.prefix_share == pytest.approx(curve.hit_rate_infinite, abs=1e-12)
    assert path.read_bytes() == path.with_name("again.parquet").read_bytes()


def test_another_seed_gives_another_trace_and_the_footer_holds_seed_and_workload(tmp_path: Path) -> None:
    workload = load_workload(preset="chat", overrides={"requests": 50})

    first, path = generated(tmp_path, workload, 1, "first")
    second, _ = generated(tmp_path, workload, 2, "second")

    footer = read_footer(path)
    assert first != second
    assert (footer.seed, footer.block_tokens, footer.hashes.scope) == (1, 16, "global")
    assert '"requests":50' in footer.notes["workload"]


def test_one_dial_leaves_the_draws_of_the_others_alone(tmp_path: Path) -> None:
    base, _ = generated(tmp_path, load_workload(preset="chat", overrides={"requests": 300}), 7)
    for dial, kept in (
        ({"system_prompts.tokens": 4000}, ("arrival_ns", "output_tokens", "session_id", "turn", "think_ns")),
        ({"system_prompts.count": 9}, ("arrival_ns", "input_tokens", "output_tokens", "turn")),
        ({"input_tokens": 50}, ("arrival_ns", "output_tokens", "session_id", "turn")),
        ({"documents.per_session": 2}, ("arrival_ns", "output_tokens", "session_id", "turn")),
    ):
        rows, _ = generated(tmp_path, load_workload(preset="chat", overrides={"requests": 300, **dial}), 7)

        for name in kept:
            assert [row[name] for row in rows] == [row[name] for row in base], (dial, name)


def test_the_same_shared_prompt_has_the_same_full_blocks_and_nothing_else(tmp_path: Path) -> None:
    workload = load_workload(overrides={"requests": 40, "system_prompts.tokens": 100, "input_tokens": 40})

    rows, _ = generated(tmp_path, workload, 0)

    assert all(row["input_blocks"][:6] == [0, 1, 2, 3, 4, 5] for row in rows)  # 100 tokens: six full blocks
    assert len({row["input_blocks"][6] for row in rows}) == len(rows)


def test_popularity_of_system_prompts_follows_the_zipf_exponent(tmp_path: Path) -> None:
    dials = {"requests": 20_000, "system_prompts.count": 8, "system_prompts.zipf": 1.2, "system_prompts.tokens": 16}
    rows, _ = generated(tmp_path, load_workload(overrides={**dials, "input_tokens": 5, "output_tokens": 1}), 3)

    counts = np.sort(np.bincount([row["input_blocks"][0] for row in rows]))[::-1][:8] / len(rows)

    law = np.arange(1, 9) ** -1.2
    assert counts == pytest.approx(law / law.sum(), abs=0.012)


def test_duration_ends_a_trace_and_a_rate_in_requests_is_met_in_the_long_run(tmp_path: Path) -> None:
    dials = {"duration_s": 4000, "arrivals.requests_per_s": 5, "think_s": 1}

    rows, _ = generated(tmp_path, load_workload(preset="chat", overrides=dials), 4)

    assert rows[-1]["arrival_ns"] < 4000e9
    assert len(rows) / 4000 == pytest.approx(5, rel=0.05)


def test_recorded_arrivals_come_from_the_named_trace(tmp_path: Path) -> None:
    source, path = generated(tmp_path, load_workload(preset="few-shot", overrides={"requests": 400}), 5, "source")
    dials = {"requests": 400, "arrivals": {"process": "recorded", "trace": str(path)}, "turns": 1}

    rows, _ = generated(tmp_path, load_workload(overrides=dials), 6)

    stamps = [np.array([row["arrival_ns"] for row in one]) for one in (rows, source)]
    new, old = (one - one[0] for one in stamps)
    assert (new != old).any()
    assert (new // 60_000_000_000 == old // 60_000_000_000).all()


def test_too_short_a_duration_and_a_negative_seed_are_refused_and_leave_no_file(tmp_path: Path) -> None:
    workload = load_workload(preset="chat", overrides={"duration_s": 0.001, "arrivals.sessions_per_s": 0.01})
    for seed, problem in ((0, "no request arrives"), (-1, "`seed`")):
        with pytest.raises(TraceError, match=problem):
            generate_trace(workload, seed, tmp_path / "t.parquet")

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", presets())
def test_presets_differ_in_what_a_cache_can_do_for_them(tmp_path: Path, name: str) -> None:
    expected = {
        "chat": (0.7, 0.95),
        "rag": (0.6, 0.9),
        "agentic": (0.9, 1),
        "few-shot": (0.85, 0.97),
        "long-document": (0.7, 0.95),
        "merged": (0.05, 0.25),
        "random": (0, 0),
    }

    report = generate_trace(load_workload(preset=name), 0, tmp_path / "t.parquet")

    low, high = expected[name]
    assert report.requests == 1000
    assert report.prefix_share is not None and low <= report.prefix_share <= high
