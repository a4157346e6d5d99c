"""Flags of `chatreel generate` in the synthesizer's words."""

import pytest

from chatreel.generating import parse_hit_rate
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
