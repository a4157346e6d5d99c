"""Variants of the cache: what is evicted first, host memory behind the GPU's, whole prefills; conservation laws of each."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.sim.cache import BlockCache
from replay.sim.engine import Engine, Request
from replay.sim.eviction import LeafCache
from replay.sim.presets import PRESETS, Preset, changed
from replay.sim.virtual import Fleet, play
from tests.replay.sim.test_engine import BLOCK, drain, plain_lru_hits, small_preset, workloads
from tests.replay.sim.test_virtual_play import SMALL, chats, played
from tracer.errors import TraceError

VARIANTS: list[dict[str, Any]] = [
    {"eviction": "fifo"},
    {"eviction": "priority", "protected_tokens": 160},
    {"offload_tokens": 2048},
    {"offload_tokens": 96, "eviction": "fifo"},
    {"offload_tokens": 2048, "chunked_prefill": False},
    {"chunked_prefill": False},
]
variants = st.sampled_from(VARIANTS)
loads = st.fixed_dictionaries(
    {
        "sessions": st.integers(1, 10),
        "turns": st.integers(1, 4),
        "new": st.integers(1, 200),
        "output": st.integers(1, 60),
        "gap_s": st.sampled_from([0.0, 0.05, 2.0]),
    }
)


@given(load=loads, variant=variants, kv_blocks=st.integers(60, 200), block_tokens=st.sampled_from([8, 16, 32]))
@settings(max_examples=60, deadline=None)
def test_no_request_no_token_and_no_block_is_lost(
    load: dict[str, Any], variant: dict[str, Any], kv_blocks: int, block_tokens: int
) -> None:
    plan = chats(**load)
    preset = replace(SMALL, kv_tokens=kv_blocks * 16, block_tokens=block_tokens, max_num_batched_tokens=900, **variant)

    fleet = Fleet(plan, preset, 1, "rr")
    outcomes = []
    while fleet.is_busy:
        outcomes += list(fleet.advance())
    last = fleet.sample(fleet.end_s)

    assert sorted(one.request_id for one in outcomes) == list(range(len(plan)))
    done = [one for one in outcomes if one.error_kind is None]
    assert all(one.input_tokens == one.planned_input_tokens and one.output_tokens == one.planned_output_tokens for one in done)
    assert last.generation_tokens == sum(one.output_tokens or 0 for one in done)
    assert last.prefix_queries_tokens == sum(one.input_tokens or 0 for one in done)
    assert (last.prefix_hits_tokens or 0) + (last.host_hits_tokens or 0) == sum(one.cached_tokens or 0 for one in done)
    cache = fleet.engines[0].cache
    assert cache.free == cache.total and not any(cache.references)


@given(load=loads, variant=variants, kv_blocks=st.integers(60, 200), replicas=st.integers(1, 2))
@settings(max_examples=40, deadline=None)
def test_runs_of_steps_at_once_end_like_single_steps(
    load: dict[str, Any], variant: dict[str, Any], kv_blocks: int, replicas: int
) -> None:
    preset = replace(SMALL, kv_tokens=kv_blocks * 16, max_num_batched_tokens=900, **variant)
    options: dict[str, Any] = {"replicas": replicas, "router": "prefix", "sample_s": 0.05}

    at_once = list(play(chats(**load), preset, **options))

    assert at_once == list(play(chats(**load), preset, **options, stepwise=True))


@given(data=st.data(), kv_blocks=st.integers(6, 30), host_blocks=st.integers(0, 20), more=st.integers(1, 10))
@settings(max_examples=100, deadline=None)
def test_more_memory_in_either_tier_never_lowers_the_hits_of_requests_one_at_a_time(
    data: st.DataObject, kv_blocks: int, host_blocks: int, more: int
) -> None:
    work = data.draw(workloads(capacity=kv_blocks * BLOCK, largest=20))
    ours = sum(found(work, kv_blocks, offload_tokens=host_blocks * BLOCK))

    assert sum(found(work, kv_blocks + more, offload_tokens=host_blocks * BLOCK)) >= ours
    assert sum(found(work, kv_blocks, offload_tokens=(host_blocks + more) * BLOCK)) >= ours


@given(data=st.data(), kv_blocks=st.integers(6, 30), host_blocks=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_both_tiers_together_are_one_lru_list(data: st.DataObject, kv_blocks: int, host_blocks: int) -> None:
    work = data.draw(workloads(capacity=kv_blocks * BLOCK, largest=20))

    assert found(work, kv_blocks, offload_tokens=host_blocks * BLOCK) == plain_lru_hits(work, kv_blocks + host_blocks)


@given(data=st.data(), kv_blocks=st.integers(6, 30))
@settings(max_examples=100, deadline=None)
def test_leaves_in_order_of_their_last_release_are_lru(data: st.DataObject, kv_blocks: int) -> None:
    work = data.draw(workloads(capacity=kv_blocks * BLOCK, largest=20))
    leaves = Engine(small_preset(kv_blocks))
    leaves.cache = LeafCache(kv_blocks, renewed=True)

    assert found(work, kv_blocks, leaves) == found(work, kv_blocks)


def found(work: list[tuple[list[int], list[int]]], kv_blocks: int, engine: Engine | None = None, **variant: Any) -> list[int]:
    """Cached tokens of each request, wherever they were."""
    engine = engine or Engine(replace(small_preset(kv_blocks), **variant))
    cached = []
    for prompt, answer in work:
        request = Request(prompt=prompt, answer=answer, arrival_s=engine.now_s)
        engine.submit(request)
        drain(engine)
        assert request.cached_tokens is not None
        cached.append(request.cached_tokens)
        assert engine.cache.free == kv_blocks
    return cached


def write(cache: BlockCache, names: list[int]) -> None:
    """A request with these blocks that has ended."""
    known = cache.leading_run(names, len(names))
    cache.hold(known)
    new = cache.take(len(names) - len(known))
    cache.give_names(new, names[len(known) :])
    cache.release(known + new)


def evicted(cache: BlockCache, names: list[int], count: int) -> list[int]:
    cache.take(count)
    return [name for name in names if not cache.knows(name)]


def test_first_in_first_out_does_not_care_for_hits() -> None:
    fifo, lru = LeafCache(4, renewed=False), LeafCache(4, renewed=True)
    for cache in (fifo, lru):
        write(cache, [1, 2])
        write(cache, [7, 8])
        write(cache, [1, 2])

    assert evicted(fifo, [1, 2, 7, 8], 2) == [1, 2]
    assert evicted(lru, [1, 2, 7, 8], 2) == [7, 8]


def test_a_block_that_others_go_on_from_stays() -> None:
    cache = LeafCache(4, renewed=False)
    write(cache, [1, 2])
    write(cache, [1, 3, 4])

    assert evicted(cache, [1, 2, 3, 4], 3) == [2, 3, 4]


def test_the_protected_beginning_outlives_what_was_used_since() -> None:
    cache = LeafCache(4, renewed=True, protected_blocks=1)
    write(cache, [1, 2])
    write(cache, [7, 8])

    assert evicted(cache, [1, 2, 7, 8], 2) == [2, 8]
    assert evicted(cache, [1, 7], 1) == [1]


def test_a_block_that_moves_to_a_newer_copy_keeps_its_place_in_the_tree() -> None:
    cache = LeafCache(3, renewed=False)
    write(cache, [1, 2])
    copy = cache.take(1)
    cache.give_names(copy, [1])
    cache.release(copy)

    assert evicted(cache, [1, 2], 1) == []  # the older copy
    assert evicted(cache, [1, 2], 1) == [2]
    cache.reset()
    assert cache.take(1) and not cache.knows(1)


def test_a_hit_in_host_memory_costs_its_transfer_and_is_counted_apart() -> None:
    preset = replace(small_preset(6), offload_tokens=100 * BLOCK)
    engine, prompt = Engine(preset), list(range(4 * BLOCK + 1))
    for one in (prompt, [70] * 20, prompt):
        engine.submit(Request(prompt=one, answer=[90], arrival_s=engine.now_s))
    drain_s = []
    while not engine.idle:
        step = engine.step()
        drain_s.append(step.end_s - step.start_s)

    block_s = BLOCK * preset.model.kv_bytes_per_token / 25e9
    gpu, host = engine.prefix_cache_hits, engine.host_hits
    assert host and gpu + host == 4 * BLOCK
    assert drain_s[-1] == pytest.approx(preset.step_s(1, 17, 17) + host // BLOCK * block_s)
    assert len(engine.cache.host or []) + engine.cache.cached >= 9  # type: ignore[arg-type,union-attr]


def test_what_was_evicted_to_the_host_is_found_there_under_load() -> None:
    plan = chats(20, 4, new=120, gap_s=0.1)
    rates = []
    for offload_tokens in (0, 4096, 65536):
        outcomes, samples = played(plan, preset=replace(SMALL, kv_tokens=2048, offload_tokens=offload_tokens))
        rates.append(sum(one.cached_tokens or 0 for one in outcomes) / sum(one.input_tokens or 1 for one in outcomes))
        assert (samples[-1].host_hits_tokens is None) == (not offload_tokens)

    assert rates[0] < rates[1] < rates[2]


def test_a_protected_system_prompt_survives_strangers_that_push_it_out_of_an_lru() -> None:
    system = [1] * 8
    work = []
    for number in range(6):
        work += [([*system, number], [90]), ([100 + number] * 30, [91]), ([200 + number] * 30, [91])]

    lru = found(work, 14)
    priority = found(work, 14, eviction="priority", protected_tokens=8)

    assert sum(lru) == 0
    assert priority[3::3] == [8] * 5


def test_a_whole_prompt_is_computed_in_one_step_or_waits() -> None:
    engine = Engine(replace(small_preset(100, batched_tokens=44), chunked_prefill=False))
    for i in range(2):
        engine.submit(Request(prompt=[i] * 40, answer=[80, 81, 82], arrival_s=0.0))

    computed = [engine.step().computed_tokens for _ in range(4)]

    assert computed == [40, 41, 2, 1]
    assert engine.idle
    assert engine.refusal(40, 4) is None and "maximum context length is 44" in str(engine.refusal(40, 5))


def test_without_chunks_the_budget_takes_the_longest_prompt() -> None:
    preset = PRESETS["laptop-demo"]

    assert changed(preset, chunked_prefill=False).max_num_batched_tokens == preset.model.max_model_len
    assert changed(preset, chunked_prefill=False, max_num_batched_tokens=512).max_num_batched_tokens == 512


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"eviction": "random"}, "lru"),
        ({"eviction": "priority"}, "protected_tokens = 0"),
        ({"protected_tokens": 5}, "eviction = lru"),
        ({"offload_tokens": -1}, "host memory"),
        ({"offload_tokens": 10, "offload_bytes_per_s": 0.0}, "bandwidth"),
    ],
)
def test_what_cannot_run_is_refused(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        changed(PRESETS["laptop-demo"], **wishes)


def test_a_transfer_needs_the_bytes_of_kv() -> None:
    unknown: Preset = replace(PRESETS["laptop-demo"], model=replace(PRESETS["laptop-demo"].model, kv_bytes_per_token=0))

    with pytest.raises(TraceError, match="no transfer can be timed"):
        changed(unknown, offload_tokens=1000)
