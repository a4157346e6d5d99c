"""How often a prefix cache of any size would hit: one exact Mattson pass over a trace. Pure.

Rule: a request looks up all its blocks first (hits are the leading run of resident ones), then touches them deepest
first. Ancestors are then always more recent than descendants, so LRU stack distance grows along a path, and a cache of
C units holds exactly the leading run with distance <= C (Mattson et al., "Evaluation techniques for storage
hierarchies", 1970). vLLM frees blocks tail first for the same reason.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracer.analysis.distances import segments_of, spans
from tracer.blocks import Blocks
from tracer.errors import TraceError
from tracer.schema import Footer
from tracer.tracefile import blocks as block_column
from tracer.tracefile import column

Ints = NDArray[np.int64]
ENGINE_BLOCK_TOKENS = 16  # vLLM's default page


class Touched(Protocol):
    """What a prefix cache sees, request by request. Columns: [requests]."""

    @property
    def lookup_units(self) -> Ints: ...
    @property
    def prompt_tokens(self) -> Ints: ...
    @property
    def unit_tokens(self) -> int: ...
    @property
    def names(self) -> int: ...  # no id is as large
    def pieces(self) -> Iterator[tuple[Blocks, Ints]]: ...  # paths and units of their references, in order of time


@dataclass(frozen=True, slots=True, kw_only=True)
class Touches:
    """What a prefix cache sees, all at once. Shapes: units [references]; the other columns [requests]."""

    blocks: Blocks  # prompt blocks, (tail), then answer blocks: one chained path
    units: Ints  # cache units that a reference occupies; 0 is allowed; always the same for one id
    lookup_units: Ints  # leading units that are looked up; the rest of the path is only inserted
    prompt_tokens: Ints  # denominator of hit rates
    unit_tokens: int

    @property
    def names(self) -> int:
        return 1 + int(self.blocks.ids.max(initial=-1))

    def pieces(self) -> Iterator[tuple[Blocks, Ints]]:
        offsets = self.blocks.offsets
        for start, end in spans(offsets):
            yield self.blocks.span(start, end), self.units[offsets[start] : offsets[end]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCurve:
    """Hits of an LRU prefix cache of every size, in units of `unit_tokens` tokens. Exact at every whole size."""

    unit_tokens: int
    prompt_tokens: int  # sum over requests
    references: int  # units looked up
    unique: int  # distinct units touched, answers included: the footprint
    request_hits: Ints  # [requests], units found by each request in an endless cache
    capacities: Ints  # sizes at which the curve bends, ascending, from 0
    hits: Ints  # hit units at those sizes
    slopes: Ints  # hits gained per unit of cache beyond each of those sizes

    def hits_at(self, capacity_units: int) -> int:
        """Hit units of a cache of this size."""
        if capacity_units <= 0:
            return 0
        i = int(np.searchsorted(self.capacities, capacity_units, side="right")) - 1
        return int(self.hits[i] + (capacity_units - self.capacities[i]) * self.slopes[i])

    def hit_rate_at(self, capacity_units: int) -> float:
        """Hit units * unit_tokens / sum of prompt tokens: token-weighted. 0.0 for a trace without prompt tokens."""
        return self.hits_at(capacity_units) * self.unit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def hits_infinite(self) -> int:
        return int(self.hits[-1])

    @property
    def hit_rate_infinite(self) -> float:
        return self.hit_rate_at(self.unique)

    def capacity_for(self, share: float) -> int:
        """Smallest cache, in units, that yields at least `share` of the hits of an endless one."""
        wanted = int(np.ceil(share * self.hits_infinite - 1e-9))
        if wanted <= 0:
            return 0
        i = int(np.searchsorted(self.hits, wanted, side="left")) - 1
        return int(self.capacities[i] + -(-(wanted - self.hits[i]) // self.slopes[i]))

    def curve(self, points: int = 40) -> list[tuple[int, float]]:
        """(capacity in units, hit rate) at log-spaced sizes from 1/1000 of the footprint to all of it."""
        if self.unique == 0:
            return []
        sizes = np.geomspace(max(1.0, self.unique / 1000), self.unique, points)
        return [(size, self.hit_rate_at(size)) for size in sorted({round(float(one)) for one in sizes})]


def hit_curve(touched: Touched) -> HitCurve:
    """A few looks at all references; cost follows prefix-tree branches, not blocks."""

    def pieces() -> Iterator[tuple[Blocks, Ints]]:
        return (_occupying(*piece) for piece in touched.pieces())

    _require_chained(lambda: (blocks for blocks, _ in pieces()), touched.names)
    found = segments_of(pieces, touched.names, touched.lookup_units)
    capacities, hits, slopes = _piecewise(found.distances, found.counts)
    return HitCurve(
        unit_tokens=touched.unit_tokens,
        prompt_tokens=int(touched.prompt_tokens.sum()),
        references=int(touched.lookup_units.sum()),
        unique=found.unique,
        request_hits=found.request_hits,
        capacities=capacities,
        hits=hits,
        slopes=slopes,
    )


def require_chained(blocks: Blocks) -> None:
    """Raise `TraceError` if an id has two predecessors: then it does not stand for one prefix."""
    _require_chained(lambda: (blocks.span(*one) for one in spans(blocks.offsets)), 1 + int(blocks.ids.max(initial=-1)))


def _require_chained(pieces: Callable[[], Iterable[Blocks]], names: int) -> None:
    predecessor = np.empty(names, dtype=np.int32)
    for blocks in pieces():
        predecessor[blocks.ids] = _before(blocks)
    for blocks in pieces():
        before, known = _before(blocks), predecessor[blocks.ids]
        wrong = np.flatnonzero(known != before)
        if len(wrong):
            raise TraceError(
                "block ids are not chained, so they do not name prefixes",
                seen=f"block {blocks.ids[wrong[0]]} after {before[wrong[0]]} and after {known[wrong[0]]}",
                wanted="one predecessor for each id",
                next_step="Import the trace again, or give each block an id that depends on all blocks before it",
            )


def _before(blocks: Blocks) -> NDArray[np.int32]:
    """[references], the id before each one in its path; -1: it is the first."""
    before = np.empty_like(blocks.ids)
    before[1:] = blocks.ids[:-1]
    before[blocks.offsets[:-1][blocks.lengths > 0]] = -1
    return before


def touches_as_in_source(table: pa.Table, footer: Footer) -> Touches:
    """One unit per block of the trace, the partial last one included; all looked up, answers left out."""
    full = block_column(table, "input_blocks")
    tails = column(table, "input_tail_id")
    has_tail = tails >= 0
    blocks = concatenate(full, one_each(tails, has_tail)) if has_tail.any() else full
    return Touches(
        blocks=blocks,
        units=np.broadcast_to(np.int64(1), len(blocks.ids)),
        lookup_units=blocks.lengths,
        prompt_tokens=prompt_tokens(table, footer),
        unit_tokens=footer.block_tokens,
    )


def touches_as_engine(table: pa.Table, footer: Footer, unit_tokens: int = ENGINE_BLOCK_TOKENS) -> Touches:
    """`engine_paths` on the columns of a trace."""
    input_tokens = prompt_tokens(table, footer)
    tails = column(table, "input_tail_id")
    return engine_paths(
        blocks=block_column(table, "input_blocks"),
        block_tokens=footer.block_tokens,
        tail_id=tails,
        tail_tokens=np.where(tails >= 0, input_tokens % footer.block_tokens, 0),
        input_tokens=input_tokens,
        output_tokens=np.maximum(column(table, "output_tokens"), 0),
        answer_blocks=block_column(table, "output_blocks"),
        unit_tokens=unit_tokens,
    ).whole()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePaths:
    """The parts of the paths that an engine sees, put together a piece at a time: whole, they take many times more memory."""

    parts: tuple[Blocks, ...]
    widths: tuple[Ints, ...]  # units of each part's references
    lookup_units: Ints
    prompt_tokens: Ints
    unit_tokens: int
    names: int

    def pieces(self) -> Iterator[tuple[Blocks, Ints]]:
        lengths = sum(part.lengths for part in self.parts)
        for start, end in spans(np.concatenate([[0], np.cumsum(lengths)])):
            yield self.span(start, end)

    def span(self, start: int, end: int) -> tuple[Blocks, Ints]:
        parts = tuple(part.span(start, end) for part in self.parts)
        widths = (width[part.offsets[start] : part.offsets[end]] for part, width in zip(self.parts, self.widths, strict=True))
        path = concatenate(*parts)
        return path, _interleave(path.offsets, parts, tuple(widths))

    def whole(self) -> Touches:
        blocks, units = self.span(0, len(self.lookup_units))
        return Touches(
            blocks=blocks,
            units=units,
            lookup_units=self.lookup_units,
            prompt_tokens=self.prompt_tokens,
            unit_tokens=self.unit_tokens,
        )


def engine_paths(
    *,
    blocks: Blocks,
    block_tokens: int,
    tail_id: Ints,
    tail_tokens: Ints,
    input_tokens: Ints,
    output_tokens: Ints,
    answer_blocks: Blocks,
    unit_tokens: int = ENGINE_BLOCK_TOKENS,
) -> EnginePaths:
    """What an engine with `unit_tokens` pages sees: only full pages, and the last prompt token is always recomputed.

    -1 in `tail_id` means none. A prompt of n tokens looks up (n - 1) // unit pages; prompt and answer together occupy
    (n + m) // unit. Pages that no id covers (answers that were not recorded, a tail without an id) are unique to the
    request. Where the answer has ids of its own, its first block covers the tail, so the tail's id is left out.
    """
    if unit_tokens > block_tokens:
        blocks, answer_blocks = _coarsened(blocks, answer_blocks, block_tokens, unit_tokens)
        tail_tokens = np.zeros_like(tail_tokens)
        block_tokens = unit_tokens
    if block_tokens % unit_tokens:
        raise TraceError(
            "the trace's blocks do not divide into whole engine pages",
            seen=f"{block_tokens} tokens a block, {unit_tokens} a page",
            wanted="one to be a multiple of the other",
        )
    of_block = block_tokens // unit_tokens
    tails = one_each(tail_id, (tail_id >= 0) & (tail_tokens >= unit_tokens) & (answer_blocks.lengths == 0))
    tail_units = (tail_tokens // unit_tokens)[tails.lengths > 0]
    known = (blocks.lengths + answer_blocks.lengths) * of_block
    known[tails.lengths > 0] += tail_units
    private = np.maximum((input_tokens + output_tokens) // unit_tokens - known, 0)
    first_free = 1 + max(int(part.ids.max(initial=-1)) for part in (blocks, tails, answer_blocks))
    names = np.arange(first_free, first_free + len(private), dtype=np.int64)
    return EnginePaths(
        parts=(blocks, tails, answer_blocks, one_each(names, private > 0)),
        widths=(
            np.broadcast_to(np.int64(of_block), len(blocks.ids)),
            _same_width(tails.ids, tail_units, (blocks, answer_blocks), of_block, first_free),
            np.broadcast_to(np.int64(of_block), len(answer_blocks.ids)),
            private[private > 0],
        ),
        lookup_units=np.maximum(input_tokens - 1, 0) // unit_tokens,
        prompt_tokens=input_tokens,
        unit_tokens=unit_tokens,
        names=first_free + len(private),
    )


def prompt_tokens(table: pa.Table, footer: Footer) -> Ints:
    """Prompt lengths; where the trace has none (failed requests), what its blocks cover."""
    tokens = column(table, "input_tokens")
    covered = block_column(table, "input_blocks").lengths * footer.block_tokens
    return np.where(tokens >= 0, tokens, covered)


def one_each(ids: Ints, chosen: NDArray[np.bool_]) -> Blocks:
    """A block list of one id for each chosen request, of none for the others."""
    offsets = np.zeros(len(ids) + 1, dtype=np.int64)
    np.cumsum(chosen, out=offsets[1:])
    return Blocks(offsets=offsets, ids=ids[chosen].astype(np.int32))


def concatenate(*parts: Blocks) -> Blocks:
    """Request by request, the blocks of each part in turn."""
    offsets = np.zeros(len(parts[0]) + 1, dtype=np.int64)
    np.cumsum(sum(part.lengths for part in parts), out=offsets[1:])
    ids = _interleave(offsets, parts, tuple(part.ids for part in parts))
    return Blocks(offsets=offsets, ids=ids.astype(np.int32, copy=False))


def _interleave(offsets: Ints, parts: tuple[Blocks, ...], values: tuple[NDArray[Any], ...]) -> NDArray[Any]:
    """Values of each part's references, laid out request by request."""
    merged = np.empty(int(offsets[-1]), dtype=values[0].dtype)
    at = offsets[:-1].copy()
    for part, own in zip(parts, values, strict=True):
        merged[np.repeat(at - part.offsets[:-1], part.lengths) + np.arange(len(own))] = own
        at += part.lengths
    return merged


