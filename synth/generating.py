"""`chatreel generate`: a workload, or a recorded trace, in; a trace file out. The generators themselves are pure."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from synth import bootstrap, generate, kept
from synth.arrivals import NS, spread_inside_grid
from synth.dialing import Wishes, dialed
from synth.drawing import draw
from synth.fit import COLUMNS as FIT_COLUMNS
from synth.fit import fit
from synth.generate import Totals
from synth.hit_rate import solve_hit_rate
from synth.learned import Model, from_json, to_json
from synth.model import Workload, workload_json
from synth.prefixes import make_pools
from synth.sessions import Streams, turns_in_order
from synth.share import TOLERANCE, Skeleton, solve_prefix_share
from tracer.errors import TraceError
from tracer.schema import BASE_BLOCK_TOKENS, Footer, HashScheme
from tracer.tracefile import ROW_GROUP_ROWS, TraceWriter, column, read_footer, read_table, write_trace

ROW_GROUP_BYTES = 20_000_000
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """What was written. Tokens are sums over requests; absent is None."""

    path: str
    seed: int
    requests: int
    sessions: int
    span_s: float  # last arrival
    input_tokens: int
    output_tokens: int
    block_ids: int
    prefix_share: float | None  # share of prompt tokens that an endless prefix cache would serve; None without blocks
    prefix_share_target: float | None
    system_tokens_mean: float | None  # over the pool; None for a trace made from another
    notes: tuple[str, ...]


def generate_trace(workload: Workload, seed: int, out_path: PathLike) -> GenerateReport:
    """Write a trace of this workload. The same workload and seed give the same bytes."""
    _check_seed(seed)
    recorded = _recorded_starts(workload, seed)
    pools = make_pools(workload, Streams(seed).pools)
    if next(turns_in_order(workload, pools, Streams(seed), recorded), None) is None:
        raise TraceError(
            "no request arrives in this time",
            seen=f"duration_s = {workload.duration_s}",
            next_step="Raise duration_s or the rate",
        )
    notes = []
    if workload.hit_rate is not None and workload.hit_rate_at_tokens is not None:
        skeleton = Skeleton.of(turns_in_order(workload, pools, Streams(seed), recorded))
        pools, rate = solve_hit_rate(skeleton, pools, workload.hit_rate, workload.hit_rate_at_tokens)
        notes.append(
            f"system prompts of {pools.system_tokens.mean():.0f} tokens on average give an LRU hit rate of {rate:.3f} "
            f"(wanted {workload.hit_rate:g}) at {workload.hit_rate_at_tokens:,} tokens of KV"
        )
        if abs(rate - workload.hit_rate) > TOLERANCE:
            notes.append("the hit rate is off by more than 0.02: it moves in steps here")
    if workload.prefix_share is not None:
        skeleton = Skeleton.of(turns_in_order(workload, pools, Streams(seed), recorded))
        pools, share = solve_prefix_share(skeleton, pools, workload.prefix_share)
        notes.append(f"system prompts of {pools.system_tokens.mean():.0f} tokens on average meet the prefix share")
        if abs(share - workload.prefix_share) > TOLERANCE:
            notes.append("the prefix share is off by more than 0.02: it moves in steps of whole blocks here")
    totals = Totals()
    turns = turns_in_order(workload, pools, Streams(seed), recorded)
    service = f"end_ns is an estimate: {workload.service.ttft_s:g} s + {workload.service.tpot_s:g} s per output token"
    footer = Footer(
        producer=_producer(),
        seed=seed,
        block_tokens=BASE_BLOCK_TOKENS,
        tail_rule="ceil",
        hashes=HashScheme(scope="global"),
        notes={"workload": workload_json(workload), "service_time": service, "generator": "; ".join(notes)},
    )
    with TraceWriter(out_path, footer) as writer:
        for table in _row_groups(generate.tables(turns, workload, pools, totals)):
            writer.write_columns(table)
    mean = float(pools.system_tokens.mean())
    return _report(out_path, seed, totals, workload.prefix_share, system_tokens_mean=mean, notes=notes)


def generate_from(
    trace_path: PathLike,
    out_path: PathLike,
    seed: int,
    *,
    requests: int | None = None,
    requests_per_s: float | None = None,
    scale: float | None = None,
    duration_s: float | None = None,
) -> GenerateReport:
    """Write a trace like a recorded one, or kept rows of one: its sharing groups drawn again, each about k times.

    k comes from one of `requests`, `requests_per_s` or `scale` (default 1); all are met on average. A duration beyond the
    source's span repeats it with fresh draws, a shorter one uses its beginning.
    """
    _check_seed(seed)
    _check_wishes(requests, requests_per_s, scale, duration_s)
    table, source_footer, name = _rows_to_draw_from(trace_path)
    grid_rng, draw_rng = np.random.default_rng(np.random.SeedSequence(seed)).spawn(2)
    duration_ns = None if duration_s is None else round(duration_s * NS)
    if table.num_rows == 0:
        raise TraceError("the trace has no request to draw from", path=str(trace_path))
    try:
        source = bootstrap.prepare(table, source_footer, duration_ns, grid_rng)
    except TraceError as error:
        error.path = str(trace_path)
        raise
    span_s, per_span = source.span_ns / NS, len(source.arrival_ns)
    total_s = duration_s if duration_s is not None else span_s
    k = _times_source(per_span, span_s, total_s, requests, requests_per_s, scale)
    drawn = bootstrap.draw(source, k, duration_ns, draw_rng)
    if not len(drawn.group):
        raise _nothing_drawn(k)
    notes = _notes(source, k, source_footer, total_s)
    totals = Totals()
    footer = Footer(
        producer=_producer(),
        seed=seed,
        block_tokens=source_footer.block_tokens,
        tail_rule=source_footer.tail_rule,
        hashes=source_footer.hashes,
        notes={"generator": "; ".join(notes), "source": name},
    )
    write_trace(out_path, bootstrap.rows(source, drawn, totals), footer)
    return _report(out_path, seed, totals, None, system_tokens_mean=None, notes=notes)


def _rows_to_draw_from(path: PathLike) -> tuple[pa.Table, Footer, str]:
    if holds_rows(path):
        return kept.from_json(Path(path).read_bytes(), str(path))
    return read_table(path, columns=bootstrap.COLUMNS), read_footer(path), Path(path).name


def holds_rows(path: PathLike) -> bool:
    """Whether this is a file of `keep_trace`."""
    try:
        with open(path, "rb") as file:
            return kept.is_kept(file.read(100))
    except OSError:
        return False  # who opens it for its data says why


def keep_trace(trace_path: PathLike, out_path: PathLike) -> int:
    """Write the rows that drawing from this trace needs, a JSON file; how many. The same draws come of it as of the trace."""
    table, footer = read_table(trace_path, columns=bootstrap.COLUMNS), read_footer(trace_path)
    if not table.num_rows:
        raise TraceError("the trace has no request to draw from", path=str(trace_path))
    try:
        bootstrap.prepare(table, footer, None, np.random.default_rng(0))  # what cannot be drawn from is told now
    except TraceError as error:
        error.path = str(trace_path)
        raise
    try:
        with open(out_path, "wb") as out:
            out.writelines(kept.to_lines(table, footer, Path(trace_path).name))
    except OSError as error:
        raise _cannot_write(out_path, error) from error
    return int(table.num_rows)


def generate_from_model(model_path: PathLike, out_path: PathLike, seed: int, wishes: Wishes | None = None) -> GenerateReport:
    """Write a trace of a fitted model."""
    _check_seed(seed)
    model = read_model(model_path)
    found = dialed(model, wishes or Wishes(), seed)
    k = found.amount.rate_factor
    notes = [f"{sum(model.starts.counts):,} starts of {model.requests:,} requests learned, {k:.3g} times as many drawn"]
    notes += found.notes
    if not model.has_blocks:
        notes.append("the source names no prefix blocks, so this trace has none either")
    footer = Footer(
        producer=_producer(),
        seed=seed,
        block_tokens=model.block_tokens,
        tail_rule=model.tail_rule,
        hashes=HashScheme(scope="global"),
        notes={"generator": "; ".join(notes), "source": model.source},
    )
    totals = Totals()
    with TraceWriter(out_path, footer) as writer:
        for table in draw(found.model, found.amount, np.random.default_rng(seed), totals, found.dials):
            writer.write_columns(table)
        if not totals.requests:
            raise _nothing_drawn(k)
    target = wishes.prefix_share if wishes else None
    return _report(out_path, seed, totals, target, system_tokens_mean=None, notes=notes)


def _times_source(
    per_span: int, span_s: float, total_s: float, requests: int | None, requests_per_s: float | None, scale: float | None
) -> float:
    """How many times the source's own rate meets the wish, of which there is one at most."""
    if requests is not None:
        return requests / (per_span * max(1.0, total_s / span_s))
    if requests_per_s is not None:
        return requests_per_s * span_s / per_span
    return scale if scale is not None else 1.0


