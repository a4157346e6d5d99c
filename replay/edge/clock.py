"""The host's wall clock, as far as the kernel can say: hosts that start together agree on the time no better than this."""

import ctypes
import sys
from dataclasses import dataclass

_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_MAX_ERROR_AT, _ESTIMATED_ERROR_AT = 24, 32  # bytes into struct timex of 64-bit Linux; both in microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    is_kept: bool  # NTP, PTP or the like keeps it
    most_error_ms: float
    estimated_error_ms: float


def clock_state() -> ClockState | None:
    """None where it cannot be asked."""
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return None
    timex = ctypes.create_string_buffer(256)  # `modes` 0: only read
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None

    def milliseconds(at: int) -> float:
        return ctypes.c_long.from_buffer(timex, at).value / 1000

    return ClockState(
        is_kept=state != _UNSYNCHRONISED,
        most_error_ms=milliseconds(_MAX_ERROR_AT),
        estimated_error_ms=milliseconds(_ESTIMATED_ERROR_AT),
    )


def clock_words(state: ClockState | None) -> str:
    if state is None:
        return "this host does not say how true its clock is"
    if not state.is_kept:
        return "nothing that the kernel knows of keeps this host's clock: run chrony or another NTP client on every host"
    return f"this host's clock is kept, to {state.estimated_error_ms:.3g} ms (at most {state.most_error_ms:.3g} ms off)"
