"""The dial that sets the hit rate of a KV cache of a stated size."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.generating import generate_trace
from synth.hit_rate import touches
from synth.model import load_workload, presets
from synth.prefixes import make_pools
from synth.sessions import Streams, turns_in_order
from synth.share import Skeleton
from tests.synth.test_generated_rows import workloads
from tracer.analysis.reuse import HitCurve, hit_curve, touches_as_engine
from tracer.errors import TraceError
from tracer.tracefile import read_footer, read_table


def analyzed(path: Path) -> HitCurve:
    return hit_curve(touches_as_engine(read_table(path), read_footer(path)))


@pytest.mark.parametrize("kv_tokens", [100_000, 400_000])
@pytest.mark.parametrize("name", presets())
def test_every_target_is_met_within_two_points_or_refused_with_the_range_and_the_reason(
    tmp_path: Path, name: str, kv_tokens: int
) -> None:
    met = 0
    for target in np.arange(1, 10) / 10:
        dials = {"requests": 1500, "hit_rate": float(target), "hit_rate_at_tokens": kv_tokens}
        try:
            report = generate_trace(load_workload(preset=name, overrides=dials), 0, tmp_path / "t.parquet")
        except TraceError as error:
            assert error.wanted is not None and error.next_step is not None
            low, high = map(float, error.wanted.split(" to "))
            assert not low < target < high
            assert ("without any system prompt" if target < low else "push each other") in error.next_step
            continue

        assert analyzed(tmp_path / "t.parquet").hit_rate_at(kv_tokens // 16) == pytest.approx(target, abs=0.02)
        assert report.requests == 1500
        met += 1

    assert met >= 1
    assert met == 9 or name not in ("few-shot", "random")  # single turns: nothing but the system prompt is shared


@given(workloads(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_levels_and_turns_as_units_give_the_curve_of_the_blocks(
    tmp_path_factory: pytest.TempPathFactory, workload: object, seed: int
) -> None:
    path = tmp_path_factory.mktemp("curve") / "t.parquet"
    pools = make_pools(workload, Streams(seed).pools)  # type: ignore[arg-type]
    try:
        generate_trace(workload, seed, path)  # type: ignore[arg-type]
    except TraceError:
        return

    skeleton = Skeleton.of(turns_in_order(workload, pools, Streams(seed)))  # type: ignore[arg-type]
    found, expected = hit_curve(touches(skeleton, pools)), analyzed(path)

    assert found.prompt_tokens == expected.prompt_tokens and found.unique == expected.unique
    for size in {0, 1, 5, *np.linspace(0, expected.unique, 9).astype(int).tolist()}:
        assert found.hits_at(size) == expected.hits_at(size)


def test_only_system_prompts_change(tmp_path: Path) -> None:
    base = generate_trace(load_workload(preset="rag", overrides={"requests": 400}), 3, tmp_path / "plain.parquet")
    dials = {"requests": 400, "hit_rate": 0.7, "hit_rate_at_tokens": 200_000}
    solved = generate_trace(load_workload(preset="rag", overrides=dials), 3, tmp_path / "solved.parquet")

    columns = ["arrival_ns", "output_tokens", "session_id", "turn", "think_ns"]
    assert read_table(tmp_path / "plain.parquet", columns).equals(read_table(tmp_path / "solved.parquet", columns))
    assert solved.input_tokens != base.input_tokens
    assert "LRU hit rate of 0.7" in solved.notes[0] or "LRU hit rate of 0.69" in solved.notes[0]


@pytest.mark.parametrize(
    ("dials", "problem"),
    [
        ({"hit_rate": 0.5}, "hit_rate and hit_rate_at_tokens together"),
        ({"hit_rate": 0.5, "hit_rate_at_tokens": 1000, "prefix_share": 0.5}, "one of hit_rate and prefix_share"),
        ({"hit_rate": 1.5, "hit_rate_at_tokens": 1000}, "`hit_rate`"),
    ],
)
def test_half_a_target_and_two_targets_are_refused(dials: dict[str, float], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        load_workload(preset="chat", overrides=dials)
