"""Steps of an engine as its client saw them: tokens that come together are the end of a step. Pure.

What a step computed follows from the rules of the scheduler: a token of each answer under way, then prompts in the order in
which they end, each with what the token budget leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.outcome import Outcome

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
type Spans = Sequence[tuple[float, float]]  # seconds since the start of a point: from, to before

TOGETHER = 0.3  # of a short step: tokens of one step reach the client so far apart at most
MIN_STARTS = 10
UNSURE = 0.2  # of a step: so near to its start nobody knows whether a request was heard of before
WHOLE = 0.9  # a step in which fewer of the answers under way got a token is not understood


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """All shapes [steps]. Prompts count what was computed of them, not what was cached."""

    seconds: Floats
    end_s: Floats
    tokens: Floats  # computed, of answers and prompts
    context_tokens: Floats  # of all that were worked on
    pairs: Floats  # query and key
    prompt_tokens: Floats
    doubtful: NDArray[np.bool_]  # not all of what it computed is known
    alone: Floats  # 1: a step of an idle engine, timed from when its request was sent; else 0

    def __len__(self) -> int:
        return len(self.seconds)

    def part(self, chosen: NDArray[np.bool_]) -> "Steps":
        return Steps(**{name: getattr(self, name)[chosen] for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """Between these, seconds since it was sent, the engine must have heard of a request that had not to wait for room."""

    earliest_s: Floats
    latest_s: Floats
    held_up_by: Floats  # so many were in the step before, which had tokens left, while a request waited; [such requests]
    most: int  # ever in a step


def steps_of(
    outcomes: Sequence[Outcome], *, max_num_batched_tokens: int, max_num_seqs: int, before_s: float, without: Spans = ()
) -> tuple[Steps, Starts]:
    """Steps but for those that end `without`. `before_s`: from when a request is sent until the engine hears of it, as known."""
    done = [one for one in outcomes if one.first_token_ns and one.chunk_gaps_us and one.input_tokens and one.sent_ns is not None]
    tokens = _tokens(done)
    follows = tokens.gap_s > 0
    if not follows.any():
        return joined([]), Starts(earliest_s=np.zeros(0), latest_s=np.zeros(0), held_up_by=np.zeros(0), most=0)
    step_of, count = _steps(tokens)
    end_s = _medians(tokens.at_s, step_of, count)
    own_s = _medians(tokens.gap_s[follows], step_of[follows], count)
    seconds = np.nan_to_num(own_s)
    middle = end_s - np.maximum(seconds / 2, 1e-5)  # before the tokens that end the step
    answering = _running_sum(tokens.change_at_s, tokens.change, middle)
    context = _running_sum(tokens.change_at_s, tokens.context_change, middle)
    gave = np.bincount(step_of[follows], minlength=count)
    first_step = step_of[tokens.gap_s == 0]
    budget, places = max_num_batched_tokens - answering, max_num_seqs - answering
    worked = _prompts(done, first_step, before_s, end_s, seconds, budget, places)
    alone_s = np.where(gave == 0, _alone_s(done, first_step, end_s), 0.0)
    tokens_done = answering + worked.tokens
    steps = Steps(
        seconds=np.where(alone_s > 0, alone_s, own_s),
        end_s=end_s,
        tokens=tokens_done,
        context_tokens=context + worked.context_tokens,
        pairs=context + worked.pairs,
        prompt_tokens=worked.tokens,
        doubtful=(gave < WHOLE * answering) | worked.doubtful,
        alone=np.where(alone_s > 0, 1.0, 0.0),
    )
    counts = ~within(end_s, without)
    sequences = answering + worked.prompts
    understood = (seconds > 0) & ~steps.doubtful & (tokens_done < max_num_batched_tokens)
    starts = _starts(done, worked.begins, end_s, seconds, sequences, understood, max_num_seqs, before_s, counts)
    return steps.part(counts & ((gave > 0) | (alone_s > 0))), starts


def within(at_s: Floats, spans: Spans) -> NDArray[np.bool_]:
    found = np.zeros(np.shape(at_s), dtype=bool)
    for first_s, end_s in spans:
        found |= (at_s >= first_s) & (at_s < end_s)
    return found


def _alone_s(done: Sequence[Outcome], first_step: Ints, end_s: Floats) -> Floats:
    """Of each step in which one request came to an idle engine, seconds since it was sent; 0: another step."""
    found = np.zeros(len(end_s))
    sent = np.array([one.sent_ns or 0 for one in done], dtype=np.float64) / 1e9
    last = np.array([one.last_token_ns or one.first_token_ns or 0 for one in done], dtype=np.float64) / 1e9
    order = np.argsort(sent)
    busy_until = np.concatenate([[-np.inf], np.maximum.accumulate(last[order])[:-1]])
    following = np.append(sent[order][1:], np.inf)
    firsts = end_s[first_step[order]]
    idle = (busy_until < sent[order]) & (following > firsts)
    found[first_step[order][idle]] = (firsts - sent[order])[idle]
    return found


def _starts(
    done: Sequence[Outcome],
    begins: Ints,
    end_s: Floats,
    seconds: Floats,
    sequences: Floats,
    understood: NDArray[np.bool_],
    max_num_seqs: int,
    before_s: float,
    counts: NDArray[np.bool_],
) -> Starts:
    """A prompt begins with the step that it is in first, if the one before had room for it."""
    sent = np.array([one.sent_ns or 0 for one in done], dtype=np.float64) / 1e9
    before = np.maximum(begins - 1, 0)
    start = end_s[begins] - seconds[begins]
    usual = counts[begins] & (begins > 0) & (seconds[begins] > 0) & understood[before]
    usual &= np.abs(start - end_s[before]) < 0.2 * seconds[before]
    waited = usual & (sent + before_s < start - (1 + UNSURE) * seconds[before])
    usual &= sequences[before] < max_num_seqs
    return Starts(
        earliest_s=(start - seconds[before] - sent)[usual],
        latest_s=(start - sent)[usual],
        held_up_by=sequences[before[waited]],
        most=int(sequences[understood & counts].max(initial=0)),
    )


def joined(parts: Sequence[Steps]) -> Steps:
    def column(name: str) -> Floats:
        return np.concatenate([np.zeros(0), *(getattr(part, name) for part in parts)])

    return Steps(
        seconds=column("seconds"),
        end_s=column("end_s"),
        tokens=column("tokens"),
        context_tokens=column("context_tokens"),
        pairs=column("pairs"),
        prompt_tokens=column("prompt_tokens"),
        doubtful=column("doubtful") > 0,
        alone=column("alone"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Chunks of all answers, in the order of outcomes; shapes [chunks], of changes [changes]."""

    at_s: Floats
    gap_s: Floats  # since the chunk before of the same answer; 0: the first
    owner: Ints
    change_at_s: Floats  # an answer begins, goes on, ends
    change: Floats  # of answers under way
    context_change: Floats


