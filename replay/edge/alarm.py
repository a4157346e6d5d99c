"""Wake up at absolute monotonic times. asyncio's own timers have a grain of 1 ms; a timerfd is some 10 times as exact."""

import asyncio
import ctypes
import heapq
import os
import sys
import time
from itertools import count

_CLOCK_MONOTONIC = 1
_TFD_FLAGS = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class _Itimerspec(ctypes.Structure):
    _fields_ = [("interval", _Timespec), ("value", _Timespec)]


class Alarm:
    """`wait_until(t)` for any number of tasks over one timer. Elsewhere than on Linux: asyncio's timers."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._fired)

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    async def wait_until(self, monotonic_ns: int) -> None:
        """Returns at once if the time has passed."""
        wait_ns = monotonic_ns - time.monotonic_ns()
        if wait_ns <= 0:
            return
        if self._fd < 0:
            await asyncio.sleep(wait_ns / 1e9)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._heap, (monotonic_ns, next(self._order), woken))
        if self._heap[0][2] is woken:
            self._arm()
        await woken

    def _arm(self) -> None:
        at = max(self._heap[0][0], 1)  # 0 would disarm the timer
        spec = _Itimerspec(value=_Timespec(at // 10**9, at % 10**9))
        self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            pass
        now_ns = time.monotonic_ns()
        while self._heap and (self._heap[0][0] <= now_ns or self._heap[0][2].done()):
            woken = heapq.heappop(self._heap)[2]
            if not woken.done():
                woken.set_result(None)
        if self._heap:
            self._arm()
