"""An analysis as one HTML file or as images: what it means in words first, then the table, then the charts."""

from pathlib import Path

from tracer.analysis.memory_text import duration, tokens
from tracer.analysis.summary import Analysis, Distribution
from tracer.analysis.text import in_words
from tracer.report.charts import length_charts, memory_charts, time_charts
from tracer.report.page import Charts, chart_boxes, definitions, escaped, render, write_chart_images

_FORMULAS = (
    (
        "Hit rate",
        "prompt tokens found in the cache / all prompt tokens, for an LRU cache of every size in one exact pass (Mattson and "
        "others, 1970): only full 16-token pages, at least the last prompt token is computed, answers fill the cache.",
    ),
    (
        "Causes",
        "Global prefix: blocks that at least 5 % of the requests have. Own session: beyond it, and the same conversation "
        "touched it before. Sharing group: beyond it, and only other conversations did.",
    ),
    (
        "Eviction",
        "FIFO: the block that came in first goes first. The best there can be (Belady, 1966): the blocks needed next stay. "
        "Simulated at the sizes where LRU gives 25, 50, 75 and 90 % of the possible hits, and at "
        "a quarter and half of the smallest.",
    ),
    ("Warm", "the first fifth of the requests fills the cache, but is not counted."),
    (
        "Time since last use",
        "of each possible hit, tokens weigh the same. A cache that drops what was not used for the 90 % time keeps 90 % of them.",
    ),
    ("What more memory buys", "hit rate at 1.5 x the size, or with 10 GB more, - hit rate at the size, in percentage points."),
    (
        "KV tokens of running requests",
        "prompt and whole answer from arrival to end, shared prefixes counted for each: an upper bound. Where a trace has no "
        "ends: 5,000 prompt tokens and 30 answer tokens a second.",
    ),
    (
        "KV per token",
        "2 x layers x KV heads x head size x bytes; MLA: (kv_lora_rank + qk_rope_head_dim) x layers x bytes. What GPUs hold: "
        "(memory x 0.9 - weights) / KV per token, with the data sheet's memory; activations are not in it.",
    ),
    (
        "Routing",
        "Round robin: in turn. Session sticky: a conversation stays where it began. Prefix aware: where most of the prompt was "
        "seen, if that is half of it and the replica has at most 1.5 times its share; else where the fewest tokens went.",
    ),
)


def write_html(found: Analysis, path: Path) -> None:
    path.write_text(page(found), encoding="utf-8")


def write_images(found: Analysis, folder: Path, kind: str = "svg") -> list[Path]:
    return write_chart_images(memory_charts(found) | time_charts(found) | length_charts(found), folder, kind)


def page(found: Analysis) -> str:
    memory, times, lengths = memory_charts(found), time_charts(found), length_charts(found)
    first: Charts = {name: chart for name, chart in memory.items() if name == "hit"}
    rest: Charts = {name: chart for name, chart in memory.items() if name != "hit"}
    name = escaped(Path(found.trace).name)
    body = f"""<h1>Traffic of {escaped(Path(found.trace).stem)}</h1>
<p class="soft origin">{_origin(found)}</p>
<ul class="lead">{"".join(f"<li>{escaped(line)}</li>" for line in in_words(found))}</ul>
{chart_boxes("Prefix cache and KV memory", "", "wide", first)}
{chart_boxes("Where hits come from", "pair", "", rest)}
{_memory_table(found)}
{chart_boxes("Over time", "", "wide", times)}
<h2>Lengths and sessions</h2>{_length_table(found)}
{chart_boxes("", "", "wide", lengths)}
<h2>How it was computed</h2>{definitions(_FORMULAS)}
<noscript><p>The charts need JavaScript; the figures are also in the JSON of `chatreel analyze --json`.</p></noscript>"""
    return render(name, body, memory | times | lengths)


def _origin(found: Analysis) -> str:
    facts = [("trace", found.trace), ("from", found.source_format), ("requests", f"{found.requests:,}")]
    if found.failed:
        facts.append(("failed", f"{found.failed:,}"))
    if found.kv is not None:
        one = found.kv.budget
        facts.append(("KV per token", f"{one.kv_bytes_per_token / 1024:g} KiB"))
        if one.weight_bytes is not None:
            facts.append(("weights", f"{one.weight_bytes / 1e9:.1f} GB"))
        facts.append(("GPU memory", f"{one.tensor_parallel} x {one.memory_bytes / 1e9:g} GB ({one.source})"))
    return " · ".join(f"{name} <code>{escaped(value)}</code>" for name, value in facts)


def _memory_table(found: Analysis) -> str:
    if found.memory is None or not found.memory.causes.cold:
        return ""
    causes, per_token = found.memory.causes, found.kv.budget.kv_bytes_per_token if found.kv else None
    head = ["KV tokens", "hit rate", "global prefix", "own session", "sharing group", "+50 %"]
    head += ["GB", "+10 GB"] if per_token else []
    rows = []
    for one, more in zip(causes.cold, found.memory.marginal, strict=True):
        own = f"{one.own_session:.1%}" if causes.sessions_known else "-"
        cells = [tokens(one.cache_tokens), f"{one.hit_rate:.1%}", f"{one.global_prefix:.1%}", own, f"{one.sharing_group:.1%}"]
        cells.append(f"{100 * more.gain_of_half_more:+.1f} points")
        if per_token:
            gain = more.gain_of_ten_gb
            cells += [f"{one.cache_tokens * per_token / 1e9:,.1f}", "-" if gain is None else f"{100 * gain:+.2f} points"]
        rows.append(cells)
    return f"<h2>What each size of memory gives</h2>{_table(head, rows[::2] if rows[-1] in rows[::2] else rows[::2] + rows[-1:])}"


def _length_table(found: Analysis) -> str:
    rows: list[tuple[str, Distribution | None]] = [
        ("input tokens", found.lengths.input_tokens),
        ("output tokens", found.lengths.output_tokens),
    ]
    if found.sessions:
        rows += [("turns per session", found.sessions.turns), ("think time, s", found.sessions.think_s)]
    cells = [
        [label, *(f"{value:,.1f}".removesuffix(".0") for value in (one.p50, one.p90, one.p99, one.max, one.mean)), f"{one.sum:,}"]
        for label, one in rows
        if one is not None
    ]
    if found.memory and found.memory.reuse_time:
        reuse = found.memory.reuse_time
        cells.append(["reused after", duration(reuse.p50_s), duration(reuse.p90_s), duration(reuse.p99_s), "", "", ""])
    return _table(["", "p50", "p90", "p99", "max", "mean", "sum"], cells)


def _table(head: list[str], rows: list[list[str]]) -> str:
    names = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'
