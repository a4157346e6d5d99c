"""Runs of like steps at once: same times, same blocks, same order as one after the other. Pure.

Most steps of an engine only give every running request its next token. Nothing is decided in them, so their times are a
sum and their blocks can be taken together.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from replay.sim.engine import Engine, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What a run of steps did. The requests in `finished` had their last token in the last step."""

    ends_s: list[float]
    tokens: int
    finished: list[Request]
    seen: list[tuple[int, int]]  # for each time to look at before the last step's start: steps done, blocks free


def coast(engine: Engine, until_s: float, look_s: float = inf, every_s: float = inf) -> Stretch | None:
    """Run the steps that start before `until_s` and only give each running request a token; None: the next step is not such.

    From `look_s` on, `every_s`, the state is looked at.

    A step is left to `Engine.step` if it admits, preempts or computes a prompt, or if it names a block that is cached
    already or that the head of the queue waits for.
    """
    running = engine.running
    if not running or any(one.known - one.computed != 1 or one.first_token_s is None for one in running):
        return None
    wanted: int | None = None
    if engine.waiting and len(running) < min(engine.preset.max_num_seqs, engine.preset.max_num_batched_tokens):
        head = engine.waiting[0]
        if head.arrival_s > engine.now_s:
            until_s = min(until_s, head.arrival_s)
        else:
            hits = engine.hits(head)
            if engine.has_room_for(head, hits):
                return None
            wanted = int(head.names[len(hits)]) if len(hits) < len(head.names) else None
    elif len(running) > engine.preset.max_num_batched_tokens:
        return None
    most = min(len(one.answer) - one.answered for one in running)
    most = _steps_that_fit(engine, most)
    ends_s = _ends_s(engine, most, until_s)
    steps = _steps_before_a_clash(engine, len(ends_s), wanted)
    if not steps:
        return None
    ends_s = ends_s[:steps]
    return _run(engine, ends_s, _seen(engine, ends_s, look_s, every_s))


def _steps_that_fit(engine: Engine, most: int) -> int:
    """So many of the next `most` steps find their blocks."""
    size, free = engine.preset.block_tokens, engine.cache.free
    if len(engine.running) * (most // size + 1) <= free:
        return most
    return bisect_right(range(1, most + 1), free, key=lambda steps: _blocks_taken(engine, steps))


def _blocks_taken(engine: Engine, steps: int) -> int:
    size = engine.preset.block_tokens
    return sum(-(-(one.computed + steps) // size) - len(one.blocks) for one in engine.running)


def _seen(engine: Engine, ends_s: Sequence[float], look_s: float, every_s: float) -> list[tuple[int, int]]:
    """A look sees all steps that start before it; one behind the start of the last step is left to whoever called."""
    seen = []
    while len(ends_s) > 1 and look_s <= ends_s[-2]:
        steps = bisect_left(ends_s, look_s) + 1
        seen.append((steps, engine.cache.free - _blocks_taken(engine, steps)))
        look_s += every_s
    return seen


def _ends_s(engine: Engine, most: int, until_s: float) -> list[float]:
    width = len(engine.running)
    context = sum(one.known for one in engine.running)  # each attends to all that is known
    now_s, step_s = engine.now_s, engine.costs.step_s
    ends_s: list[float] = []
    while len(ends_s) < most and now_s < until_s:
        now_s += step_s(width, context, context)
        ends_s.append(now_s)
        context += width
    return ends_s


def _steps_before_a_clash(engine: Engine, steps: int, wanted: int | None) -> int:
    """So many of the next steps name only blocks that nobody knows or waits for."""
    size = engine.preset.block_tokens
    seen = set() if wanted is None else {wanted}
    given = [
        (step, int(name))
        for one in engine.running
        if one.computed % size + steps >= size  # fills a block
        for step, name in zip(range(size - one.computed % size, steps + 1, size), one.names[one.named :], strict=False)
    ]
    for step, name in sorted(given):
        if name in seen or engine.cache.knows(name):
            return step - 1
        seen.add(name)
    return steps


def _run(engine: Engine, ends_s: Sequence[float], seen: list[tuple[int, int]]) -> Stretch:
    size, steps = engine.preset.block_tokens, len(ends_s)
    missing = [-(-(one.computed + steps) // size) - len(one.blocks) for one in engine.running]
    taken = engine.cache.take(sum(missing))
    blocks: list[int] = []
    names: list[int] = []
    used = 0
    finished: list[Request] = []
    for one, count in zip(engine.running, missing, strict=True):
        if count:
            one.blocks.extend(taken[used : used + count])
            used += count
        one.computed += steps
        full = one.computed // size
        if one.named < full:
            blocks.extend(one.blocks[one.named : full])
            names.extend(one.names[one.named : full])
            one.named = full
        one.add_tokens(engine.steps, steps, ends_s[-1])
        if one.answered == len(one.answer):
            finished.append(one)
    if names:
        engine.cache.give_names(blocks, names)
    engine.steps += steps
    engine.now_s = ends_s[-1]
    engine.finish(finished)
    return Stretch(ends_s=list(ends_s), tokens=steps * len(missing), finished=finished, seen=seen)