def _same_width(tails: NDArray[np.int32], units: Ints, others: tuple[Blocks, ...], of_block: int, names: int) -> Ints:
    """One width per id, the largest: a damaged source may give one id to tails of different lengths, or to a block too."""
    if not len(tails):
        return units
    width = np.zeros(names, dtype=np.int32)
    np.maximum.at(width, tails, units.astype(np.int32))
    for blocks in others:
        width[blocks.ids] = of_block  # a tail is shorter
    return width[tails].astype(np.int64)


def _coarsened(blocks: Blocks, answers: Blocks, block_tokens: int, unit_tokens: int) -> tuple[Blocks, Blocks]:
    """Blocks of `unit_tokens`: every k-th id of prompt and answer taken as one path, since ids are chained."""
    factor = unit_tokens // block_tokens
    if unit_tokens % block_tokens:
        return blocks, answers
    path = concatenate(blocks, answers)
    place = np.arange(len(path.ids)) - np.repeat(path.offsets[:-1], path.lengths)
    in_answer = place >= np.repeat(blocks.lengths, path.lengths)
    last = place % factor == factor - 1
    return _kept(path, last & ~in_answer), _kept(path, last & in_answer)


def _kept(blocks: Blocks, keep: NDArray[np.bool_]) -> Blocks:
    before = np.zeros(len(keep) + 1, dtype=np.int64)
    np.cumsum(keep, out=before[1:])
    return Blocks(offsets=before[blocks.offsets], ids=blocks.ids[keep])


def _occupying(blocks: Blocks, units: Ints) -> tuple[Blocks, Ints]:
    keep = units > 0
    return (blocks, units) if bool(keep.all()) else (_kept(blocks, keep), units[keep])


def _piecewise(distances: Ints, counts: Ints) -> tuple[Ints, Ints, Ints]:
    """Bends, values and slopes of sum(clip(C - distance, 0, count)) as a function of C."""
    places = np.concatenate([np.zeros(1, dtype=np.int64), distances, distances + counts])
    steps = np.concatenate([np.zeros(1, dtype=np.int64), np.ones_like(distances), -np.ones_like(distances)])
    capacities, where = np.unique(places, return_inverse=True)
    slopes = np.zeros(len(capacities), dtype=np.int64)
    np.add.at(slopes, where, steps)
    slopes = np.cumsum(slopes)
    hits = np.zeros(len(capacities), dtype=np.int64)
    np.cumsum(slopes[:-1] * np.diff(capacities), out=hits[1:])
    return capacities, hits, slopes
