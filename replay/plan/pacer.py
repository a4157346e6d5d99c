"""Which request is due, and how long to wait for the next one. Pure: time is an argument; run.py is what sleeps."""

import heapq

from replay.plan.plan import Plan


class Pacer:
    """First turns (and turns without a think time) are due at their planned time: open loop. Other turns become due when
    the turn before has ended and its think time has passed: closed loop inside the session.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._children: dict[int, list[int]] = {}
        self._due: list[tuple[int, int]] = []  # (due_ns, request_id), a heap
        planned = plan.planned_ns.tolist()
        rows = zip(plan.parent.tolist(), plan.think_ns.tolist(), strict=True)
        for i, (parent, think_ns) in enumerate(rows):
            if parent >= 0 and think_ns >= 0:
                self._children.setdefault(parent, []).append(i)
            else:
                self._due.append((planned[i], i))
        heapq.heapify(self._due)

    def take_due(self, now_ns: int) -> list[tuple[int, int]]:
        """(due_ns, request_id) of all that is due, earliest first; each is given out once."""
        taken = []
        while self._due and self._due[0][0] <= now_ns:
            taken.append(heapq.heappop(self._due))
        return taken

    def next_due_ns(self) -> int | None:
        """When the next request is due as far as known; None: none, or all wait for answers."""
        return self._due[0][0] if self._due else None

    def ended(self, request_id: int, end_ns: int) -> None:
        """A request ended, well or not: the turns that waited for it become due after their think time."""
        for child in self._children.pop(request_id, ()):
            heapq.heappush(self._due, (end_ns + int(self._plan.think_ns[child]), child))

    @property
    def is_finished(self) -> bool:
        return not self._due and not self._children

    @property
    def left(self) -> int:
        return len(self._due) + sum(len(children) for children in self._children.values())
