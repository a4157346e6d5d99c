"""Flags of `chatreel generate` in the synthesizer's words."""

import pytest

from chatreel.generating import parse_diurnal, parse_hit_rate, parse_lengths
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
