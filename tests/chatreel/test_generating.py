"""Flags of `chatreel generate` in the synthesizer's words."""

import pytest

from chatreel.generating import GenerateOptions, parse_dial, parse_diurnal, parse_hit_rate, parse_lengths, wishes_of
from synth.dials import Dial, Length
from synth.model import Distribution
from tracer.errors import TraceError


@pytest.mark.parametrize(
    ("text", "expected"), [("0.6@400k", (0.6, 400_000)), (".55@1.5M", (0.55, 1_500_000)), ("0.6@32_000", (0.6, 32_000))]
)
def test_a_hit_rate_names_its_kv_size(text: str, expected: tuple[float, int]) -> None:
    assert parse_hit_rate(text) == expected


@pytest.mark.parametrize("text", ["0.6", "0.6@", "60%@400k", "0.6@400g", "x@1k"])
def test_a_hit_rate_without_a_size_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match="0.6@400k"):
        parse_hit_rate(text)


def test_a_swing_of_the_rate_names_its_period_and_lasts_a_day_otherwise() -> None:
    assert [parse_diurnal(text) for text in ("0.5@2h", "1", ".3@90", "0.3@1.5d")] == [
        (0.5, 7200.0),
        (1.0, 86_400.0),
        (0.3, 90.0),
        (0.3, 129_600.0),
    ]
    with pytest.raises(TraceError, match="0.5@24h"):
        parse_diurnal("0.5@week")


def test_lengths_are_a_number_or_two_percentiles() -> None:
    assert parse_lengths("--input-tokens", None) is None
    assert parse_lengths("--input-tokens", "120") == {"constant": 120}
    assert parse_lengths("--input-tokens", "120:3000") == {"p50": 120, "p99": 3000}
    with pytest.raises(TraceError, match="--input-tokens.*p50:p99"):
        parse_lengths("--input-tokens", "120-3000")


def test_a_dial_is_a_number_or_a_factor() -> None:
    assert parse_dial("--turns", None) is None
    assert parse_dial("--turns", "2.5") == Dial(value=2.5)
    assert parse_dial("--turns", "x.5") == Dial(value=0.5, is_factor=True)
    for text in ("2x", "x", "-1", "x-2", "two"):
        with pytest.raises(TraceError, match=r"--turns.*x2"):
            parse_dial("--turns", text)


def test_what_a_model_is_asked_for() -> None:
    found = wishes_of(GenerateOptions(input_tokens="x2", output_tokens="100:900", hit_rate="0.5@10k", think="x0"))

    assert found.input_tokens == Length(factor=2.0)
    assert found.output_tokens == Length(law=Distribution(p50=100, p99=900))
    assert (found.hit_rate, found.hit_rate_at_tokens, found.think_s) == (0.5, 10_000, Dial(value=0.0, is_factor=True))
    with pytest.raises(TraceError, match=r"--input-tokens.*0 < p50 <= p99"):
        wishes_of(GenerateOptions(input_tokens="900:100"))