def _nothing_drawn(k: float) -> TraceError:
    return TraceError("so little was asked for that nothing was drawn", seen=f"{k:.3g} times the source", wanted="more")


def read_model(path: PathLike) -> Model:
    try:
        return from_json(Path(path).read_bytes(), str(path))
    except OSError as error:
        raise TraceError(
            f"cannot be read: {error.strerror}", path=str(path), next_step="Make one with `chatreel fit TRACE -o model.json`"
        ) from error


def fit_trace(trace_path: PathLike, out_path: PathLike) -> Model:
    """Learn a trace and write the model, a JSON file."""
    try:
        model = fit(read_table(trace_path, FIT_COLUMNS), read_footer(trace_path), Path(trace_path).name)
    except TraceError as error:
        error.path = error.path or str(trace_path)
        raise
    try:
        Path(out_path).write_bytes(to_json(model))
    except OSError as error:
        raise _cannot_write(out_path, error) from error
    return model


def _cannot_write(path: PathLike, error: OSError) -> TraceError:
    return TraceError(f"cannot write here: {error.strerror}", path=str(path), next_step="Choose another -o path")


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Small tables put together: what Parquet keeps of each row group until the end is then next to nothing."""
    parts: list[pa.Table] = []
    for table in tables:
        parts.append(table)
        if sum(part.num_rows for part in parts) >= ROW_GROUP_ROWS or sum(part.nbytes for part in parts) >= ROW_GROUP_BYTES:
            yield pa.concat_tables(parts).combine_chunks()
            parts = []
    if parts:
        yield pa.concat_tables(parts).combine_chunks()


def _recorded_starts(workload: Workload, seed: int) -> NDArray[np.int64] | None:
    """Session starts of the trace that the workload's arrivals name: first turns, and requests without a session."""
    path = workload.arrivals.trace
    if path is None:
        return None
    table = read_table(path, columns=["arrival_ns", "session_id"])
    stamps, session = column(table, "arrival_ns"), column(table, "session_id")
    _, first = np.unique(session, return_index=True)
    is_start = session < 0
    is_start[first] = True
    if not is_start.any():
        raise TraceError("the trace has no arrivals", path=path)
    return spread_inside_grid(stamps[is_start], read_footer(path).time_grid_ns, Streams(seed).grid)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise TraceError("wrong value for `seed`", seen=str(seed), wanted="0 or more")


