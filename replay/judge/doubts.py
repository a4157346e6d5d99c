"""What makes a point's figures say less than they seem to: warnings about the workload and the measurement. Pure."""

from collections.abc import Sequence

import numpy as np

from replay.judge.metrics import Facts, in_window
from replay.judge.notes import HIT_RATE_GAP, SMALL_SAMPLE
from replay.judge.summary import Note, Percentiles, Point
from replay.outcome import Outcome

BASE_BLOCK_TOKENS = 16  # a cache that knows tokens finds so many more at most than one that knows blocks
UNSHARED = 0.01
AT_ONCE_SHARE = 0.5
PART_OFF = 0.1  # of the whole trace's mean prompt
SKEW, SKEW_MS = 5.0, 100.0


def doubts(point: Point, facts: Facts, outcomes: Sequence[Outcome]) -> list[Note]:
    found = [_nothing_shared(point, facts), _warm_cache(point, outcomes), _burst(outcomes), _never_steady(point)]
    found += [_part_differs(point, facts, outcomes)]
    found += [_skewed("TTFT", point.latency.ttft_schedule_ms), _skewed("TPOT", point.latency.tpot_ms)]
    return [one for one in found if one is not None]


def _nothing_shared(point: Point, facts: Facts) -> Note | None:
    best = facts.hit_rate_predicted_infinite
    if best is None or best >= UNSHARED or point.completed < SMALL_SAMPLE:
        return None
    return Note(
        kind="nothing_shared",
        seen=f"even an endless cache would find only {best:.1%} of the prompt tokens",
        why="nothing here speaks of prefix caching, and a workload that shares prefixes needs less prefill and less KV memory",
        action="replay a recorded trace, or `chatreel generate` one that shares",
    )


def _warm_cache(point: Point, outcomes: Sequence[Outcome]) -> Note | None:
    reported, best = point.cache.hit_rate_reported, point.cache.hit_rate_predicted_infinite
    tokens = sum(one.input_tokens or 0 for one in outcomes)
    if reported is None or best is None or not tokens:
        return None
    if reported <= best + HIT_RATE_GAP + BASE_BLOCK_TOKENS * len(outcomes) / tokens:
        return None
    return Note(
        kind="cache_warm",
        seen=f"the server reports a prefix hit rate of {reported:.1%}; an endless cache that starts empty would give {best:.1%}",
        why="it held these prompts before the point began: an earlier run with the same seed, or other traffic",
        action="restart the server or reset its cache, or choose another --seed",
    )


def _burst(outcomes: Sequence[Outcome]) -> Note | None:
    due = np.sort(np.array([one.planned_ns for one in outcomes if one.turn == 0], dtype=np.int64))
    if len(due) < SMALL_SAMPLE:
        return None
    share = float((np.diff(due) == 0).mean())
    if share < AT_ONCE_SHARE:
        return None
    return Note(
        kind="burst",
        seen=f"{share:.0%} of the requests are due at the very moment of the one before",
        why="a rate without gaps is a burst: latency is then mostly the place in the queue, whatever the server",
        action="give arrivals gaps: a recorded trace without --keep-grid, or --arrivals poisson",
    )


def _never_steady(point: Point) -> Note | None:
    """Of a sweep's points: the others follow a trace, whose load may change as it likes."""
    if point.steady is None or point.steady == "steady":
        return None
    is_growing = point.steady == "growing"
    return Note(
        kind="growing" if is_growing else "never_steady",
        seen="requests in flight kept growing" if is_growing else "the point ended before it was steady",
        why="the longer such a point lasts the worse its figures: it is past the server's capacity"
        if is_growing
        else "its figures depend on when it ended",
        action="read only its throughput" if is_growing else "give it more time with --max-s",
    )


def _part_differs(point: Point, facts: Facts, outcomes: Sequence[Outcome]) -> Note | None:
    """Sessions grow: the first requests of a trace are its lightest."""
    played = [one.planned_input_tokens for one in in_window(outcomes, point.window_s)]
    if not facts.trace_input_tokens or not played:
        return None
    mean = sum(played) / len(played)
    off = mean / facts.trace_input_tokens - 1
    if abs(off) <= PART_OFF:
        return None
    return Note(
        kind="part_differs",
        seen=f"the part of the trace that was played has prompts of {mean:,.0f} tokens on average, the whole trace "
        f"{facts.trace_input_tokens:,.0f}: {abs(off):.0%} {'more' if off > 0 else 'fewer'}",
        why="a server carries another load of such requests than of all of them",
        action="play more of it with --min-requests and --max-s, or begin elsewhere with --begin",
    )


def _skewed(name: str, figures: Percentiles | None) -> Note | None:
    if figures is None or figures.count < SMALL_SAMPLE or figures.p99 < SKEW * figures.mean or figures.p99 < SKEW_MS:
        return None
    return Note(
        kind="skewed",
        seen=f"{name} has a mean of {figures.mean:.0f} ms and a p99 of {figures.p99:.0f} ms",
        why="the mean hides what one user in a hundred waits",
        action="compare p99, and look when the slow ones came",
    )
