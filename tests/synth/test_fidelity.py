"""Distances between traces."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.fidelity import Fidelity, Trace, compare, curve_error, growth_error, ks_distance, total_variation
from synth.generating import generate_trace
from synth.model import load_workload
from tracer.analysis.reuse import HitCurve, Touches, hit_curve
from tracer.blocks import Blocks
from tracer.tracefile import read_footer, read_table


def curve(requests: list[list[int]], unit_tokens: int = 16) -> HitCurve:
    lists = Blocks.from_lists(requests)
    return hit_curve(
        Touches(
            blocks=lists,
            units=np.ones(len(lists.ids), dtype=np.int64),
            lookup_units=lists.lengths,
            prompt_tokens=lists.lengths * unit_tokens,
            unit_tokens=unit_tokens,
        )
    )


def test_a_curve_has_no_distance_to_itself_and_the_whole_distance_to_no_reuse() -> None:
    again = curve([[0, 1, 2, 3]] * 10)
    never = curve([[4 * i + j for j in range(4)] for i in range(10)])

    assert curve_error(again, again).largest == 0
    assert curve_error(again, never).largest == pytest.approx(0.9)
    assert curve_error(again, never).at_capacity_units == 4


def test_order_alone_makes_a_distance_at_small_sizes() -> None:
    close = curve([[i] for i in range(20) for _ in range(2)])
    apart = curve([[i] for i in range(20)] * 2)

    found = curve_error(close, apart)

    assert close.hit_rate_infinite == apart.hit_rate_infinite == 0.5
    assert found.largest == 0.5
    assert 0 < found.area < found.largest


def test_curves_in_other_units_are_compared_at_the_same_number_of_tokens() -> None:
    coarse = curve([[0], [1]] * 6, unit_tokens=32)
    fine = curve([[0, 1], [2, 3]] * 6, unit_tokens=16)

    assert curve_error(coarse, fine).largest == 0


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
@settings(max_examples=60, deadline=None)
def test_ks_is_the_largest_gap_between_the_distribution_functions(first: list[int], second: list[int]) -> None:
    found = ks_distance(np.array(first), np.array(second))

    if first and second:
        gaps = [abs(sum(a <= x for a in first) / len(first) - sum(b <= x for b in second) / len(second)) for x in range(10)]
        assert found == pytest.approx(max(gaps))
    else:
        assert found == float(bool(first) != bool(second))


def test_weights_count_like_repeated_values() -> None:
    first, second, weights = np.array([1, 2, 5]), np.array([2, 3]), np.array([3, 1, 2])

    assert ks_distance(first, second, weights, np.array([1, 1])) == ks_distance(np.repeat(first, weights), second)


def test_variation_is_one_between_sizes_that_never_meet_and_a_half_for_half_of_them() -> None:
    ones, fours = np.array([1, 1, 1, 1]), np.array([4, 4])

    assert total_variation(ones, ones) == 0
    assert total_variation(ones, fours) == 1
    assert total_variation(np.array([1, 4]), fours) == 0.5


def test_growth_error_sees_a_detour_that_ends_at_the_same_footprint() -> None:
    assert growth_error(np.array([1, 2, 3, 4]), np.array([1, 3, 3, 4])) == 0.25


def made(folder: Path, name: str, **dials: Any) -> Trace:
    path = folder / "t.parquet"
    generate_trace(load_workload(preset=name, overrides={"requests": 1500, **dials}), dials.pop("seed", 0), path)
    return read_table(path), read_footer(path)


def missed(found: Fidelity) -> set[str]:
    return {gate.name for gate in found.gates if not gate.passed}


def test_a_trace_is_like_itself_whatever_is_measured(tmp_path: Path) -> None:
    one = made(tmp_path, "chat")

    found = compare(one, one)

    assert found.passed and set(found.left_out) == {"dispersion per 60 s, ratio"}
    assert all(gate.value == (gate.kind == "ratio") for gate in found.gates)
    assert found.real_curve == found.synth_curve


@pytest.mark.parametrize(
    ("dials", "seen"),
    [
        ({"output_tokens": 90}, {"output tokens, KS"}),
        ({"system_prompts.tokens": 3000}, {"input tokens, KS", "hit curve, largest error", "hit curve, area"}),
        ({"think_s": 1}, {"think time, KS", "reuse time, KS"}),
        ({"turns": 1}, {"turns, variation", "group sizes, variation", "hit curve, largest error"}),
        ({"arrivals.process": "gamma", "arrivals.cv": 4.0}, {"dispersion per 10 s, ratio"}),
    ],
)
def test_each_gate_sees_what_it_is_for(tmp_path: Path, dials: dict[str, Any], seen: set[str]) -> None:
    found = compare(made(tmp_path, "chat"), made(tmp_path, "chat", **dials))

    assert seen <= missed(found)


def test_what_the_real_trace_does_not_know_is_left_out_and_another_length_is_said(tmp_path: Path) -> None:
    table, footer = made(tmp_path, "chat")
    bare = table.drop_columns(["think_ns", "session_id"])
    nulls = table.select(["think_ns", "session_id"]).slice(0, 0)
    for name in nulls.column_names:
        bare = bare.append_column(nulls.schema.field(name), pa.nulls(len(bare), nulls.schema.field(name).type))

    found = compare((bare, footer), (table.slice(0, 700), footer))

    assert set(found.left_out) == {"think time, KS", "turns, variation", "dispersion per 60 s, ratio"}
    assert found.requests == 700 and "the first 700 requests" in found.notes[0]
