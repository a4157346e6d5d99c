"""Wall-clock stamps in the ways in which logs write them, as nanoseconds since 1970."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

MAX_NS = 2**62
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBER = re.compile(r"\d{1,19}(\.\d{1,12})?")
_NAMES = ("timestamp", "arrival_time", "start_time", "startTime", "created_at", "time", "ts", "created")
# A number's size tells its unit: each bound is the year 5138 in that unit, and 1973 in the next finer one.
_UNITS = ((10**11, 10**9), (10**14, 10**6), (10**17, 10**3))


class BadStamp(ValueError):
    """No time; the message never quotes it."""


def wall_ns(value: Any) -> int:
    """From ISO 8601 text (UTC where it names no zone), or a number of s, ms, us or ns by its size."""
    if isinstance(value, str):
        text = value.strip()
        if not _NUMBER.fullmatch(text):
            return _in_range(_iso_ns(text))
        value = float(text) if "." in text else int(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadStamp("no time stamp")
    if not 0 <= value < MAX_NS:
        raise BadStamp("time stamp out of range")
    unit_ns = next((unit for bound, unit in _UNITS if value < bound), 1)
    return _in_range(value * unit_ns if isinstance(value, int) else _float_ns(value, unit_ns))


def _float_ns(value: float, unit_ns: int) -> int:
    """A double of today's seconds is good for a quarter of a microsecond: digits beyond would be noise."""
    return round(value * (unit_ns // 1000)) * 1000 if unit_ns > 1 else int(value)


def _iso_ns(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadStamp("time stamp is neither a number nor ISO 8601") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000


def _in_range(ns: int) -> int:
    if not 0 <= ns < MAX_NS:
        raise BadStamp("time stamp out of range")
    return ns


def stamp_in(entry: dict[str, Any]) -> int:
    """The entry's own arrival, under the first of the usual names that it has."""
    return wall_ns(next((entry[name] for name in _NAMES if entry.get(name) is not None), None))


def since(start_ns: int, stamp: Any) -> int | None:
    """Nanoseconds from `start_ns` to a stamp that may be missing, unreadable or before it: then None."""
    try:
        ns = wall_ns(stamp) - start_ns
    except BadStamp:
        return None
    return ns if ns >= 0 else None


def duration_ns(entry: dict[str, Any]) -> int | None:
    """What the entry says under a name that carries its unit (`duration_ms`, `latency_s`, ...)."""
    for unit, size_ns in (("ns", 1), ("us", 10**3), ("ms", 10**6), ("s", 10**9), ("seconds", 10**9)):
        for name in ("duration", "latency", "request_duration", "total_time", "elapsed"):
            value = entry.get(f"{name}_{unit}")
            if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
                value = float(value)
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value * size_ns < MAX_NS:
                return round(value * size_ns)
    return None
