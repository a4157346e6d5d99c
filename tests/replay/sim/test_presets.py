"""Presets against the figures that were published for their hardware."""

from functools import cache

import pytest

from replay.sim.engine import Engine, Request
from replay.sim.presets import PRESETS, preset_named
from tracer.errors import TraceError


@cache
def static_batch(preset: str, users: int, prompt_tokens: int = 512, answer_tokens: int = 64) -> tuple[float, int]:
    """(requests per second, preemptions) of `users` distinct requests that come at once."""
    engine = Engine(PRESETS[preset])
    for user in range(users):
        prompt = [user * 1000 + i for i in range(prompt_tokens)]
        answer = [500_000 + user * 1000 + i for i in range(answer_tokens)]
        engine.submit(Request(prompt=prompt, answer=answer, arrival_s=0.0))
    while not engine.idle:
        engine.step()
    return users / engine.now_s, engine.preemptions


def test_llama_8b_on_an_h100_takes_4_8_ms_for_one_user_and_6_5_ms_for_64() -> None:
    preset = PRESETS["h100-llama3-8b"]

    alone_s = preset.step_s(1, 680, 680)
    together_s = preset.step_s(64, 64 * 680, 64 * 680)

    assert preset.model.kv_bytes_per_token == 128 * 1024
    assert alone_s == pytest.approx(4.8e-3, rel=0.02)
    assert together_s == pytest.approx(6.5e-3, rel=0.02)
    assert 64 * alone_s / together_s == pytest.approx(47, rel=0.02)


@pytest.mark.parametrize(("users", "published"), [(1, 0.9), (64, 12.5)])
def test_mpt_7b_on_an_a100_serves_the_published_requests_per_second(users: int, published: float) -> None:
    rate, preemptions = static_batch("a100-mpt-7b", users)

    assert rate == pytest.approx(published, rel=0.05)
    assert preemptions == 0


def test_mpt_7b_on_an_a100_gains_much_from_four_users_and_little_from_the_last_doubling() -> None:
    rates = {users: static_batch("a100-mpt-7b", users)[0] for users in (1, 4, 32, 64)}

    assert rates[4] / rates[1] == pytest.approx(3.5, rel=0.05)
    assert rates[64] / rates[32] == pytest.approx(1.2, abs=0.05)


def test_mpt_7b_on_an_a10_fits_16_users_and_runs_out_of_memory_at_32() -> None:
    kv_tokens = PRESETS["a10-mpt-7b"].kv_blocks * 16

    assert 16 * (512 + 64) <= kv_tokens < 32 * (512 + 64)
    assert static_batch("a10-mpt-7b", 16)[1] == 0
    assert static_batch("a10-mpt-7b", 32)[1] > 0


def test_kv_memory_is_what_the_weights_leave_unless_given() -> None:
    computed = PRESETS["h100-llama3-8b"]

    assert computed.kv_blocks == int((80e9 * 0.9 - 16.06e9) // (131072 * 16))
    assert PRESETS["laptop-demo"].kv_blocks == 60_000 // 16


def test_a_step_takes_longer_with_more_context_and_with_more_tokens() -> None:
    preset = PRESETS["laptop-demo"]

    assert preset.step_s(1, 100_000, 100_000) > preset.step_s(1, 10, 10) > preset.overhead_s
    assert preset.step_s(4000, 4000, 8_000_000) > 1.9 * preset.step_s(2000, 2000, 2_000_000)


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(TraceError, match="h100-llama3-8b"):
        preset_named("h200")
