"""An analysis in a terminal: what it means first, then the figures."""

from rich.console import Console
from rich.table import Table

from tracer.analysis.breaks import breaks_in_words
from tracer.analysis.memory_text import duration, memory_in_words, print_memory, tokens
from tracer.analysis.order import order_in_words
from tracer.analysis.summary import Analysis, Distribution, EngineSharing


def print_analysis(found: Analysis, console: Console) -> None:
    for line in in_words(found):
        console.print(f"[bold]{line}[/bold]")
    console.print()
    console.print(_lengths_table(found))
    _print_arrivals(found, console)
    _print_sharing(found, console)
    for line in breaks_in_words(found.breaks)[1:] if found.breaks is not None else ():
        console.print(line)
    print_memory(found.memory, console)


def in_words(found: Analysis) -> list[str]:
    """What was found, most important first."""
    lines = [f"{found.requests:,} requests over {duration(found.arrivals.span_s)}, {found.arrivals.rate_per_s:.2f} per second."]
    engine = found.engine_sharing
    if engine is None:
        lines.append("The trace names no prefix blocks: nothing can be said about the prefix cache.")
        return lines
    lines.append(f"A cache without limit would serve {engine.hit_rate_infinite:.1%} of all prompt tokens.")
    if engine.cache_tokens_for_90_percent:
        lines.append(f"90 % of those hits need {tokens(engine.cache_tokens_for_90_percent)} tokens of KV memory.")
    lines += memory_in_words(found.memory, found.kv, found.routing)
    if found.order is not None:
        lines = order_in_words(found.order) + lines
    if found.breaks is not None:
        lines += breaks_in_words(found.breaks)[:1]
    if found.segments is not None and found.segments.in_any_order > found.segments.as_sent + 0.05:
        one = found.segments
        lines.append(
            f"By the parts of prompts {one.as_sent:.1%} of their tokens are shared as sent, {one.popular_first:.1%} with the "
            f"most common parts first, {one.in_any_order:.1%} if order did not matter."
        )
    if found.sessions:
        turns = found.sessions.turns
        lines.append(f"{found.sessions.count:,} sessions of {turns.mean:.1f} turns on average." if turns else "No turns.")
    return lines


def _lengths_table(found: Analysis) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "p50", "p90", "p99", "max", "mean", "sum"):
        table.add_column(name, justify="left" if not name else "right")
    rows: list[tuple[str, Distribution | None]] = [
        ("input tokens", found.lengths.input_tokens),
        ("output tokens", found.lengths.output_tokens),
    ]
    if found.sessions:
        rows += [("turns per session", found.sessions.turns), ("think time, s", found.sessions.think_s)]
    for label, one in rows:
        if one is not None:
            cells = (one.p50, one.p90, one.p99, one.max, one.mean)
            table.add_row(label, *(f"{value:,.1f}".removesuffix(".0") for value in cells), f"{one.sum:,}")
    return table


def _print_arrivals(found: Analysis, console: Console) -> None:
    one = found.arrivals
    if one.grid_s:
        console.print(
            f"\ntime stamps lie on a grid of {one.grid_s:g} s; figures below are of arrivals spread inside it "
            f"(as recorded, the CV of gaps would read {_digits(one.gap_cv_as_recorded)})"
        )
    console.print(
        f"\narrivals: CV of gaps {_digits(one.gap_cv)}; per 60 s window p50 {_digits(one.gap_cv_window_p50)}, "
        f"p90 {_digits(one.gap_cv_window_p90)} (1 is Poisson)"
    )
    console.print(f"index of dispersion of counts: {_scales(one.dispersion)} (1 is Poisson at every scale)")
    console.print(f"the same without the last, cut-off window: {_scales(one.dispersion_whole_windows)}")
    if found.failed:
        console.print(f"failed requests: {found.failed:,}")


def _print_sharing(found: Analysis, console: Console) -> None:
    source, engine = found.source_sharing, found.engine_sharing
    if source is None or engine is None:
        return
    console.print(
        f"\nprompts alone, answers left out, in blocks of {source.block_tokens} tokens as in the source: "
        f"{source.references:,} references, {source.unique:,} unique, {source.hits_infinite:,} hits with endless memory"
    )
    console.print(
        f"hit rate: {source.token_hit_rate:.4f} token-weighted, {source.block_hit_rate:.4f} of blocks, "
        f"{source.mean_request_hit_rate:.4f} mean over requests"
    )
    sizes = ", ".join(f"{int(size):,}: {hits:,}" for size, hits in source.lru_hits.items())
    console.print(f"LRU hits by cache size in blocks: {sizes}")
    if found.sharing_groups is not None:
        console.print(f"sharing groups: {found.sharing_groups:,}")
    console.print(_curve_table(engine))
    if found.top_prefixes:
        console.print(_prefix_table(found))


def _curve_table(engine: EngineSharing) -> Table:
    title = "LRU hit rate by KV memory, answers cached too"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    table.add_column("KV tokens", justify="right")
    table.add_column("hit rate", justify="right")
    table.add_column("")
    for point in engine.curve[::4] + engine.curve[-1:]:
        bar = "█" * round(40 * point.hit_rate)
        table.add_row(tokens(point.cache_tokens), f"{point.hit_rate:.1%}", f"[cyan]{bar}[/cyan]")
    return table


def _prefix_table(found: Analysis) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="\ntop shared prefixes", title_justify="left")
    for name in ("requests", "ends at token", "own tokens", "reusable tokens", "share of prompts"):
        table.add_column(name, justify="right")
    total = found.lengths.input_tokens.sum if found.lengths.input_tokens else 0
    for one in found.top_prefixes:
        share = one.reusable_tokens / total if total else 0.0
        cells = (one.requests, one.depth_tokens, one.own_tokens, one.reusable_tokens)
        table.add_row(*(f"{value:,}" for value in cells), f"{share:.1%}")
    return table


def _scales(values: dict[str, float | None]) -> str:
    return ", ".join(f"{window} {_digits(value)}" for window, value in values.items())


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
