"""How far clocks are apart, from round trips."""

import pytest

from replay.plan.clocks import Offset, RoundTrip, clock_notes, offset_of, offset_words

MS = 1_000_000


def trip(asked_ms: float, there_ms: float, back_ms: float, *, apart_ms: float = 40.0) -> RoundTrip:
    """Their clock is ahead by `apart_ms`; ways there and back take so long."""
    there = asked_ms + there_ms
    return RoundTrip(
        asked_ns=round(asked_ms * MS), there_ns=round((there + apart_ms) * MS), answered_ns=round((there + back_ms) * MS)
    )


def test_the_fastest_round_trip_tells_the_offset_to_half_of_its_time() -> None:
    trips = [trip(0, 9, 1), trip(10, 0.3, 0.3), trip(20, 2, 2)]

    assert offset_of(trips) == Offset(ms=pytest.approx(40.0), error_ms=pytest.approx(0.3))


@pytest.mark.parametrize(("there_ms", "back_ms"), [(0.0, 2.0), (2.0, 0.0), (0.5, 1.5)])
def test_ways_that_are_not_alike_stay_within_the_error(there_ms: float, back_ms: float) -> None:
    offset = offset_of([trip(5, there_ms, back_ms)])

    assert abs(offset.ms - 40.0) <= offset.error_ms == pytest.approx(1.0)


def test_an_offset_of_days_keeps_its_microseconds() -> None:
    now_ns = 1_796_309_645_204_506_005
    days_ns = 3 * 86_400 * 10**9

    offset = offset_of([RoundTrip(asked_ns=now_ns, there_ns=now_ns + days_ns + 1000, answered_ns=now_ns + 2000)])

    assert offset == Offset(ms=pytest.approx(days_ns / 1e6, abs=1e-6), error_ms=pytest.approx(0.001))
    assert offset_words(Offset(ms=-0.04, error_ms=0.2)) == "-0.040 ms, give or take 0.200 ms"


def test_true_clocks_are_one_note_and_each_fault_is_one_more() -> None:
    true, vague, off = (Offset(ms=ms, error_ms=error) for ms, error in ((0.05, 0.2), (0.1, 1.5), (-30.0, 0.3)))

    assert clock_notes([]) == clock_notes([{"a": true}]) == []
    assert clock_notes([{"a": true, "b": true}, {"a": true, "b": true}]) == [
        "2 hosts started together to 0.2 ms; the clock that is off most, +0.05 ms, was allowed for"
    ]
    _, *faults = clock_notes([{"a": true, "b": vague, "c": off}, {"a": true, "b": vague}])
    assert len(faults) == 2 and "b: its clock is known to 1.5 ms only" in faults[0] and "c: its clock is -30 ms off" in faults[1]
    moved = Offset(ms=4.0, error_ms=0.2)
    assert "a: its clock went from +0.05 to +4 ms off" in clock_notes([{"a": true}, {"a": moved}])[1]


def test_of_several_starts_the_vaguest_counts() -> None:
    sure, vague = Offset(ms=0.0, error_ms=0.1), Offset(ms=0.0, error_ms=2.0)

    assert "together to 2 ms" in clock_notes([{"a": sure}, {"a": vague}, {"a": sure}])[0]
    assert "together to 2 ms" in clock_notes([{"a": vague}, {"a": sure}, {"a": sure}])[0]
