"""A tenth of the groups on a tenth of the cache behaves as the whole does."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis.reuse import HitCurve, hit_curve, touches_as_in_source
from tracer.errors import TraceError
from tracer.importing import import_trace
from tracer.surgery.thinning import chosen_groups, thin_trace
from tracer.tracefile import iter_requests, read_footer, read_table

MOONCAKE = Path(__file__).resolve().parents[4] / "shared/traces/mooncake/conversation_trace.head.jsonl"


def curve(path: Path) -> HitCurve:
    return hit_curve(touches_as_in_source(read_table(path), read_footer(path)))


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the public Mooncake trace is not beside this checkout")
def test_a_tenth_of_mooncake_has_the_hit_rate_of_the_whole_at_a_tenth_of_the_cache(tmp_path: Path) -> None:
    import_trace(MOONCAKE, tmp_path / "m.parquet")
    whole = curve(tmp_path / "m.parquet")
    sizes = np.geomspace(1_000, whole.unique, 12).astype(int).tolist()
    worst = []
    kept = set()
    for seed in range(8):
        count, *_ = thin_trace(tmp_path / "m.parquet", tmp_path / f"{seed}.parquet", 0.1, seed)
        small = curve(tmp_path / f"{seed}.parquet")
        worst.append(max(abs(small.hit_rate_at(size // 10) - whole.hit_rate_at(size)) for size in sizes))
        kept.add((count, small.hits_infinite))

    assert max(worst) <= 0.06, worst
    assert len(kept) == 8  # seeds make a difference


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.floats(0.01, 1.0), st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_the_share_of_groups_is_kept_to_one_and_all_of_them_at_one(groups: list[int], keep: float, seed: int) -> None:
    _, group_of = np.unique(groups, return_inverse=True)
    count = int(group_of.max()) + 1

    sizes = np.bincount(group_of)[:, None].astype(float)
    chosen = chosen_groups(sizes, keep, np.random.default_rng(seed))
    every = chosen_groups(sizes, 1.0, np.random.default_rng(seed))

    assert every.all()
    assert 1 <= chosen.sum() and abs(int(chosen.sum()) - keep * count) <= 1


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the public Mooncake trace is not beside this checkout")
def test_the_same_seed_keeps_the_same_requests_and_all_at_one(tmp_path: Path) -> None:
    source = tmp_path / "head.jsonl"
    source.write_text("".join(MOONCAKE.read_text().splitlines(keepends=True)[:300]))
    import_trace(source, tmp_path / "m.parquet")

    kept = [thin_trace(tmp_path / "m.parquet", tmp_path / f"{k}.parquet", 0.3, seed) for k, seed in enumerate((1, 1, 2))]
    every = thin_trace(tmp_path / "m.parquet", tmp_path / "all.parquet", 1.0)

    arrivals = [[row["arrival_ns"] for row in iter_requests(tmp_path / f"{k}.parquet")] for k in range(3)]
    assert arrivals[0] == arrivals[1] != arrivals[2]
    assert kept[0][0] == len(arrivals[0]) and every[0] == 300 and every[1] == every[2]


def test_no_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no share of a trace; saw 0"):
        thin_trace(tmp_path / "x.parquet", tmp_path / "y.parquet", 0)
