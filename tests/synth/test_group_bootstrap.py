"""More traffic like a recorded trace: what is kept, what is fresh, and how like the result is."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.bootstrap import stratified_counts
from synth.fidelity import compare
from synth.generating import generate_from, generate_trace
from synth.model import load_workload
from tracer.analysis.groups import sharing_groups
from tracer.analysis.reuse import concatenate, hit_curve, touches_as_engine
from tracer.blocks import Blocks, first_unchained
from tracer.errors import TraceError
from tracer.importing import import_trace
from tracer.schema import Footer, Request
from tracer.tracefile import blocks, column, iter_requests, read_footer, read_table, write_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
MOONCAKE = TRACES / "mooncake" / "conversation_trace.head.jsonl"
AZURE = TRACES / "azure2023" / "AzureLLMInferenceTrace_conv.csv"


def needs(path: Path) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not path.exists(), reason=f"public trace {path.name} is not beside this checkout")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "chat.parquet"
    generate_trace(load_workload(preset="chat", overrides={"requests": 600, "system_prompts.count": 3}), 1, path)
    return path


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mooncake.parquet"
    import_trace(MOONCAKE, path)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [dict(row) for row in iter_requests(path)]


def ids_of(row: dict[str, Any]) -> list[int]:
    tail = [] if row["input_tail_id"] is None else [row["input_tail_id"]]
    return [*(row["input_blocks"] or []), *tail, *(row["output_blocks"] or [])]


def assert_lawful(rows: list[dict[str, Any]]) -> None:
    """Ids dense in first-seen order and chained, requests numbered by arrival, parents in place."""
    seen = dict.fromkeys(one for row in rows for one in ids_of(row))
    assert list(seen) == list(range(len(seen)))
    paths = [[*(row["input_blocks"] or []), *(row["output_blocks"] or [])] for row in rows]
    assert first_unchained(Blocks.from_lists(paths)) is None
    assert [row["request_id"] for row in rows] == list(range(len(rows)))
    assert [row["arrival_ns"] for row in rows] == sorted(row["arrival_ns"] for row in rows)
    for row in rows:
        if row["parent_request_id"] is not None:
            parent = rows[row["parent_request_id"]]
            assert (parent["session_id"], parent["turn"] + 1) == (row["session_id"], row["turn"])


@given(seed=st.integers(0, 2**40), scale=st.sampled_from([0.2, 1.0, 2.5]))
@settings(max_examples=8, deadline=None)
def test_a_drawn_trace_obeys_the_laws_of_a_trace(
    tmp_path_factory: pytest.TempPathFactory, chat: Path, seed: int, scale: float
) -> None:
    path = tmp_path_factory.mktemp("drawn") / "t.parquet"

    report = generate_from(chat, path, seed, scale=scale)
    rows = rows_of(path)

    assert_lawful(rows)
    assert report.requests == len(rows)
    assert len(rows) == pytest.approx(600 * scale, rel=0.4)
    curve = hit_curve(touches_as_engine(read_table(path), read_footer(path)))
    assert report.prefix_share == pytest.approx(curve.hit_rate_infinite, abs=1e-12)
    by_length = Counter((row["input_tokens"], row["output_tokens"]) for row in rows_of(chat))
    assert {(row["input_tokens"], row["output_tokens"]) for row in rows} <= by_length.keys()


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, chat: Path) -> None:
    for name in ("a", "b"):
        generate_from(chat, tmp_path / name, 11, scale=2)
    generate_from(chat, tmp_path / "c", 12, scale=2)

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_later_turns_keep_their_gap_and_extend_the_fresh_copy_of_their_session(tmp_path: Path, chat: Path) -> None:
    path = tmp_path / "t.parquet"

    generate_from(chat, path, 3, scale=3)

    rows = rows_of(path)
    later = [row for row in rows if row["parent_request_id"] is not None]
    assert len(later) > 500
    for row in later:
        parent = rows[row["parent_request_id"]]
        history = parent["input_blocks"] + parent["output_blocks"]
        assert row["input_blocks"][: len(history)] == history
        assert row["arrival_ns"] == parent["arrival_ns"] + parent["end_ns"] + row["think_ns"]
        assert row["max_tokens"] == row["output_tokens"] and row["endpoint"] == "/v1/chat/completions"


def test_copies_share_global_prefixes_and_nothing_below_them(tmp_path: Path) -> None:
    """Source: ten requests, all with block 0; two groups of two share block 1 or 2; six are alone."""
    second = [1, 1, 2, 2, 3, 4, 5, 6, 7, 8]
    source: list[Request] = [
        {"request_id": i, "arrival_ns": i, "input_tokens": 33 + i, "output_tokens": 1, "input_blocks": [0, second[i]]}
        for i in range(10)
    ]
    write_trace(tmp_path / "s", source, Footer())

    generate_from(tmp_path / "s", tmp_path / "t", 2, scale=40)

    rows = rows_of(tmp_path / "t")
    assert {row["input_blocks"][0] for row in rows} == {0}
    users: dict[int, list[int]] = {}
    for row in rows:
        users.setdefault(row["input_blocks"][1], []).append(row["input_tokens"] - 33)
    kinds = Counter(tuple(one) for one in users.values())
    assert set(kinds) == {(0, 1), (2, 3), (4,), (5,), (6,), (7,), (8,), (9,)}
    assert kinds.total() == 8 * 40


def test_wait_for_and_sub_agents_point_into_the_same_copy(tmp_path: Path) -> None:
    source: list[Request] = [
        {"request_id": 5, "arrival_ns": 0, "session_id": 0, "turn": 0, "input_tokens": 4, "agent_id": "a"},
        {"request_id": 6, "arrival_ns": 1, "session_id": 0, "turn": 1, "wait_for": [5], "parent_request_id": 5},
        {"request_id": 9, "arrival_ns": 2, "session_id": 0, "turn": 2, "wait_for": [5, 6], "parent_request_id": 6},
    ]
    write_trace(tmp_path / "s", source, Footer())

    generate_from(tmp_path / "s", tmp_path / "t", 0, scale=5)

    rows = rows_of(tmp_path / "t")
    assert len(rows) == 15
    assert len({row["session_id"] for row in rows}) == 5
    for row in rows:
        waits = [rows[one] for one in row["wait_for"] or []]
        assert all(one["session_id"] == row["session_id"] for one in waits)
        assert [one["turn"] for one in waits] == list(range(row["turn"]))
        assert (row["input_tokens_count_source"] is None) == (row["input_tokens"] is None)


def test_amount_and_duration_are_what_was_asked_for(tmp_path: Path, chat: Path) -> None:
    span_s = column(read_table(chat), "arrival_ns")[-1] / 1e9

    by_count = generate_from(chat, tmp_path / "a", 1, requests=1800)
    by_rate = generate_from(chat, tmp_path / "b", 1, requests_per_s=2 * 600 / span_s)
    longer = generate_from(chat, tmp_path / "c", 1, duration_s=3.5 * span_s)
    shorter = generate_from(chat, tmp_path / "d", 1, duration_s=span_s / 2)

    assert by_count.requests == pytest.approx(1800, rel=0.1)
    assert by_rate.requests == pytest.approx(1200, rel=0.12)
    assert longer.requests == pytest.approx(3.5 * 600, rel=0.15)
    assert span_s * 3 < longer.span_s < span_s * 3.5
    assert shorter.span_s < span_s / 2
    assert any("repeated with fresh draws" in note for note in longer.notes)
    assert_lawful(rows_of(tmp_path / "c"))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.floats(0.05, 6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_stratum_is_drawn_k_times_its_number(sizes: list[int], k: float, seed: int) -> None:
    order = np.argsort(sizes, kind="stable")

    counts = stratified_counts(order, 0, k, np.random.default_rng(seed))

    strata = [order[i : i + 16] for i in range(0, len(order), 16)]
    assert all(abs(counts[one].sum() - k * len(one)) < 1 + 1e-9 for one in strata)


def test_counts_of_a_group_vary_like_poisson_counts() -> None:
    rng = np.random.default_rng(4)

    counts = np.array([stratified_counts(np.arange(160), 0, 3.0, rng) for _ in range(400)])

    assert counts.mean() == pytest.approx(3)
    assert counts.var(axis=0).mean() == pytest.approx(3 * 3 / 4, rel=0.05)  # 3 / 4: the stratum's sum is fixed


def test_heavy_groups_are_drawn_k_times_each() -> None:
    counts = stratified_counts(np.arange(40), 10, 2.0, np.random.default_rng(1))

    assert counts[:10].tolist() == [2] * 10
    assert counts.sum() == 80


def test_wrong_wishes_and_unusable_sources_are_refused(tmp_path: Path, chat: Path) -> None:
    unchained: list[Request] = [
        {"request_id": i, "arrival_ns": i, "input_tokens": 40, "input_blocks": ids} for i, ids in enumerate(([0, 1], [2, 1]))
    ]
    write_trace(tmp_path / "unchained", unchained, Footer())
    write_trace(tmp_path / "empty", [], Footer())
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (chat, {"scale": 2, "requests": 5}, "only one of these"),
        (chat, {"scale": 0}, "`scale`"),
        (chat, {"duration_s": -1.0}, "`duration_s`"),
        (tmp_path / "unchained", {}, "unchained: block ids are not chained"),
        (tmp_path / "empty", {}, "empty: the trace has no request"),
        (tmp_path / "none", {}, "no such file"),
    ]
    for path, wishes, problem in cases:
        with pytest.raises(TraceError, match=problem):
            generate_from(path, tmp_path / "out", 0, **wishes)

    assert not (tmp_path / "out").exists()


@needs(MOONCAKE)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mooncake_bootstrap_has_the_hit_curve_and_lengths_of_its_source(tmp_path: Path, mooncake: Path, seed: int) -> None:
    path = tmp_path / "t.parquet"

    report = generate_from(mooncake, path, seed)
    found = compare((read_table(mooncake), read_footer(mooncake)), (read_table(path), read_footer(path)))

    assert_lawful(rows_of(path))
    assert report.requests == pytest.approx(7980, rel=0.03)
    assert found.passed, found.gates
    assert found["hit curve, largest error"] <= 0.015
    assert found["input tokens, KS"] <= 0.05


@needs(MOONCAKE)
def test_twice_as_many_users_have_the_hit_rate_of_half_the_cache(tmp_path: Path, mooncake: Path) -> None:
    """Fresh copies double every reuse distance: hit_2(C) ~ hit_1(C / 2)."""
    path = tmp_path / "t.parquet"

    generate_from(mooncake, path, 1, scale=2)

    one = hit_curve(touches_as_engine(read_table(mooncake), read_footer(mooncake)))
    two = hit_curve(touches_as_engine(read_table(path), read_footer(path)))
    for tokens in (2_000_000, 5_000_000, 10_000_000):
        assert two.hit_rate_at(tokens // 16) == pytest.approx(one.hit_rate_at(tokens // 32), abs=0.02)


@needs(MOONCAKE)
def test_a_quantised_recording_loses_its_grid(tmp_path: Path, mooncake: Path) -> None:
    path = tmp_path / "t.parquet"

    report = generate_from(mooncake, path, 1)

    stamps = column(read_table(path), "arrival_ns")
    assert read_footer(mooncake).time_grid_ns == 3_000_000_000
    assert read_footer(path).time_grid_ns is None
    assert "recorded grid of 3 s" in " ".join(report.notes)
    assert len(np.unique(stamps)) > 0.99 * len(stamps)
    gaps = np.diff(stamps)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.15)  # 3.0 on the grid


def test_gaps_inside_a_group_lose_the_grid_too_and_keep_their_order(tmp_path: Path) -> None:
    grid_ns = 3_000_000_000
    source: list[Request] = [
        {"request_id": i, "arrival_ns": i // 2 * grid_ns, "session_id": 0, "turn": i, "input_tokens": 5} for i in range(40)
    ]
    write_trace(tmp_path / "s", source, Footer(time_grid_ns=grid_ns))

    generate_from(tmp_path / "s", tmp_path / "t", 1)

    rows = rows_of(tmp_path / "t")
    gaps = np.diff([row["arrival_ns"] for row in rows])
    assert [row["turn"] for row in rows] == list(range(40))
    assert (gaps % grid_ns != 0).all()


@needs(AZURE)
def test_a_trace_without_blocks_keeps_its_rate_profile_and_gets_no_blocks(tmp_path: Path) -> None:
    source, path = tmp_path / "azure.parquet", tmp_path / "t.parquet"
    import_trace(AZURE, source)

    report = generate_from(source, path, 1)

    table = read_table(path)
    assert report.prefix_share is None
    assert table["input_blocks"].null_count == table.num_rows == 19_366
    profiles = [np.bincount(column(read_table(one), "arrival_ns") // 300_000_000_000)[:11] for one in (source, path)]
    assert np.corrcoef(*profiles)[0, 1] > 0.9


def test_groups_of_a_drawn_trace_are_copies_of_the_sources_groups(tmp_path: Path, chat: Path) -> None:
    generate_from(chat, tmp_path / "t", 8, scale=4)

    sizes = []
    for path in (chat, tmp_path / "t"):
        table = read_table(path)
        whole = concatenate(blocks(table, "input_blocks"), blocks(table, "output_blocks"))
        sizes.append(set(np.bincount(sharing_groups(whole, column(table, "session_id")).group_of).tolist()))

    assert sizes[1] <= sizes[0]
