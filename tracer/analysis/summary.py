"""What a trace holds, in figures: lengths, sessions, sharing, and the hit rate for every cache size. Pure."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tracer.analysis import arrivals
from tracer.analysis.arrivals import Arrivals
from tracer.analysis.breaks import PrefixBreaks
from tracer.analysis.groups import sharing_groups
from tracer.analysis.kv import KvFit
from tracer.analysis.memory import Memory
from tracer.analysis.order import LogOrder
from tracer.analysis.prefixes import SharedPrefix, top_prefixes
from tracer.analysis.profile import Profile
from tracer.analysis.reuse import HitCurve, Touches, hit_curve, touches_as_engine, touches_as_in_source
from tracer.analysis.routing import Routing
from tracer.analysis.segments import SegmentReuse
from tracer.errors import TraceError
from tracer.schema import Footer
from tracer.tracefile import blocks as block_column
from tracer.tracefile import column

Ints = NDArray[np.int64]

COLUMNS = [
    "arrival_ns",
    "session_id",
    "turn",
    "think_ns",
    "input_tokens",
    "output_tokens",
    "input_blocks",
    "input_tail_id",
    "output_blocks",
    "error_kind",
]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    sum: int
    p50: float
    p90: float
    p99: float
    max: float
    mean: float


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: Distribution | None
    output_tokens: Distribution | None
    rank_correlation: float | None  # Spearman's, input with output


class Sessions(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    turns: Distribution | None
    think_s: Distribution | None


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    cache_tokens: int
    hit_rate: float


class SourceSharing(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks as the source counts them, partial last ones included, an LRU cache of whole blocks, answers left out."""

    block_tokens: int
    references: int
    unique: int
    hits_infinite: int
    block_hit_rate: float
    token_hit_rate: float  # token-weighted, with endless memory
    mean_request_hit_rate: float  # mean over requests of hit blocks / blocks; what some tools call the hit rate
    lru_hits: dict[str, int]  # cache size in blocks -> hit blocks


class EngineSharing(msgspec.Struct, frozen=True, kw_only=True):
    """As an engine with 16-token pages caches: full pages only, the last prompt token computed, answers occupy memory."""

    page_tokens: int
    footprint_tokens: int
    hit_rate_infinite: float
    curve: list[CurvePoint]
    cache_tokens_for_90_percent: int | None  # smallest cache for 90 % of the possible hits


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    trace: str
    source_format: str
    requests: int
    failed: int
    arrivals: Arrivals
    lengths: Lengths
    sessions: Sessions | None
    sharing_groups: int | None
    source_sharing: SourceSharing | None
    engine_sharing: EngineSharing | None
    top_prefixes: list[SharedPrefix]
    profile: Profile | None = None
    memory: Memory | None = None
    kv: KvFit | None = None
    routing: list[Routing] | None = None
    breaks: PrefixBreaks | None = None
    order: LogOrder | None = None
    segments: SegmentReuse | None = None


SIZES_BLOCKS = (1000, 2000, 5000, 10_000, 20_000)


def analyze(table: pa.Table, footer: Footer, name: str, sizes_blocks: Sequence[int] = SIZES_BLOCKS, top: int = 10) -> Analysis:
    """Everything about a trace, from its columns `COLUMNS` in arrival order. Raises TraceError if it has no rows."""
    if not table.num_rows:
        raise TraceError("the trace has no requests", path=name)
    blocks = block_column(table, "input_blocks")
    session = column(table, "session_id")
    has_blocks = len(blocks.ids) > 0 or bool((column(table, "input_tail_id") >= 0).any())
    groups = sharing_groups(blocks, session if (session >= 0).any() else None) if has_blocks else None
    return Analysis(
        trace=name,
        source_format=footer.source_format,
        requests=table.num_rows,
        failed=table.num_rows - table["error_kind"].null_count,
        arrivals=arrivals.describe(column(table, "arrival_ns"), footer.time_grid_ns),
        lengths=_lengths(table),
        sessions=_sessions(session, column(table, "think_ns")),
        sharing_groups=groups.count if groups else None,
        source_sharing=_source_sharing(table, footer, sizes_blocks) if has_blocks else None,
        engine_sharing=_engine_sharing(table, footer) if has_blocks else None,
        top_prefixes=top_prefixes(blocks, footer.block_tokens, top) if has_blocks else [],
    )


def distribution(values: NDArray[np.int64] | NDArray[np.float64]) -> Distribution | None:
    """Nearest-rank percentiles."""
    if not len(values):
        return None
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99], method="inverted_cdf")
    return Distribution(
        count=len(values),
        sum=int(values.sum()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        max=float(values.max()),
        mean=float(values.mean()),
    )


def _lengths(table: pa.Table) -> Lengths:
    given, answered = column(table, "input_tokens"), column(table, "output_tokens")
    both = (given >= 0) & (answered >= 0)
    return Lengths(
        input_tokens=distribution(given[given >= 0]),
        output_tokens=distribution(answered[answered >= 0]),
        rank_correlation=rank_correlation(given[both], answered[both]),
    )


def rank_correlation(a: Ints, b: Ints) -> float | None:
    """Spearman's: Pearson's of the ranks, ties sharing their mean rank."""
    if len(a) < 3 or (a == a[0]).all() or (b == b[0]).all():
        return None
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Ints) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[inverse])


def _sessions(session: Ints, think_ns: Ints) -> Sessions | None:
    known = session[session >= 0]
    if not len(known):
        return None
    turns = np.bincount(known)
    turns = turns[turns > 0]
    return Sessions(count=len(turns), turns=distribution(turns), think_s=distribution(think_ns[think_ns >= 0] / 1e9))


def _source_sharing(table: pa.Table, footer: Footer, sizes_blocks: Sequence[int]) -> SourceSharing:
    by_block = touches_as_in_source(table, footer)
    curve = hit_curve(by_block)
    lengths = by_block.blocks.lengths
    ratios = curve.request_hits[lengths > 0] / lengths[lengths > 0]
    return SourceSharing(
        block_tokens=footer.block_tokens,
        references=curve.references,
        unique=curve.unique,
        hits_infinite=curve.hits_infinite,
        block_hit_rate=curve.hits_infinite / curve.references,
        token_hit_rate=_token_hit_rate(by_block, curve, footer),
        mean_request_hit_rate=float(ratios.mean()),
        lru_hits={str(size): curve.hits_at(size) for size in sizes_blocks},
    )


def _token_hit_rate(touches: Touches, curve: HitCurve, footer: Footer) -> float:
    """Hit tokens / prompt tokens with endless memory; a partial last block counts the tokens that it has."""
    whole = np.minimum(curve.request_hits * footer.block_tokens, touches.prompt_tokens)
    return float(whole.sum() / max(touches.prompt_tokens.sum(), 1))


def _engine_sharing(table: pa.Table, footer: Footer) -> EngineSharing:
    curve = hit_curve(touches_as_engine(table, footer))
    unit = curve.unit_tokens
    enough = curve.capacity_for(0.9)
    return EngineSharing(
        page_tokens=unit,
        footprint_tokens=curve.unique * unit,
        hit_rate_infinite=curve.hit_rate_infinite,
        curve=[CurvePoint(cache_tokens=size * unit, hit_rate=rate) for size, rate in curve.curve()],
        cache_tokens_for_90_percent=enough * unit if enough else None,
    )
