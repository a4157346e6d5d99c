"""Which request is due, and how long to wait for the next one. Pure: time is an argument; what sleeps is elsewhere."""

import heapq
from collections import deque
from itertools import islice

import numpy as np

from replay.plan.plan import Ints, Plan


class Pacer:
    """First turns (and turns without a think time) are due at their planned time: open loop. Other turns become due when
    the turn before has ended and its think time has passed: closed loop inside the session.

    `rows` is the share of the plan that is paced here, whole sessions each; None: all of it. `at_once`: so many sessions are
    open, and the next one starts when one has ended.
    """

    def __init__(self, plan: Plan, rows: Ints | None = None, at_once: int | None = None) -> None:
        rows = np.arange(len(plan)) if rows is None else rows
        waits = (plan.parent[rows] >= 0) & (plan.think_ns[rows] >= 0)
        self._think_ns = plan.think_ns
        self._open = rows[~waits][:at_once]  # by planned time, as the plan is; `_next` is the first that was not given out
        self._queue = deque(rows[~waits][at_once:].tolist() if at_once is not None else [])
        self._open_ns = plan.planned_ns[self._open]
        self._next = 0
        later = rows[waits]
        self._children = later[np.argsort(plan.parent[later], kind="stable")]  # those of row r: from _first[r] to _first[r + 1]
        self._first = np.concatenate([[0], np.cumsum(np.bincount(plan.parent[later], minlength=len(plan)))])
        self._waiting = len(later)
        self._due: list[tuple[int, int]] = []  # (due_ns, request_id) of later turns whose parent has ended, a heap

    def take_due(self, now_ns: int) -> list[tuple[int, int]]:
        """(due_ns, request_id) of all that is due, earliest first; each is given out once."""
        start = self._next
        self._next = end = max(start, int(np.searchsorted(self._open_ns, now_ns, side="right")))
        taken = list(zip(self._open_ns[start:end].tolist(), self._open[start:end].tolist(), strict=True))
        has_later = bool(self._due) and self._due[0][0] <= now_ns
        while self._due and self._due[0][0] <= now_ns:
            taken.append(heapq.heappop(self._due))
        return sorted(taken) if has_later else taken

    def next_due_ns(self) -> int | None:
        """When the next request is due as far as known; None: none, or all wait for answers."""
        known = [self._due[0][0]] if self._due else []
        if self._next < len(self._open):
            known.append(int(self._open_ns[self._next]))
        return min(known, default=None)

    def ended(self, request_id: int, end_ns: int) -> bool:
        """A request ended, well or not: the turns that waited for it become due after their think time. Whether any did."""
        children = self._children[self._first[request_id] : self._first[request_id + 1]].tolist()
        for child in children:
            heapq.heappush(self._due, (end_ns + int(self._think_ns[child]), child))
        self._waiting -= len(children)
        if children or not self._queue:
            return bool(children)
        heapq.heappush(self._due, (end_ns, self._queue.popleft()))
        return True

    def follow(self, request_id: int, soon_ns: int, most: int) -> list[int]:
        """Requests that become due when this one ends, or the one after it, and so on: later turns that wait less than that,
        then first turns that wait for a free place."""
        found: list[int] = []
        row = request_id
        while len(found) < most:
            children = self._children[self._first[row] : self._first[row + 1]].tolist()
            if len(children) != 1 or self._think_ns[children[0]] >= soon_ns:
                break
            row = children[0]
            found.append(row)
        return found + list(islice(self._queue, most - len(found)))

    @property
    def is_finished(self) -> bool:
        return not self.left

    @property
    def left(self) -> int:
        return len(self._open) - self._next + len(self._due) + self._waiting + len(self._queue)
