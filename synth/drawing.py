"""A model's workload, drawn in order of arrival and in bounded memory: columns in, columns out. Pure.

Starts are drawn some thousand at a time with all that follows from them, generation by generation. Requests that can no
longer be overtaken get their block ids and leave; of the others only times and lengths are kept.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from synth.arrivals import NS
from synth.dials import Dials
from synth.gaps import unit_gaps
from synth.generate import Totals
from synth.learned import PROBABILITIES, Class, Lengths, Model, Starts
from synth.lengths import normal_share, tied_scores
from synth.links import SHARE, START, TURN
from synth.naming import Drawn, Naming

type Floats = NDArray[np.float64]
type Ints = NDArray[np.int64]
MAX_STARTS = 16_384  # drawn at a time; fewer where prompts are long
CHUNK_BLOCKS = 4_000_000
_GRID = (np.arange(4096) + 0.5) / 4096
_GRID_SCORES = np.array([NormalDist().inv_cdf(one) for one in _GRID.tolist()])
MAX_GENERATIONS = 10_000  # a family that is longer is cut off
PLAIN = Dials()


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much to draw. `rate_factor` multiplies starts: more users, not faster ones."""

    rate_factor: float = 1.0
    duration_s: float | None = None  # None: the source's span


def draw(model: Model, amount: Amount, rng: np.random.Generator, totals: Totals, dials: Dials = PLAIN) -> Iterator[pa.Table]:
    """Trace columns, in order of arrival. Raises TraceError where ids run out."""
    naming = Naming(model)
    waiting: list[Drawn] = []
    for family, next_ns in drawn(model, amount, rng, dials):
        rows = Drawn.joined([*waiting, family])
        rows = rows.take(np.argsort(rows.arrival_ns, kind="stable"))
        safe = len(rows) if next_ns is None else int(np.searchsorted(rows.arrival_ns, next_ns))
        for begin, end in _slices(rows.path_blocks[:safe]):
            yield naming.table(rows.take(np.arange(begin, end)), rows.take(np.arange(end, len(rows))), totals)
        waiting = [rows.take(np.arange(safe, len(rows)))]


def drawn(
    model: Model, amount: Amount, rng: np.random.Generator, dials: Dials = PLAIN, at_a_time: int | None = None
) -> Iterator[tuple[Drawn, int | None]]:
    """Some starts with all that follows from them, and when the next ones begin; without block ids."""
    duration_s = amount.duration_s if amount.duration_s is not None else model.span_s
    count = 0
    starts = _start_times(model.starts, amount.rate_factor, duration_s, at_a_time or _at_a_time(model), rng)
    following: Ints | None = next(starts, None)
    while following is not None:
        now, following = following, next(starts, None)
        family = _families(model, dials, now, count, round(duration_s * NS), rng)
        count += len(family)
        yield family, None if following is None else int(following[0])


def _slices(blocks: Ints) -> Iterator[tuple[int, int]]:
    """Neighbouring rows of `CHUNK_BLOCKS` together."""
    number = np.cumsum(blocks) // CHUNK_BLOCKS
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(blocks)]
    yield from ((begin, end) for begin, end in itertools.pairwise(edges) if end > begin)


def _at_a_time(model: Model) -> int:
    blocks = model.requests * model.mean_input_tokens / model.block_tokens / max(sum(model.starts.counts), 1)
    return int(np.clip(CHUNK_BLOCKS / max(blocks, 1.0), 64, MAX_STARTS))


def _start_times(starts: Starts, factor: float, duration_s: float, chunk: int, rng: np.random.Generator) -> Iterator[Ints]:
    """Start times in ns, about `chunk` at a time: each window has its own count, gaps inside it follow the law."""
    pending: list[Ints] = []
    offset = 0.5 if factor == int(factor) else rng.random()
    owed, given, window = 0.0, 0, 0
    while window * starts.window_s < duration_s:
        owed += starts.counts[window % len(starts.counts)] * factor
        count = int(owed + offset) - given
        given += count
        begin_s = window * starts.window_s
        while count > 0:  # a window of a high rate comes in slices, so that memory stays bounded
            part = min(count, chunk)
            share = part / count * (starts.window_s - (begin_s - window * starts.window_s))
            pending.append(((begin_s + _inside(starts, part, rng) * share) * NS).astype(np.int64))
            begin_s, count = begin_s + share, count - part
            if sum(map(len, pending)) >= chunk:
                yield from _before(np.concatenate(pending), duration_s)
                pending = []
        window += 1
    if pending:
        yield from _before(np.concatenate(pending), duration_s)


def _before(times: Ints, duration_s: float) -> Iterator[Ints]:
    times = times[times < duration_s * NS]
    if len(times):
        yield times


