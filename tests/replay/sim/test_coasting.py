"""A run of like steps at once gives what the same steps give one by one, to the last bit."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replay.sim.coasting import Coaster
from replay.sim.engine import Engine, Request
from replay.sim.presets import preset_named
from replay.sim.virtual import play
from tests.replay.sim.test_virtual_play import SMALL, chats, impatient, plan_of

LOADS = st.fixed_dictionaries(
    {
        "sessions": st.integers(1, 8),
        "turns": st.integers(1, 3),
        "new": st.integers(1, 200),
        "output": st.integers(1, 80),
        "gap_s": st.sampled_from([0.0, 0.01, 0.05, 2.0]),
    }
)
LIMITS = st.fixed_dictionaries(
    {
        "kv_tokens": st.integers(40, 200).map(lambda blocks: blocks * 16),
        "max_num_seqs": st.integers(1, 12),
        "max_num_batched_tokens": st.integers(8, 600),
        "block_tokens": st.sampled_from([1, 8, 16, 32]),
    }
)


@given(
    load=LOADS,
    limits=LIMITS,
    replicas=st.integers(1, 3),
    router=st.sampled_from(["prefix", "sticky", "rr"]),
)
@example(
    load={"sessions": 10, "turns": 2, "new": 50, "output": 150, "gap_s": 0.0},
    limits={"kv_tokens": 1600, "max_num_seqs": 12, "max_num_batched_tokens": 512, "block_tokens": 16},
    replicas=1,
    router="prefix",
)
@example(  # prompts of several chunks beside others that get their tokens, in room that is too small for all
    load={"sessions": 8, "turns": 3, "new": 200, "output": 80, "gap_s": 0.01},
    limits={"kv_tokens": 2400, "max_num_seqs": 12, "max_num_batched_tokens": 40, "block_tokens": 8},
    replicas=1,
    router="prefix",
)
@settings(max_examples=60, deadline=None)
def test_conversations_end_alike(load: dict[str, Any], limits: dict[str, Any], replicas: int, router: Any) -> None:
    options: dict[str, Any] = {"replicas": replicas, "router": router, "sample_s": 0.05}
    preset = replace(SMALL, **limits)

    at_once = list(play(chats(**load), preset, **options))

    assert at_once == list(play(chats(**load), preset, **options, stepwise=True))


@given(
    load=LOADS,
    limits=LIMITS,
    replicas=st.integers(1, 2),
    every=st.integers(1, 3),
    patience_ms=st.sampled_from([0, 5, 50, 400, 3000]),
    asked_more=st.sampled_from([0, 30]),
)
@settings(max_examples=60, deadline=None)
def test_hang_ups_come_between_the_same_steps(
    load: dict[str, Any], limits: dict[str, Any], replicas: int, every: int, patience_ms: int, asked_more: int
) -> None:
    options: dict[str, Any] = {"replicas": replicas, "router": "prefix", "sample_s": 0.05, "hang_up": True}
    plan, preset = impatient(chats(**load), every, patience_ms * 1_000_000, asked_more), replace(SMALL, **limits)

    at_once = list(play(plan, preset, **options))

    assert at_once == list(play(plan, preset, **options, stepwise=True))


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "arrival_ns": st.integers(0, 2 * 10**8),
                "path": st.integers(0, 2),
                "input_tokens": st.integers(1, 200),
                "output_tokens": st.integers(1, 120),
            }
        ),
        min_size=1,
        max_size=16,
    ),
    kv_blocks=st.integers(20, 60),
)
@settings(max_examples=60, deadline=None)
def test_requests_that_write_the_same_blocks_end_alike(rows: list[dict[str, Any]], kv_blocks: int) -> None:
    """Prompts and answers out of three texts: blocks clash, and the queue waits for what others are writing."""
    written = []
    for row in rows:
        text = [100 * row["path"] + place for place in range((row["input_tokens"] + row["output_tokens"]) // 16)]
        prompt = row["input_tokens"] // 16
        written.append({**row, "input_blocks": text[:prompt], "output_blocks": text[prompt:]})
    plan = plan_of(sorted(written, key=lambda row: int(row["arrival_ns"])))
    preset = replace(SMALL, kv_tokens=kv_blocks * 16)
    options: dict[str, Any] = {"replicas": 1, "router": "rr", "sample_s": 0.05}

    assert list(play(plan, preset, **options)) == list(play(plan, preset, **options, stepwise=True))


def test_an_answer_alone_is_one_run_and_stops_where_it_is_told() -> None:
    engine = Engine(preset_named("laptop-demo"))
    engine.submit(Request(prompt=range(40), answer=range(100), arrival_s=0.0))
    coaster = Coaster(engine)

    prompt = coaster.run(1e9)
    first = coaster.run(engine.now_s + 5 * engine.preset.step_s(1, 41, 41))
    rest = coaster.run(1e9)

    assert (len(prompt.ends_s), prompt.tokens) == (1, 1)
    assert (first.tokens, first.finished) == (5, [])
    assert (rest.tokens, len(rest.finished)) == (94, 1)
    assert engine.idle and engine.cache.free == engine.cache.total


def test_a_long_prompt_beside_answers_is_left_to_no_single_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is preempted here, so the crowd is never taken apart."""
    preset = replace(SMALL, max_num_batched_tokens=64, kv_tokens=16_000)
    plan = chats(6, 3, new=300, output=100, gap_s=0.05)
    options: dict[str, Any] = {"replicas": 1, "router": "prefix", "sample_s": 0.05}
    stepwise = list(play(plan, preset, **options, stepwise=True))

    monkeypatch.delattr(Engine, "step")

    assert list(play(plan, preset, **options)) == stepwise


def test_the_soonest_end_is_known_while_requests_lag_behind() -> None:
    engine = Engine(preset_named("laptop-demo"))
    for answer in (50, 9):
        engine.submit(Request(prompt=range(40), answer=range(answer), arrival_s=0.0))
    coaster = Coaster(engine)

    before = coaster.steps_to_next_end
    coaster.run(1e9)
    after = coaster.steps_to_next_end
    coaster.run(engine.now_s + 1e-6)

    assert (before, after, coaster.steps_to_next_end) == (inf, 8, 7)
