"""How far the clocks of hosts are apart, from round trips between them. Pure: whoever has the clocks passes readings in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

UNSURE_MS = 1.0  # half a round trip: above it, hosts may start further apart than the schedule is exact
APART_MS = 5.0  # taken account of, but what else compares the hosts' logs must know


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    asked_ns: int  # our clock
    there_ns: int  # their clock, at some time between
    answered_ns: int  # our clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """Their clock less ours; the truth is within `error_ms` of it if neither clock was set meanwhile."""

    ms: float
    error_ms: float


def offset_of(trips: Sequence[RoundTrip]) -> Offset:
    """Of the fastest round trip: there - (asked + answered) / 2, give or take (answered - asked) / 2, as in RFC 5905."""
    best = min(trips, key=lambda trip: trip.answered_ns - trip.asked_ns)
    doubled_ns = 2 * best.there_ns - best.asked_ns - best.answered_ns
    return Offset(ms=doubled_ns / 2e6, error_ms=(best.answered_ns - best.asked_ns) / 2e6)


def offset_words(offset: Offset) -> str:
    return f"{offset.ms:+.3f} ms, give or take {offset.error_ms:.3f} ms"


def clock_notes(readings: Sequence[Mapping[str, Offset]]) -> list[str]:
    """What a reader must know of the hosts' clocks, by host: compared before each start, and once more after the end."""
    starts, after = readings[:-1], readings[-1] if readings else {}
    known = {name: one for start in starts for name, one in start.items()}
    if not known:
        return []
    for start in starts:
        known |= {name: one for name, one in start.items() if one.error_ms > known[name].error_ms}
    worst = max(one.error_ms for one in known.values())
    furthest = max((one.ms for one in known.values()), key=abs)
    notes = [
        f"{len(known)} hosts started together to {worst:.3g} ms; the clock that is off most, {furthest:+.3g} ms, was allowed for"
    ]
    for name, offset in known.items():
        if offset.error_ms > UNSURE_MS:
            notes.append(
                f"{name}: its clock is known to {offset.error_ms:.3g} ms only: all it sent may be that much early or late"
            )
        if abs(offset.ms) > APART_MS:
            notes.append(f"{name}: its clock is {offset.ms:+.3g} ms off, which was allowed for; keep clocks true by NTP")
        then = after.get(name)
        if then is not None and abs(then.ms - offset.ms) > offset.error_ms + then.error_ms + UNSURE_MS:
            notes.append(f"{name}: its clock went from {offset.ms:+.3g} to {then.ms:+.3g} ms off while it sent")
    return notes
