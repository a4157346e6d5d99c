"""Speed and memory of the workload generator: requests named in memory, requests written to a file, peak memory by size.

python bench/generation.py            one process per figure; some two minutes
python bench/generation.py one PRESET REQUESTS columns|file
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from synth.generate import Totals, tables
from synth.generating import generate_trace
from synth.model import load_workload, presets
from synth.prefixes import make_pools
from synth.sessions import Streams, turns_in_order

LARGE = {"agentic": 50_000, "long-document": 100_000}  # long prompts: many ids a request


def one(preset: str, requests: int, how: str) -> str:
    """requests/s, ids/s, peak MB."""
    workload = load_workload(preset=preset, overrides={"requests": requests})
    pools, totals = make_pools(workload, Streams(0).pools), Totals()
    start = time.perf_counter()
    if how == "file":
        with tempfile.TemporaryDirectory() as folder:
            generate_trace(workload, 0, Path(folder) / "t.parquet")
    else:
        for _ in tables(turns_in_order(workload, pools, Streams(0)), workload, pools, totals):
            pass
    took_s = time.perf_counter() - start
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{requests / took_s:.0f} {totals.input_tokens / 16 / took_s:.0f} {peak_mb:.0f}"


def apart(preset: str, requests: int, how: str) -> tuple[float, float, float]:
    command = [sys.executable, __file__, "one", preset, str(requests), how]
    rate, ids, peak = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    return rate, ids, peak


def main() -> None:
    print("| preset | requests | named in memory, requests/s | prompt block ids/s | written to a file, requests/s |")
    print("|---|---|---|---|---|")
    for preset in presets():
        requests = LARGE.get(preset, 300_000)
        rate, ids, _ = apart(preset, requests, "columns")
        written, _, _ = apart(preset, min(requests, 100_000), "file")
        print(f"| {preset} | {requests:,} | {rate:,.0f} | {ids:,.0f} | {written:,.0f} |", flush=True)
    print("\n| peak memory | 10,000 requests | 100,000 | 1,000,000 |")
    print("|---|---|---|---|")
    for preset in ("chat", "rag", "few-shot"):
        peaks = [apart(preset, requests, "file")[2] for requests in (10_000, 100_000, 1_000_000)]
        print(f"| {preset}, to a file | {' | '.join(f'{peak:.0f} MB' for peak in peaks)} |", flush=True)


if sys.argv[1:2] == ["one"]:
    print(one(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
else:
    main()