def _tokens(done: Sequence[Outcome]) -> _Tokens:
    at, gap, owner, change_at, change, context_change = ([np.zeros(0)] for _ in range(6))
    for number, one in enumerate(done):
        own = np.asarray(one.chunk_gaps_us, dtype=np.float64) / 1e6
        counts = np.asarray(one.chunk_tokens or [1] * (len(own) + 1), dtype=np.float64)
        if len(counts) != len(own) + 1 or counts.min() < 1:
            counts = np.ones(len(own) + 1)
        times = (one.first_token_ns or 0) / 1e9 + np.concatenate([[0.0], np.cumsum(own)])
        single = np.concatenate([[True], counts[1:] == 1])  # several tokens in one chunk: as many steps, not known when
        at.append(times[single])
        gap.append(np.concatenate([[0.0], np.maximum(own, 1e-6)])[single])
        owner.append(np.full(int(single.sum()), number))
        change_at.append(np.append(times, times[-1]))
        begins = np.zeros(len(times) + 1)
        begins[0], begins[-1] = 1, -1
        change.append(begins)
        grows = np.append(counts, -(float(one.input_tokens or 0) + counts.sum()))
        grows[0] += float(one.input_tokens or 0)
        context_change.append(grows)
    return _Tokens(
        at_s=np.concatenate(at),
        gap_s=np.concatenate(gap),
        owner=np.concatenate(owner).astype(np.int64),
        change_at_s=np.concatenate(change_at),
        change=np.concatenate(change),
        context_change=np.concatenate(context_change),
    )


def _steps(tokens: _Tokens) -> tuple[Ints, int]:
    """(step of each chunk, number of steps): a new one where the next token is later than together, or of an answer seen."""
    together = TOGETHER * float(np.quantile(tokens.gap_s[tokens.gap_s > 0], 0.1))
    order = np.argsort(tokens.at_s, kind="stable")
    far = np.diff(tokens.at_s[order], prepend=-np.inf) > together
    step_of = np.empty(len(order), dtype=np.int64)
    step = -1
    last = np.full(int(tokens.owner.max()) + 1, -1)
    owners = tokens.owner[order].tolist()
    for place, (owner, apart) in enumerate(zip(owners, far.tolist(), strict=True)):
        if apart or last[owner] == step:
            step += 1
        last[owner] = step
        step_of[order[place]] = step
    return step_of, step + 1


