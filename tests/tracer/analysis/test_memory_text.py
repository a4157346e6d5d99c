"""What the figures of KV memory say in words."""

import msgspec

from tracer.analysis import kv
from tracer.analysis.memory import CausePoint, Causes, Demand, FootprintPoint, Memory, ReuseTime
from tracer.analysis.memory_text import duration, fit_in_words, memory_in_words, tokens
from tracer.analysis.policies import EvictionPoint
from tracer.analysis.routing import Routing, RoutingPoint

BUDGET = kv.budget_without_model(kv.gpu_named("h100-80g"), 1, 72e9 / 400_000)
FIT = kv.KvFit(
    kv=None,
    budget=BUDGET,
    hit_rate=0.04,
    share_of_possible_hits=0.11,
    gain_of_ten_gb=0.0012,
    tokens_for_90_percent=16_000_000,
    replicas_for_90_percent=40,
)
MEMORY = Memory(
    footprint=[FootprintPoint(requests=1, tokens=16)],
    reuse_time=ReuseTime(p50_s=10.0, p90_s=480.0, p99_s=7200.0, histogram=[]),
    reuse_distance=None,
    marginal=[],
    eviction=[EvictionPoint(cache_tokens=16_000, fifo=0.1, lru=0.15, optimal=0.3)],
    causes=Causes(
        cold=[CausePoint(cache_tokens=16, global_prefix=0.1, own_session=0.2, sharing_group=0.1)],
        warm=[],
        warm_up_share=0.2,
        sessions_known=True,
    ),
    demand=Demand(
        at_s=[0.0],
        running_tokens=[0],
        working_set_60s_tokens=[0],
        working_set_600s_tokens=[0],
        running_mean_tokens=100_000.0,
        running_peak_tokens=1_200_000,
        assumed_ends=0,
    ),
)


def test_a_gpu_that_holds_too_little() -> None:
    assert fit_in_words(FIT) == [
        "One h100-80g without any weights holds 400.0 k tokens of KV: a hit rate of 4.0%, 11% of the possible hits.",
        "90 % of the possible hits take 40 such replicas, or as much memory beside the GPU; "
        "10 GB more on one raise the hit rate by 0.12 points.",
    ]


def test_a_model_with_windows_has_an_upper_bound() -> None:
    wide = msgspec.structs.replace(FIT, budget=msgspec.structs.replace(BUDGET, kv_tokens_beyond_window=2_000_000))

    assert "up to 2.0 M" in fit_in_words(wide)[-1]


def test_memory_in_words() -> None:
    assert memory_in_words(MEMORY, None, None) == [
        "Kept for 8.0 min after each use, blocks give 90 % of the possible hits.",
        "Running requests hold 100.0 k tokens on average, 1.2 M at most; only what they leave is cache.",
        "With 16.0 k tokens LRU serves 15.0%, the best eviction there can be 30.0%, FIFO 10.0%.",
        "Of the possible hits 25% are in prefixes that everybody shares, 50% in the conversation's own earlier turns, "
        "25% in what other conversations brought.",
    ]


def test_more_running_than_fits_is_said() -> None:
    demand = msgspec.structs.replace(MEMORY.demand, running_mean_tokens=500_000.0, assumed_ends=3)

    lines = memory_in_words(msgspec.structs.replace(MEMORY, demand=demand), FIT, None)

    assert "on average, 1.2 M at most (ends are assumed): more than one replica has" in "".join(lines)


def test_without_sessions_own_turns_are_not_told_apart() -> None:
    causes = msgspec.structs.replace(MEMORY.causes, sessions_known=False)

    lines = memory_in_words(msgspec.structs.replace(MEMORY, causes=causes), None, None)

    assert "the trace names no conversations" in lines[-1]


def test_routing_is_compared_at_what_a_replica_holds() -> None:
    points = [
        RoutingPoint(cache_tokens_per_replica=size, hit_rate=rate) for size, rate in ((1000, 0.1), (400_000, 0.2), (10**6, 0.9))
    ]
    routing = [Routing(rule="prefix_aware", replicas=4, curve=points, heaviest_share=0.3)]

    assert memory_in_words(MEMORY, FIT, routing)[-1] == "4 replicas of 400.0 k tokens each: prefix aware 20.0%."
    assert memory_in_words(MEMORY, None, routing)[-1] == "4 replicas of endless memory each: prefix aware 90.0%."


def test_sizes_and_times_read_well() -> None:
    assert [tokens(n) for n in (0, 999, 1000, 16_000_000)] == ["0", "999", "1.0 k", "16.0 M"]
    assert [duration(s) for s in (0.5, 119, 480, 7200)] == ["0.5 s", "119.0 s", "8.0 min", "2.0 h"]