def _inside(starts: Starts, count: int, rng: np.random.Generator) -> Floats:
    """Times in [0, 1), sorted: gaps of the law, fitted to the window."""
    gaps = unit_gaps(starts.law, starts.shape, starts.gaps, rng.random(count + 1), rng)
    times = np.cumsum(gaps)
    first = times[0] * rng.random()  # the window opens somewhere inside a gap
    return np.asarray((times[:-1] - times[0] + first) / max(float(times[-1] - times[0] + first), 1e-12) * (1 - 1e-9))


def _families(model: Model, dials: Dials, start_ns: Ints, first_number: int, end_ns: int, rng: np.random.Generator) -> Drawn:
    """These starts and all that follows from them before `end_ns`."""
    generation = _started(model, dials, start_ns, first_number, rng)
    found = [generation]
    for _ in range(MAX_GENERATIONS):
        parts = []
        for kind, classes in ((TURN, model.turns), (SHARE, model.sharing)):
            part = _followed(model, dials, generation, kind, classes, end_ns, rng)
            if len(part):
                parts.append(part)
        if not parts:
            break
        generation = Drawn.joined(parts)
        generation.number = np.arange(len(generation)) + found[-1].number[-1] + 1
        new = generation.kind != TURN
        generation.family[new] = generation.number[new]
        found.append(generation)
    return Drawn.joined(found)


