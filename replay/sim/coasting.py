"""An engine in virtual time, many steps at once: same times, same blocks, same order as one after the other. Pure.

In most steps most requests only get their next token, and nothing is decided about them. Such requests are kept as a
crowd: a step costs what it does for the others, and for those of the crowd that need a block or fill one in it. A run of
steps that has no others is taken as one.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from replay.sim.engine import Engine, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What a run of steps did. The requests in `finished` had their last token in the last step."""

    ends_s: list[float]
    tokens: int
    finished: list[Request]
    seen: list[tuple[int, int]]  # for each time to look at before the last step's start: steps done, blocks free


@dataclass(slots=True, eq=False)
class _Member:
    request: Request
    since: int  # engine steps when it joined: up to there its request is up to date
    phase: int  # (computed tokens - engine steps) % block size, the same all along


class Coaster:
    """Runs an engine that nobody else steps, and whose requests nobody else aborts.

    Between two calls `computed`, `known`, `last_token_s` and `token_steps` of running requests may lag behind.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._members: dict[int, _Member] = {}  # by place of joining, so in the order of `engine.running`
        self._joined = 0
        self._phases: list[list[_Member]] = [[] for _ in range(engine.preset.block_tokens)]
        self._ends: list[tuple[int, int]] = []  # heap: engine steps after its last token, place of joining
        self._known = 0  # tokens of all members
        self._prefill: Request | None = None  # the last one running, if its prompt is half computed
        self._is_regular = False  # every running request is a member or the prefill

    def run(self, until_s: float, look_s: float = inf, every_s: float = inf) -> Stretch:
        """One step, or a run of like ones that start before `until_s`. Not for an idle engine.

        From `look_s` on, `every_s`, the state is looked at.
        """
        if not self._is_regular:
            self._gather()
        if self._is_regular:
            stretch = self._run_alone(until_s, look_s, every_s) or self._step_with_others()
            if stretch is not None:
                return stretch
        self._scatter()
        step = self.engine.step()
        return Stretch(ends_s=[step.end_s], tokens=len(step.tokens), finished=step.finished, seen=[])

    def abort(self, request: Request) -> None:
        self._scatter()
        self.engine.abort(request)

    @property
    def steps_to_next_end(self) -> float:
        """So many steps it takes at least until a running request ends; infinite if none runs."""
        if not self._is_regular:
            return min((len(one.answer) - one.answered for one in self.engine.running), default=inf)
        member = self._ends[0][0] - self.engine.steps if self._ends else inf
        prefill = len(self._prefill.answer) - self._prefill.answered if self._prefill else inf
        return min(member, prefill)

    def _gather(self) -> None:
        running = self.engine.running
        for request in running:
            if _only_decodes(request):
                self._join(request)
            elif request is running[-1]:
                self._prefill = request
            else:
                self._scatter()
                return
        self._is_regular = True

    def _scatter(self) -> None:
        """Bring all requests up to date; the crowd is empty."""
        for member in self._members.values():
            self._settle(member, self.engine.steps)
        self._members.clear()
        for phase in self._phases:
            phase.clear()
        self._ends.clear()
        self._known = 0
        self._prefill = None
        self._is_regular = False

    def _join(self, request: Request) -> None:
        steps, size = self.engine.steps, self.engine.preset.block_tokens
        member = _Member(request, steps, (request.computed - steps) % size)
        self._members[self._joined] = member
        self._phases[member.phase].append(member)
        heappush(self._ends, (steps + len(request.answer) - request.answered, self._joined))
        self._joined += 1
        self._known += request.known

    def _settle(self, member: _Member, steps: int) -> None:
        count = steps - member.since
        if count:
            member.request.computed += count
            member.request.add_tokens(member.since, count, self.engine.now_s)

    def _finish_due(self, steps: int) -> list[Request]:
        """Those that have their last token after so many engine steps, in the order of `engine.running`."""
        finished: list[Request] = []
        ends = self._ends
        while ends and ends[0][0] <= steps:
            member = self._members.pop(heappop(ends)[1])
            self._settle(member, steps)
            self._phases[member.phase].remove(member)
            self._known -= member.request.known
            finished.append(member.request)
        self.engine.finish(finished)
        return finished

    def _needing(self, step: int) -> list[_Member]:
        """Those whose next token goes to a new block, so many engine steps from the start."""
        return self._phases[-step % len(self._phases)]

    # Runs of steps of the crowd alone.

    def _run_alone(self, until_s: float, look_s: float, every_s: float) -> Stretch | None:
        """None: the next step admits, preempts or computes a prompt, or names a block that is cached or waited for."""
        engine, width = self.engine, len(self._members)
        if self._prefill is not None or not width or width > engine.preset.max_num_batched_tokens:
            return None
        wanted: int | None = None
        if engine.waiting and width < min(engine.preset.max_num_seqs, engine.preset.max_num_batched_tokens):
            head = engine.waiting[0]
            if head.arrival_s > engine.now_s:
                until_s = min(until_s, head.arrival_s)
            else:
                hits = engine.hits(head)
                if engine.has_room_for(head, hits):
                    return None
                wanted = head.names[len(hits)] if len(hits) < len(head.names) else None
        most = self._steps_that_fit(self._ends[0][0] - engine.steps)
        ends_s = self._ends_s(most, until_s)
        names = self._names_filled(len(ends_s))
        steps = self._steps_before_a_clash(len(ends_s), names, wanted)
        if not steps:
            return None
        if steps < len(ends_s):
            ends_s, names = ends_s[:steps], self._names_filled(steps)
        seen = self._seen(ends_s, look_s, every_s)
        self._give_blocks(steps, names)
        engine.steps += steps
        engine.now_s = ends_s[-1]
        self._known += steps * width
        return Stretch(ends_s=ends_s, tokens=steps * width, finished=self._finish_due(engine.steps), seen=seen)

    def _steps_that_fit(self, most: int) -> int:
        """So many of the next `most` steps find their blocks."""
        size, free, width = len(self._phases), self.engine.cache.free, len(self._members)
        if width * (most // size + 1) <= free:
            return most
        steps = free // width * size  # in so many steps, each of them takes a block this often
        left = free % width
        first = self.engine.steps
        while steps < most:
            left -= len(self._needing(first + steps))
            if left < 0:
                return steps
            steps += 1
        return most

    def _blocks_taken(self, steps: int) -> int:
        size, first = len(self._phases), self.engine.steps
        rest = sum(len(self._needing(step)) for step in range(first, first + steps % size))
        return steps // size * len(self._members) + rest

    def _seen(self, ends_s: Sequence[float], look_s: float, every_s: float) -> list[tuple[int, int]]:
        """A look sees all steps that start before it; one behind the start of the last step is left to whoever called."""
        seen = []
        while len(ends_s) > 1 and look_s <= ends_s[-2]:
            steps = bisect_left(ends_s, look_s) + 1
            seen.append((steps, self.engine.cache.free - self._blocks_taken(steps)))
            look_s += every_s
        return seen

    def _ends_s(self, most: int, until_s: float) -> list[float]:
        width, context = len(self._members), self._known  # each attends to all that is known
        now_s, step_s = self.engine.now_s, self.engine.costs.step_s
        ends_s: list[float] = []
        while len(ends_s) < most and now_s < until_s:
            now_s += step_s(width, context, context)
            ends_s.append(now_s)
            context += width
        return ends_s

    def _filling(self, steps: int) -> Iterable[tuple[int, _Member, int]]:
        """(the first of the next steps that fills a block of it, member, blocks filled in all)."""
        size, first = len(self._phases), self.engine.steps
        for step in range(1, min(steps, size) + 1):
            count = (steps - step) // size + 1
            for member in self._phases[-(first + step) % size]:
                yield step, member, count

    def _names_filled(self, steps: int) -> "array[int]":
        names = array("q")
        for _, member, count in self._filling(steps):
            request = member.request
            names.extend(request.names[request.named : request.named + count])
        return names

    def _steps_before_a_clash(self, steps: int, names: "array[int]", wanted: int | None) -> int:
        """So many of the next steps name only blocks that nobody knows or waits for. `names`: what all of them fill."""
        cache, size = self.engine.cache, len(self._phases)
        if not names:
            return steps
        distinct = set(names)
        if len(distinct) == len(names) and wanted not in distinct and not cache.knows_any(names):
            return steps
        given = [
            (first + size * place, name)
            for first, member, count in self._filling(steps)
            for place, name in enumerate(member.request.names[member.request.named : member.request.named + count])
        ]
        seen = set() if wanted is None else {wanted}
        for step, name in sorted(given):
            if name in seen or cache.knows(name):
                return step - 1
            seen.add(name)
        return steps

    def _give_blocks(self, steps: int, names: "array[int]", prefill_blocks: int = 0) -> None:
        """What the next steps take and fill, and so many blocks for the prefill."""
        cache, size, first = self.engine.cache, len(self._phases), self.engine.steps
        total = self._blocks_taken(steps) + prefill_blocks
        if total:
            taken = cache.take(total)
            used = 0
            for step in range(min(steps, size)):
                count = (steps - 1 - step) // size + 1
                for member in self._needing(first + step):
                    member.request.blocks.extend(taken[used : used + count])
                    used += count
            if self._prefill is not None:
                self._prefill.blocks.extend(taken[used:])
        if not names:
            return
        blocks = array("q")
        for _, member, count in self._filling(steps):
            request, named = member.request, member.request.named
            blocks.extend(request.blocks[named : named + count])
            request.named = named + count
        cache.give_names(blocks, names)

    # Single steps of the crowd and others.

    def _step_with_others(self) -> Stretch | None:
        """The crowd gets its tokens, and prompts are computed; None: somebody is preempted, or names clash."""
        engine, width = self.engine, len(self._members)
        budget = engine.preset.max_num_batched_tokens - width
        chunk = missing = 0
        if self._prefill is not None:
            chunk = min(self._prefill.known - self._prefill.computed, budget)
            missing = max(0, engine._blocks_for(self._prefill.computed + chunk) - len(self._prefill.blocks))
        if budget <= 0 or len(self._needing(engine.steps)) + missing > engine.cache.free:
            return None
        names = self._names_filled(1)
        if not self._steps_before_a_clash(1, names, None):
            return None
        start_s = engine.next_step_s
        self._give_blocks(1, names, missing)
        work: list[tuple[Request, int]] = []
        if self._prefill is not None:
            engine._grow(self._prefill, chunk)
            work.append((self._prefill, chunk))
        engine._admit(work, budget - chunk, start_s)
        engine._end_step(start_s, work, width, self._known)
        self._known += width
        finished = self._finish_due(engine.steps + 1)
        tokens, more = engine._advance(work)
        self._prefill = None
        for request, _ in work:
            if request.finish_reason is not None:
                continue
            if _only_decodes(request):
                self._join(request)
            else:
                self._prefill = request
        return Stretch(ends_s=[engine.now_s], tokens=width + len(tokens), finished=finished + more, seen=[])


def _only_decodes(request: Request) -> bool:
    return request.known - request.computed == 1 and request.first_token_s is not None
