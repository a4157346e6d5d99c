"""Call back at absolute monotonic times. asyncio's own timers have a grain of 1 ms; a timerfd is some 10 times as exact."""

import asyncio
import ctypes
import heapq
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

_CLOCK_MONOTONIC = 1
_TFD_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Alarm:
    """Any number of calls over one timer. Elsewhere than on Linux: asyncio's timers."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._fired)

    def close(self) -> None:
        """What has not been called is not called any more."""
        self._heap.clear()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def call_at(self, monotonic_ns: int, callback: Callable[[], None]) -> None:
        """Never early. At once if the time has passed."""
        wait_ns = monotonic_ns - time.monotonic_ns()
        if wait_ns <= 0:
            callback()
            return
        heapq.heappush(self._heap, (monotonic_ns, next(self._order), callback))
        if self._fd < 0:
            self._loop.call_later(wait_ns / 1e9 + 0.001, self._fired)
        elif self._heap[0][0] == monotonic_ns:
            self._arm()

    def _arm(self) -> None:
        at = max(self._heap[0][0], 1)  # 0 would disarm the timer
        spec = _Itimerspec(value=_Timespec(at // 10**9, at % 10**9))
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)

    def _fired(self) -> None:
        if self._fd >= 0:
            with suppress(BlockingIOError):
                os.read(self._fd, 8)
        self._call_due(time.monotonic_ns())

    def look(self, now_ns: int) -> None:
        """Between two other events of the loop: a round with hundreds of them would make the timer wait for its turn."""
        if self._heap and self._heap[0][0] <= now_ns:
            self._call_due(now_ns)

    def _call_due(self, now_ns: int) -> None:
        while self._heap and self._heap[0][0] <= now_ns:
            heapq.heappop(self._heap)[2]()
        if self._heap and self._fd >= 0:
            self._arm()