def _started(model: Model, dials: Dials, start_ns: Ints, first_number: int, rng: np.random.Generator) -> Drawn:
    count = len(start_ns)
    shares = np.cumsum([one.share for one in model.prefixes])
    prefix = np.minimum(np.searchsorted(shares / shares[-1], _even(count, rng), side="right"), len(shares) - 1)
    blocks = np.array([one.blocks for one in model.prefixes])[prefix]
    number = np.arange(count) + first_number
    none = np.full(count, -1, dtype=np.int64)
    score = _even_scores(count, rng)
    lengths = _lengths(model.first, dials, score, rng)
    input_tokens = blocks * model.block_tokens + lengths.new
    return _with_lengths(
        model,
        Drawn(
            number=number,
            parent=none,
            family=number.copy(),
            kind=np.full(count, START, dtype=np.int8),
            depth=np.zeros(count, dtype=np.int64),
            arrival_ns=start_ns,
            end_ns=none,
            think_ns=none,
            prefix=prefix,
            kept=dials.of_start(blocks, number, (input_tokens - 1) // model.block_tokens),
            based=blocks,
            input_tokens=input_tokens,
            output_tokens=lengths.output,
            path_blocks=none,
            learned_based=blocks,
            learned_input=blocks * model.block_tokens + lengths.learned_new,
            learned_path=lengths.learned_output,
            new_score=score,
        ),
        rng,
    )


def _with_lengths(model: Model, rows: Drawn, rng: np.random.Generator) -> Drawn:
    """What follows from lengths; `learned_path` holds answer tokens until here."""
    rows.path_blocks = _path_blocks(model, rows.input_tokens, rows.output_tokens)
    rows.learned_path = _path_blocks(model, rows.learned_input, rows.learned_path)
    if model.service is not None:
        one = model.service
        factor = np.interp(rng.random(len(rows)), PROBABILITIES, one.factor)
        rows.end_ns = ((one.ttft_s + one.tpot_s * rows.output_tokens) * factor * NS).astype(np.int64)
    return rows


def _path_blocks(model: Model, input_tokens: Ints, output_tokens: Ints) -> Ints:
    whole = input_tokens + output_tokens if model.has_answers else input_tokens
    return whole // model.block_tokens


def _followed(
    model: Model, dials: Dials, parents: Drawn, kind: int, classes: list[Class], end_ns: int, rng: np.random.Generator
) -> Drawn:
    """The next requests of one kind, class by class of their parents."""
    depth = parents.depth if kind == TURN or not model.has_sessions else np.zeros_like(parents.depth)
    at = np.searchsorted([one.from_depth for one in classes], depth, side="right") - 1
    parts = [parents.take(np.empty(0, dtype=np.int64))]
    for number, one in enumerate(classes):
        chosen = np.flatnonzero(at == number)
        much = (parents.learned_input - parents.learned_based * model.block_tokens)[chosen] >= one.much_new
        mean = np.array(one.goes_on)[much.astype(np.int64), np.searchsorted(one.sizes, parents.learned_input[chosen])]
        order = np.argsort(parents.learned_input[chosen], kind="stable")
        times = np.diff(np.floor(np.cumsum(mean[order]) + rng.random()), prepend=0.0).astype(np.int64)
        parts.append(_children(model, dials, parents.take(np.repeat(chosen[order], times)), kind, one, rng))
    rows = Drawn.joined(parts)
    return rows.take(np.flatnonzero(rows.arrival_ns < end_ns))


def _children(model: Model, dials: Dials, parents: Drawn, kind: int, one: Class, rng: np.random.Generator) -> Drawn:
    count, size_tokens = len(parents), model.block_tokens
    wait_ns = (np.interp(_even(count, rng), PROBABILITIES, one.wait_s) * NS).astype(np.int64)
    by_end = kind == TURN and model.service is not None
    size = np.searchsorted(one.sizes, parents.learned_input)
    edges = np.cumsum([one.whole, one.prompt, one.same], axis=0)[:, size]
    how = (_even(count, rng) >= edges).sum(axis=0)
    share = _kept_share(one.kept_share, size, rng)

    def base(path_blocks: Ints, input_blocks: Ints, based: Ints) -> Ints:
        part = np.rint(share * input_blocks).astype(np.int64)
        return np.asarray(np.choose(how, [path_blocks, input_blocks, np.minimum(based, input_blocks), part]))

    based = base(parents.path_blocks, parents.input_tokens // size_tokens, parents.based)
    learned_based = base(parents.learned_path, parents.learned_input // size_tokens, parents.learned_based)
    score = tied_scores(parents.new_score, _even_scores(count, rng), one.new_follows)
    lengths = _lengths(one.appended, dials, score, rng)
    branched = _lengths(one.branched, dials, score, rng)
    appends = (how < 2) | (not one.branched.new_tokens)
    if not one.appended.new_tokens:
        appends = np.zeros(count, dtype=bool)
    lengths = Sizes(*(np.where(appends, first, second) for first, second in zip(lengths, branched, strict=True)))
    input_tokens = based * size_tokens + lengths.new
    kept = dials.of_link(based) if kind == SHARE else based
    as_before = np.maximum(kept, np.minimum(parents.kept, (input_tokens - 1) // size_tokens))
    return _with_lengths(
        model,
        Drawn(
            number=parents.number,
            parent=parents.number,
            family=parents.family.copy(),
            kind=np.full(count, kind, dtype=np.int8),
            depth=parents.depth + 1 if kind == TURN or not model.has_sessions else np.zeros_like(parents.depth),
            arrival_ns=parents.arrival_ns + wait_ns + (np.maximum(parents.end_ns, 0) if by_end else 0),
            end_ns=np.full(count, -1, dtype=np.int64),
            think_ns=wait_ns if by_end else np.full(count, -1, dtype=np.int64),
            prefix=parents.prefix,
            kept=np.where(how == 2, as_before, kept) if dials.more_shared else kept,
            based=based,
            input_tokens=input_tokens,
            output_tokens=lengths.output,
            path_blocks=parents.path_blocks,
            learned_based=learned_based,
            learned_input=learned_based * size_tokens + lengths.learned_new,
            learned_path=lengths.learned_output,
            new_score=score,
        ),
        rng,
    )


def _even(count: int, rng: np.random.Generator) -> Floats:
    """Uniform in [0, 1), one in each of `count` equal parts, shuffled: a small draw is as spread out as a large one."""
    return np.asarray((rng.permutation(count) + rng.random(count)) / max(count, 1))


def _even_scores(count: int, rng: np.random.Generator) -> Floats:
    """Standard normal scores, as even."""
    return np.asarray(np.interp(_even(count, rng), _GRID, _GRID_SCORES))


def _kept_share(tables: list[list[float]], size: Ints, rng: np.random.Generator) -> Floats:
    uniform = _even(len(size), rng)
    share = np.zeros(len(size))
    for number, table in enumerate(tables):
        if table:
            chosen = size == number
            share[chosen] = np.interp(uniform[chosen], PROBABILITIES, table)
    return share


class Sizes(NamedTuple):
    """Tokens of requests, and those of the same ranks in the trace."""

    new: Ints
    output: Ints
    learned_new: Ints
    learned_output: Ints


def _lengths(one: Lengths, dials: Dials, first: Floats, rng: np.random.Generator) -> Sizes:
    """New and output tokens, tied by rank (Gaussian copula); the normal scores of the former are given."""
    second = tied_scores(first, _even_scores(len(first), rng), one.correlation)
    new, output = (
        np.interp(normal_share(scores), PROBABILITIES, table or [0.0] * len(PROBABILITIES))
        for scores, table in ((first, one.new_tokens), (second, one.output_tokens))
    )
    return Sizes(
        new=np.maximum(dials.input_tokens.of(new, first), 1),
        output=dials.output_tokens.of(output, second),
        learned_new=np.maximum(np.rint(new).astype(np.int64), 1),
        learned_output=np.rint(output).astype(np.int64),
    )