def _check_wishes(requests: int | None, requests_per_s: float | None, scale: float | None, duration_s: float | None) -> None:
    given = {"requests": requests, "requests_per_s": requests_per_s, "scale": scale}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) > 1:
        raise TraceError("only one of these can set the amount", seen=", ".join(given), next_step="Give one of them")
    for name, value in (*given.items(), ("duration_s", duration_s)):
        if value is not None and not value > 0:
            raise TraceError(f"wrong value for `{name}`", seen=repr(value), wanted="a number above 0")


def _notes(source: bootstrap.Source, k: float, footer: Footer, total_s: float) -> list[str]:
    groups = len(source.private_ids)
    notes = [f"{groups} sharing groups of {len(source.arrival_ns)} requests, each drawn {k:.3g} times on average"]
    if footer.time_grid_ns:
        notes.append(f"arrivals spread inside the recorded grid of {footer.time_grid_ns / NS:g} s")
    if not len(source.references.ids):
        notes.append("the source names no prefix blocks, so this trace has none either")
    if total_s > source.span_ns / NS:
        notes.append(f"the source's {source.span_ns / NS:.0f} s repeated with fresh draws")
    return notes


def _report(
    path: PathLike,
    seed: int,
    totals: Totals,
    target: float | None,
    *,
    system_tokens_mean: float | None,
    notes: list[str],
) -> GenerateReport:
    return GenerateReport(
        path=str(path),
        seed=seed,
        requests=totals.requests,
        sessions=totals.sessions,
        span_s=totals.last_arrival_ns / NS,
        input_tokens=totals.input_tokens,
        output_tokens=totals.output_tokens,
        block_ids=totals.block_ids,
        prefix_share=totals.prefix_share if totals.block_ids else None,
        prefix_share_target=target,
        system_tokens_mean=system_tokens_mean,
        notes=tuple(notes),
    )


def _producer() -> str:
    return f"chatreel {metadata.version('chatreel')}"
