"""The dial that sets how much of all prompt tokens a cache could serve."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.generating import generate_trace
from synth.model import load_workload
from synth.prefixes import depth_seen_before, make_pools
from synth.sessions import Streams, turns_in_order
from synth.share import Skeleton, prefix_share
from tracer.errors import TraceError


@given(
    preset=st.sampled_from(["chat", "rag", "few-shot", "random"]),
    target=st.floats(0.3, 0.97),
    seed=st.integers(0, 99),
    requests=st.integers(200, 800),
)
@settings(max_examples=30, deadline=None)
def test_a_target_is_met_within_two_points_or_refused_with_the_feasible_range(
    tmp_path_factory: pytest.TempPathFactory, preset: str, target: float, seed: int, requests: int
) -> None:
    path = tmp_path_factory.mktemp("share") / "t.parquet"
    workload = load_workload(preset=preset, overrides={"prefix_share": target, "requests": requests})

    try:
        report = generate_trace(workload, seed, path)
    except TraceError as error:
        assert error.wanted is not None
        low, high = map(float, error.wanted.split(" to "))
        assert not low < target < high
        return

    assert report.prefix_share == pytest.approx(target, abs=0.02)
    assert report.prefix_share_target == target
    assert report.system_tokens_mean is not None and report.system_tokens_mean >= 0


def test_longer_system_prompts_give_a_larger_share_and_the_dial_is_monotone() -> None:
    workload = load_workload(preset="rag", overrides={"requests": 500})
    pools = make_pools(workload, Streams(1).pools)
    skeleton = Skeleton.of(turns_in_order(workload, pools, Streams(1)))

    shares = [prefix_share(skeleton, pools.scaled(factor)) for factor in np.geomspace(0.02, 60, 40)]

    assert (np.diff(shares) >= 0).all()
    assert shares[-1] - shares[0] > 0.3


def test_the_target_changes_system_prompts_only(tmp_path: Path) -> None:
    base = load_workload(preset="few-shot", overrides={"requests": 300})
    aimed = load_workload(preset="few-shot", overrides={"requests": 300, "prefix_share": 0.6})

    plain = generate_trace(base, 3, tmp_path / "plain.parquet")
    solved = generate_trace(aimed, 3, tmp_path / "solved.parquet")

    assert (solved.requests, solved.sessions, solved.span_s) == (plain.requests, plain.sessions, plain.span_s)
    assert solved.output_tokens == plain.output_tokens
    assert "on average meet the prefix share" in solved.notes[0]


def test_an_infeasible_target_names_what_would_help(tmp_path: Path) -> None:
    workload = load_workload(preset="chat", overrides={"prefix_share": 0.05})

    with pytest.raises(TraceError, match=r"saw prefix_share = 0.05, wanted 0\.\d+ to 0\.99\d\. Less: fewer turns"):
        generate_trace(workload, 0, tmp_path / "t.parquet")


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_seen_depth_is_the_longest_beginning_that_an_earlier_session_has(paths: list[tuple[int, int, int]]) -> None:
    expected = []
    for i, path in enumerate(paths):
        expected.append(max((d for d in range(4) if any(p[:d] == path[:d] for p in paths[:i])), default=0))

    assert depth_seen_before(np.array(paths)).tolist() == expected