def _medians(values: Floats, group: Ints, count: int) -> Floats:
    """Median of each group; NaN of an empty one."""
    order = np.lexsort((values, group))
    sizes = np.bincount(group, minlength=count)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    found = np.full(count, np.nan)
    some = sizes > 0
    ordered = values[order]
    low, high = first + (sizes - 1) // 2, first + sizes // 2
    found[some] = (ordered[low[some]] + ordered[high[some]]) / 2
    return found


def full_batch(starts: Sequence[Starts]) -> int | None:
    """Sequences in a step, where requests waited beside the most that ever were in one, and hardly beside fewer."""
    held_up_by = np.concatenate([np.zeros(0), *(one.held_up_by for one in starts)])
    most = max((one.most for one in starts), default=0)
    often = int((held_up_by == most).sum())
    return most if often >= max(3, 0.8 * len(held_up_by)) else None


def heard_of_s(starts: Sequence[Starts]) -> tuple[float, float] | None:
    """(seconds, standard error) that lie between earliest and latest of most requests; None: too few tell."""
    low = np.concatenate([np.zeros(0), *(one.earliest_s for one in starts)])
    high = np.concatenate([np.zeros(0), *(one.latest_s for one in starts)])
    usual = (high > 0) & (low < high)
    low, high = np.maximum(low[usual], 0.0), high[usual]
    if len(low) < MIN_STARTS:
        return None
    at = np.concatenate([low, high])
    change = np.concatenate([np.ones(len(low)), -np.ones(len(high))])
    order = np.lexsort((-change, at))
    within = np.cumsum(change[order])
    best = np.flatnonzero(within >= within.max() - 0.005 * len(low))
    first, last = at[order][best[0]], at[order][min(best[-1] + 1, len(order) - 1)]
    return float(first + last) / 2, float(last - first) / 12**0.5


def _running_sum(times: Floats, changes: Floats, at: Floats) -> Floats:
    order = np.argsort(times, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(changes[order])])
    found: Floats = sums[np.searchsorted(times[order], at, side="right")]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worked:
    tokens: Floats  # this and the next two: of prompts, shape [steps]
    context_tokens: Floats
    pairs: Floats
    prompts: Floats  # how many of them
    doubtful: NDArray[np.bool_]
    begins: Ints  # the first step of each request, shape [requests]


def _prompts(
    done: Sequence[Outcome], first_step: Ints, before_s: float, end_s: Floats, seconds: Floats, budget: Floats, places: Floats
) -> _Worked:
    """Each prompt back from the step that gave its first token, through as many as left it too little before.

    In all but the last it took what the budget left. Only where one step more is as possible does it matter when the engine
    heard of the request.
    """
    sums = np.zeros((3, len(end_s)))
    doubtful = np.zeros(len(end_s), dtype=bool)
    begins = first_step.copy()
    left, room, ends, lasted = budget.tolist(), places.tolist(), end_s.tolist(), seconds.tolist()
    sent = np.array([one.sent_ns or 0 for one in done], dtype=np.float64) / 1e9
    for one in np.lexsort((sent, first_step)).tolist():
        computed = done[one].cached_tokens or 0
        count = (done[one].input_tokens or 0) - computed
        last = int(first_step[one])
        steps, sure = _steps_before(last, count, float(sent[one]) + before_s, left, room, ends, lasted)
        begins[one] = steps[0] if steps else last
        for step in (*steps, last):
            part = int(left[step]) if step != last else count
            sums[:, step] += (part, computed + part, part * computed + part * (part + 1) / 2)
            computed, count = computed + part, count - part
            sure = sure and part <= left[step]
            left[step] -= part
            room[step] -= 1
        if not sure:
            doubtful[[*steps, last, int(begins[one]) - 1]] = True
    prompts = places - np.array(room)
    return _Worked(tokens=sums[0], context_tokens=sums[1], pairs=sums[2], prompts=prompts, doubtful=doubtful, begins=begins)


def _steps_before(
    last: int, count: int, arrival_s: float, left: list[float], room: list[float], ends: list[float], lasted: list[float]
) -> tuple[list[int], bool]:
    """(steps before `last` that worked on the prompt, oldest first; whether that is sure)."""
    steps: list[int] = []
    taken = 0
    while (step := last - len(steps) - 1) >= 0 and lasted[step + 1] and lasted[step]:
        if left[step] < 1 or room[step] < 1 or taken + int(left[step]) >= count:
            break
        if count - taken <= left[last]:  # it could have begun later
            too_late_s = arrival_s - (ends[step] - lasted[step])
            if abs(too_late_s) < UNSURE * lasted[step]:
                return steps[::-1], False
            if too_late_s > 0:
                break
        steps.append(step)
        taken += int(left[step])
    return steps[::-1], True
