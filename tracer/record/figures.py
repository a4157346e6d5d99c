"""Live figures of a recording, in bounded memory, and in a form that several workers' can be added up (pure)."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from tracer.record.messages import Figures, Row
from tracer.record.privacy import DIGEST_BYTES

WINDOW_NS = 30_000_000_000  # "recent" is the last one to two windows
SEEN_BLOCKS = 1 << 20  # 8 MiB; of 16 tokens each
_PER_OCTAVE = 8

Sketch = Mapping[int, int]  # bucket: count; buckets are a twelfth wide, so a quantile is right within 5 %


def without_recent(figures: Figures) -> Figures:
    return msgspec.structs.replace(figures, ttft_us={}, input_tokens={}, output_tokens={})


def together(parts: Iterable[Figures]) -> Figures:
    parts = list(parts)
    return Figures(
        prompt_blocks=sum(part.prompt_blocks for part in parts),
        reused_blocks=sum(part.reused_blocks for part in parts),
        forgets=any(part.forgets for part in parts),
        ttft_us=_added(part.ttft_us for part in parts),
        input_tokens=_added(part.input_tokens for part in parts),
        output_tokens=_added(part.output_tokens for part in parts),
    )


def _added(sketches: Iterable[Sketch]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for sketch in sketches:
        total.update(sketch)
    return dict(total)


def bucket(value: float) -> int:
    return round(_PER_OCTAVE * math.log2(max(value, 1)))


def quantile(sketch: Sketch, share: float) -> float | None:
    """Nearest rank, to the middle of its bucket; None where nothing was counted."""
    rank = share * sum(sketch.values())
    for one, count in sorted(sketch.items()):
        rank -= count
        if rank <= 1e-9:
            return float(2 ** (one / _PER_OCTAVE))
    return None


class LiveFigures:
    """Rows in, figures out. Rows count when their requests end."""

    def __init__(self, seen_blocks: int = SEEN_BLOCKS) -> None:
        self._seen = SeenBlocks(seen_blocks)
        self._prompt_blocks = self._reused_blocks = 0
        self._now, self._before = _Window(), _Window()
        self._turn_at_ns: int | None = None

    def add(self, row: Row) -> None:
        self._prompt_blocks += len(row.input_hashes) // DIGEST_BYTES
        self._reused_blocks += self._seen.reused(row.input_hashes)
        self._seen.add(row.input_hashes)
        self._seen.add(row.output_hashes)
        self._now.add(row.row)

    def tick(self, now_ns: int) -> None:
        if self._turn_at_ns is not None and now_ns < self._turn_at_ns:
            return
        if self._turn_at_ns is not None:
            self._before, self._now = self._now, _Window()
        self._turn_at_ns = now_ns + WINDOW_NS

    def figures(self) -> Figures:
        return Figures(
            prompt_blocks=self._prompt_blocks,
            reused_blocks=self._reused_blocks,
            forgets=self._seen.forgets,
            ttft_us=dict(self._now.ttft_us + self._before.ttft_us),
            input_tokens=dict(self._now.input_tokens + self._before.input_tokens),
            output_tokens=dict(self._now.output_tokens + self._before.output_tokens),
        )


class _Window:
    def __init__(self) -> None:
        self.ttft_us: Counter[int] = Counter()
        self.input_tokens: Counter[int] = Counter()
        self.output_tokens: Counter[int] = Counter()

    def add(self, row: Mapping[str, object]) -> None:
        ttft_ns, given, made = row.get("ttft_ns"), row.get("input_tokens"), row.get("output_tokens")
        if isinstance(ttft_ns, int):
            self.ttft_us[bucket(ttft_ns / 1000)] += 1
        if isinstance(given, int):
            self.input_tokens[bucket(given)] += 1
        if isinstance(made, int):
            self.output_tokens[bucket(made)] += 1


class SeenBlocks:
    """A table with one place per digest: what falls on the same place later takes it, so old blocks are forgotten.

    Blocks in use write themselves down again and again. Digests are chained, so the deepest one known vouches for all
    before it, and a forgotten one in their midst does not count.
    """

    def __init__(self, places: int) -> None:
        self._table = np.zeros(places, dtype="<u8")
        self._taken = 0

    @property
    def forgets(self) -> bool:
        return self._taken > len(self._table) // 2

    def reused(self, joined: bytes) -> int:
        digests = np.frombuffer(joined, dtype="<u8")
        known = np.flatnonzero(self._table[digests % len(self._table)] == digests)
        return int(known[-1]) + 1 if len(known) else 0

    def add(self, joined: bytes) -> None:
        digests = np.frombuffer(joined, dtype="<u8")
        places = digests % len(self._table)
        self._taken += int(np.count_nonzero(self._table[places] == 0))
        self._table[places] = digests
