"""The same user messages, one in a request or several packed into one: hits, KV memory and preemptions of the simulated server.

python bench/merged.py [FOLDER [svg|png ...]]     writes docs/images/merged.svg if nothing else is asked for; about a minute

Presets `chat` and `merged` with the same seed have the same users, messages, system prompt and times. Each trace runs
through the engine of `chatreel serve` in virtual time, open loop. Figures of the steady part only.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from replay.outcome import Sample
from replay.plan.build import COLUMNS, build_plan
from replay.sim.presets import PRESETS
from replay.sim.virtual import play
from synth.generating import generate_trace
from synth.model import load_workload
from tracer.report.charts import BLUE, ORANGE
from tracer.report.page import write_chart_images
from tracer.tracefile import read_footer, read_table

SERVER = "h100-llama3-8b"
RATES_PER_S = (2, 4, 8, 12, 16, 20, 24, 28, 32)  # user messages
WARM_UP_S, END_S = 100, 340
NAMES = {"chat": "one message a request", "merged": "2 to 6 messages packed into a request"}
PANELS = (
    ("hit rate", "prefix hit rate of prompt tokens", "~%"),
    ("kv", "KV memory held by running requests", "~%"),
    ("preemptions", "preemptions per 1000 user messages", "~s"),
)


def measure(preset: str, messages_per_s: float, folder: Path) -> dict[str, Any]:
    path = folder / "t.parquet"
    dials = {"duration_s": END_S, "arrivals.requests_per_s": messages_per_s}
    generate_trace(load_workload(preset=preset, overrides=dials), 0, path)
    plan = build_plan(read_table(path, COLUMNS), read_footer(path), np.random.default_rng(0))
    plan = replace(plan, think_ns=np.full(len(plan), -1))  # open loop: both get the same messages at the same times
    played = play(plan, PRESETS[SERVER], replicas=1, router="rr", sample_s=0.05)
    found = [one for one in played if isinstance(one, Sample)]
    end_s = np.array([one.t_ns for one in found]) / 1e9
    begin, end = np.searchsorted(end_s, [WARM_UP_S, END_S])
    first, last = found[begin], found[end - 1]
    usage = np.array([one.kv_usage for one in found])
    full = np.flatnonzero(usage >= 0.95)
    return {
        "preset": NAMES[preset],
        "messages_per_s": messages_per_s,
        "hit rate": _growth(first, last, "prefix_hits_tokens") / _growth(first, last, "prefix_queries_tokens"),
        "kv": float(usage[begin:end].mean()),
        "preemptions": _growth(first, last, "preemptions") / (messages_per_s * (END_S - WARM_UP_S)) * 1000,
        "full_s": float(end_s[full[0]]) if len(full) else None,
        "waiting": round(last.waiting or 0),
    }


def _growth(first: Sample, last: Sample, counter: str) -> float:
    return float(getattr(last, counter) - getattr(first, counter))


def picture(rows: list[dict[str, Any]]) -> Any:
    colour = alt.Color(
        "preset:N",
        title=None,
        scale=alt.Scale(domain=list(NAMES.values()), range=[BLUE, ORANGE]),
        legend=alt.Legend(orient="top", labelLimit=400, labelFontSize=12, symbolType="stroke"),
    )
    panels = []
    for name, title, shape in PANELS:
        scale = alt.Scale(domain=[0, 1]) if shape == "~%" else alt.Scale(domainMin=0)
        values = [{"preset": row["preset"], "x": row["messages_per_s"], "y": round(row[name], 4)} for row in rows]
        panels.append(
            alt.Chart(alt.InlineData(values=values), width=300, height=210, title=alt.Title(title, fontWeight="normal"))
            .mark_line(strokeWidth=2.5, point=alt.OverlayMarkDef(size=35))
            .encode(
                x=alt.X("x:Q", title="user messages per second", scale=alt.Scale(domain=[0, max(RATES_PER_S)])),
                y=alt.Y("y:Q", title=None, scale=scale, axis=alt.Axis(format=shape, tickCount=5)),
                color=colour,
            )
        )
    return alt.hconcat(*panels, bounds="flush", spacing=50)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    rows = []
    print(f"{SERVER}: {PRESETS[SERVER].kv_blocks * 16:,} tokens of KV; {WARM_UP_S} to {END_S} s\n")
    print(
        "| messages/s | requests | hit rate | KV held | KV 95 % full after | preemptions / 1000 messages | waiting at the end |"
    )
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for rate in RATES_PER_S:
            for preset in NAMES:
                row = measure(preset, rate, Path(temporary))
                rows.append(row)
                full = "never" if row["full_s"] is None else f"{row['full_s']:.0f} s"
                print(
                    f"| {rate} | {preset} | {row['hit rate']:.1%} | {row['kv']:.1%} | {full} | {row['preemptions']:.1f} | "
                    f"{row['waiting']} |",
                    flush=True,
                )
    charts = {
        "merged": (f"The same user messages on one {PRESETS[SERVER].gpu.name} with Llama-3.1-8B (simulated)", picture(rows))
    }
    for kind in sys.argv[2:] or ["svg"]:
        write_chart_images(charts, folder, kind)


main()
