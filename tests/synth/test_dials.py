"""Laws of the dials: each changes one thing and keeps the rest."""

from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.arrivals import NS, diurnal, gamma_starts
from synth.generating import generate_trace
from synth.lengths import counts
from synth.model import Distribution, load_workload, presets
from synth.prefixes import make_pools
from synth.sessions import Streams, Turns, mean_session_s, turns_in_order
from synth.share import Skeleton, prefix_share
from tests.synth.test_generated_rows import workloads
from tracer.errors import TraceError
from tracer.tracefile import read_table

PRESETS = list(presets())


def drawn(seed: int = 0, preset: str | None = None, **dials: Any) -> Turns:
    workload = load_workload(preset=preset, overrides={name.replace("__", "."): value for name, value in dials.items()})
    return Turns.joined(list(turns_in_order(workload, make_pools(workload, Streams(seed).pools), Streams(seed))))


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    return float(pl.DataFrame({"a": first, "b": second}).select(pl.corr("a", "b", method="spearman")).item())


def ks(first: np.ndarray, second: np.ndarray) -> float:
    at = np.concatenate([first, second])
    shares = [np.searchsorted(np.sort(one), at, side="right") / len(one) for one in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())


@given(preset=st.sampled_from(PRESETS), seeds=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)))
@settings(max_examples=25, deadline=None)
def test_the_same_dials_give_the_same_distributions_whatever_the_seed(preset: str, seeds: tuple[int, int]) -> None:
    one, other = (drawn(seed, preset, requests=4000) for seed in seeds)

    first = [turns.turn == 0 for turns in (one, other)]
    assert ks(one.new_tokens, other.new_tokens) < 0.06
    assert ks(one.output_tokens, other.output_tokens) < 0.06
    assert ks(np.diff(one.arrival_ns[first[0]]), np.diff(other.arrival_ns[first[1]])) < 0.2
    assert first[0].sum() == pytest.approx(first[1].sum(), rel=0.25)


@given(workload=workloads(), seed=st.integers(0, 99), more=st.integers(1, 200))
@settings(max_examples=40, deadline=None)
def test_a_longer_trace_begins_with_the_shorter_one_so_no_session_is_split(
    tmp_path_factory: pytest.TempPathFactory, workload: Any, seed: int, more: int
) -> None:
    folder = tmp_path_factory.mktemp("longer")
    table = msgspec.to_builtins(workload)
    longer = load_workload(overrides=table | {"requests": workload.requests + more})
    try:
        generate_trace(workload, seed, folder / "short.parquet")
    except TraceError:
        return
    generate_trace(longer, seed, folder / "long.parquet")

    short, long = read_table(folder / "short.parquet"), read_table(folder / "long.parquet")

    assert long.slice(0, short.num_rows).to_pylist() == short.to_pylist()


@given(
    preset=st.sampled_from(["chat", "rag", "few-shot", "long-document", "merged", "random"]),
    seed=st.integers(0, 2**40),
    factors=st.lists(st.floats(0.02, 50), min_size=2, max_size=6).map(sorted),
)
@settings(max_examples=40, deadline=None)
def test_sharing_grows_with_the_length_of_system_prompts(preset: str, seed: int, factors: list[float]) -> None:
    workload = load_workload(preset=preset, overrides={"requests": 800, "system_prompts.tokens": 640})
    pools = make_pools(workload, Streams(seed).pools)
    skeleton = Skeleton.of(turns_in_order(workload, pools, Streams(seed)))

    shares = [prefix_share(skeleton, pools.scaled(factor)) for factor in factors]

    assert (np.diff(shares) >= -0.005).all()  # lengths move in whole blocks: where a tail ends may cost one block


