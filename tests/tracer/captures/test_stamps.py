"""Wall-clock stamps of logs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.captures.stamps import BadStamp, duration_ns, since, stamp_in, wall_ns

NS = 1_760_000_000_123_456_000


@pytest.mark.parametrize(
    "value",
    [
        1760000000.123456,
        1760000000123.456,
        1760000000123456,
        NS,
        str(NS),
        "1760000000.123456",
        "2025-10-09T08:53:20.123456Z",
        "2025-10-09 08:53:20.123456",
        "2025-10-09T10:53:20.123456+02:00",
        " 2025-10-09T08:53:20.123456+00:00 ",
    ],
)
def test_stamps_in_any_unit_and_zone_name_the_same_moment(value) -> None:
    assert wall_ns(value) == NS


@pytest.mark.parametrize(
    "value", [None, True, "", "CANARY", -1, "-5", float("nan"), float("inf"), 2**70, [], {}, "1" * 30, "0001-01-01", "9999-12-31"]
)
def test_what_is_no_stamp_is_refused_without_quoting_it(value) -> None:
    with pytest.raises(BadStamp) as caught:
        wall_ns(value)

    assert "CANARY" not in str(caught.value)


@settings(deadline=None, max_examples=50)
@given(st.integers(10**8 + 1, 4 * 10**9), st.sampled_from([1, 10**3, 10**6, 10**9]))
def test_whole_numbers_keep_every_digit(seconds, per_second) -> None:
    assert wall_ns(seconds * per_second) == seconds * 10**9


def test_a_log_entry_tells_its_arrival_end_and_duration_under_the_usual_names() -> None:
    assert stamp_in({"CANARY": 1, "ts": "", "created_at": 1760000000}) == 1_760_000_000 * 10**9
    assert since(5, "1970-01-01T00:00:01Z") == 10**9 - 5
    assert (since(NS, 1760000000), since(0, None), since(0, "CANARY")) == (None, None, None)
    assert (duration_ns({"latency_ms": "1.5"}), duration_ns({"duration_s": 2}), duration_ns({"elapsed_us": 7})) == (
        1_500_000,
        2 * 10**9,
        7_000,
    )
    assert [duration_ns({"duration_ms": value}) for value in (-1, True, "CANARY", 1e300, None)] == [None] * 5