@given(preset=st.sampled_from(PRESETS), spearman_wanted=st.floats(-0.9, 0.9), seed=st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_input_and_output_keep_their_rank_correlation_and_their_own_lengths(
    preset: str, spearman_wanted: float, seed: int
) -> None:
    dials = {"requests": 5000, "messages_per_request": 1}
    tied = drawn(seed, preset, **dials, input_output_correlation=spearman_wanted)
    free = drawn(seed, preset, **dials, input_output_correlation=0.0)

    assert spearman(tied.new_tokens, tied.output_tokens) == pytest.approx(spearman_wanted, abs=0.08)
    assert ks(tied.output_tokens, free.output_tokens) < 0.06
    assert ks(tied.new_tokens, free.new_tokens) < 0.06


def test_a_number_of_users_is_how_many_sessions_are_under_way() -> None:
    dials: dict[str, Any] = {"duration_s": 40_000, "arrivals__users": 40, "think_s": {"mean": 20.0}, "input_tokens": 50}
    turns = drawn(1, "chat", **dials)
    workload = load_workload(preset="chat", overrides={"think_s": {"mean": 20.0}})

    begin, end = 10_000 * NS, 40_000 * NS
    first = np.flatnonzero(turns.turn == 0)
    leaves = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(leaves, turns.session, turns.arrival_ns + turns.service_ns)
    inside = np.clip(leaves, begin, end) - np.clip(turns.arrival_ns[first], begin, end)

    assert inside.sum() / (end - begin) == pytest.approx(40, rel=0.08)
    assert len(first) / 40_000 * mean_session_s(workload) == pytest.approx(40, rel=0.08)


@pytest.mark.parametrize("amplitude", [0.3, 1.0])
def test_the_rate_swings_around_its_mean_with_the_amplitude_and_period_that_were_asked_for(amplitude: float) -> None:
    starts = np.concatenate(list(islice(diurnal(gamma_starts(20.0, 1.0, np.random.default_rng(3)), amplitude, 1000), 200)))
    periods = int(starts[-1] // (1000 * NS))
    starts = starts[starts < periods * 1000 * NS]

    phase = 2 * np.pi * starts / (1000 * NS)

    assert (np.diff(starts) >= 0).all()
    assert len(starts) / (periods * 1000) == pytest.approx(20, rel=0.03)
    assert 2 * np.sin(phase).mean() == pytest.approx(amplitude, abs=0.03)
    assert np.cos(phase).mean() == pytest.approx(0, abs=0.02)


def test_depth_puts_more_documents_before_the_question_and_leaves_the_rest_alone() -> None:
    plain, deep = (drawn(4, "rag", requests=1000, documents__per_session=depth) for depth in (1, 5))

    assert (plain.choice.shape[1], deep.choice.shape[1]) == (2, 6)
    for name in ("arrival_ns", "session", "turn", "new_tokens", "output_tokens"):
        assert (getattr(plain, name) == getattr(deep, name)).all()


def test_merged_requests_hold_the_messages_of_the_chat_each_once() -> None:
    chat, merged = (drawn(5, preset, duration_s=600) for preset in ("chat", "merged"))

    assert merged.new_tokens.sum() == (chat.history + chat.new_tokens).sum()
    assert merged.output_tokens.sum() == chat.output_tokens.sum()
    assert 3 < len(chat) / len(merged) < 5
    assert set(merged.arrival_ns) <= set(chat.arrival_ns)  # sent when the last message has come
    assert (merged.turn == 0).all() and merged.is_last.all()


def test_merged_requests_share_the_system_prompt_only(tmp_path: Path) -> None:
    generate_trace(load_workload(preset="merged", overrides={"requests": 200}), 0, tmp_path / "t.parquet")

    rows = read_table(tmp_path / "t.parquet", ["input_blocks"]).to_pylist()

    assert all(row["input_blocks"][:50] == list(range(50)) for row in rows)  # 800 tokens
    rest = np.concatenate([row["input_blocks"][50:] for row in rows])
    assert len(np.unique(rest)) == len(rest)


def test_messages_of_users_with_different_system_prompts_are_not_packed() -> None:
    with pytest.raises(TraceError, match=r"messages_per_request.*3 system prompts.*one system prompt"):
        load_workload(preset="merged", overrides={"system_prompts.count": 3})


def test_a_request_packs_as_many_messages_as_drawn() -> None:
    merged = drawn(6, None, requests=300, messages_per_request=3, input_tokens=10, output_tokens=2)

    assert (merged.new_tokens == 30).all() and (merged.output_tokens == 6).all()
    assert counts(Distribution(min=2, max=6), np.array([-9.0, 9.0])).tolist() == [2, 6]
