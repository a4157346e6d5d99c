"""Hit rates and time of our analysis beside kvcache-simulator's and llmtrafficlens', on the same files at the same sizes.

python bench/analysis_peers.py --peers-python VENV/bin/python --mooncake conversation_trace.jsonl --weka FOLDER

The peers stay in an environment of their own (pip install kvcache-simulator==0.1.3 llmtrafficlens==0.13.4; a C++ compiler).
All take turns, each in a fresh process on core 0. Where a peer counts hits otherwise than we do, an adapter below counts
ours its way: `as_kvcache_simulator`, `as_llmtrafficlens`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np

from tracer.analysis.distances import reuse_segments
from tracer.analysis.policies import Runs, policy_hits, request_hits, runs_of
from tracer.analysis.reuse import Touches, hit_curve, touches_as_in_source
from tracer.importing import import_trace
from tracer.tracefile import read_footer, read_table

SIZES = {
    "Mooncake head": (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000),
    "WEKA, 9 sessions at once": (1_000, 2_000, 4_000, 5_000, 6_000, 8_000, 10_000),
}
BLOCK_TOKENS = 512
MODEL = "llama-3.1-8b"  # names the bytes of a block for the peer that wants GiB; the sizes above are what counts
COLUMNS = ["input_blocks", "input_tail_id", "input_tokens"]
POLICIES = ("fifo", "lru", "optimal")
PER_BLOCK = """
import sys
from kvcache_sim.calculator import calculate_cache_size, load_models_data, models_by_id
data = load_models_data()
size = calculate_cache_size(models_by_id(data)[sys.argv[1]], tokens=1024, precision=None, indexer_precision=None,
    block_size=int(sys.argv[2]), include_draft_kv_cache=False, include_linear_attention_state=False, models_data=data)
print(size.bytes_per_block or size.bytes_per_token * int(sys.argv[2]))
"""
KVCACHE_SIMULATOR = """
import json, sys, time
import kvcache_sim.cpp_backend as backend
from kvcache_sim.simulator import run_sweep
from kvcache_sim.trace import parse_trace_file
core = {}
class Timed(backend.subprocess.Popen):
    def __init__(self, *args, **kwargs):
        core["from"] = time.perf_counter()
        super().__init__(*args, **kwargs)
    def wait(self, *args, **kwargs):
        code = super().wait(*args, **kwargs)
        core["seconds"] = time.perf_counter() - core["from"]
        return code
backend.ensure_cpp_simulator()
backend.subprocess.Popen = Timed
start = time.perf_counter()
trace = parse_trace_file(sys.argv[1], block_size=int(sys.argv[2]))
middle = time.perf_counter()
found = run_sweep(trace, model_id=sys.argv[3], budgets_gib=json.loads(sys.argv[4]))
end = time.perf_counter()
points = {p["cacheBlocks"]: {name: one["hitTokens"] for name, one in p["results"].items()} for p in found["points"]}
print(json.dumps({"read": middle - start, "compute": end - middle, "core": core["seconds"], "hits": points,
    "total": found["metadata"]["totalMeasuredTokens"]}))
"""
LLMTRAFFICLENS = """
import json, sys, time
from llmtrafficlens.adapters import read
from llmtrafficlens.metrics import capacity_curve
block, sizes = int(sys.argv[2]), json.loads(sys.argv[3])
start = time.perf_counter()
requests = read(sys.argv[1], "mooncake", block, b"")
middle = time.perf_counter()
curve = capacity_curve(requests, block, [size * block for size in sizes])
end = time.perf_counter()
print(json.dumps({"read": middle - start, "compute": end - middle, "rates": [one["hit_rate"] for one in curve[:-1]]}))
"""


def as_kvcache_simulator(touches: Touches, sizes: list[int]) -> dict[str, list[int]]:
    """Hit tokens under its rules, at each size.

    Hits are the leading run, as ours, but counted in tokens (the partial last block for what it holds) and in the last half
    of the requests only. Its FIFO puts blocks in root first. Its LRU and optimal evict leaves only and keep ancestors, which
    is what ours come to.
    """
    lru = reuse_segments(touches.blocks, touches.units, touches.lookup_units)
    lru_hits = np.zeros((len(sizes), len(touches.blocks)), dtype=np.int64)
    for row, size in zip(lru_hits, sizes, strict=True):
        np.add.at(row, lru.requests, np.clip(size - lru.distances, 0, lru.counts))
    hits = {
        "fifo": root_first_fifo(runs_of(touches), sizes),
        "lru": lru_hits,
        "optimal": request_hits(touches, "optimal", sizes),
    }
    half = len(touches.blocks) // 2
    return {name: np.minimum(one * BLOCK_TOKENS, touches.prompt_tokens)[:, half:].sum(1).tolist() for name, one in hits.items()}


def root_first_fifo(runs: Runs, sizes: list[int]) -> np.ndarray:
    """As our FIFO, but a run's first block goes in, and out, first: then the run's leading part is there whole or not at all."""
    visits, bounds = list(zip(runs.names.tolist(), runs.units.tolist(), strict=True)), runs.offsets.tolist()
    hits = np.zeros((len(sizes), len(bounds) - 1), dtype=np.int64)
    for row, size in zip(hits, sizes, strict=True):
        behind: dict[int, int] = {}
        gone_in = 0
        for request in range(len(bounds) - 1):
            path = visits[bounds[request] : bounds[request + 1]]
            found = 0
            for name, units in path:
                if behind.get(name, -size - 1) < gone_in - size:
                    break
                found += units
            row[request] = found
            for name, units in path:
                if behind.get(name, -size - 1) < gone_in - size:
                    behind[name] = gone_in
                    gone_in += units
    return hits


def as_llmtrafficlens(touches: Touches, sizes: list[int]) -> list[float]:
    """Hit rates under its rules, at each size.

    A hit is any block in the cache, whether those before it are or not; blocks are looked up and put in one by one, root
    first, so a request can push out what it would have found. A partial block hits for a whole one. The last half of the
    requests counts. A run's blocks lie together in the LRU order, so all of them hit or none does.
    """
    runs, half = runs_of(touches), len(touches.blocks) // 2
    first_counted = int(runs.offsets[half])
    visits = list(zip(runs.names.tolist(), runs.units.tolist(), strict=True))
    rates = []
    for size in sizes:
        resident: OrderedDict[int, int] = OrderedDict()
        occupied = hits = 0
        for at, (name, units) in enumerate(visits):
            before = resident.get(name, 0)
            if before == units:
                resident.move_to_end(name)
                hits += units if at >= first_counted else 0
                continue
            resident[name] = units
            resident.move_to_end(name)
            occupied += units - before
            while occupied > size:
                oldest = next(iter(resident))
                dropped = min(resident[oldest], occupied - size)
                occupied -= dropped
                resident[oldest] -= dropped
                if not resident[oldest]:
                    del resident[oldest]
        rates.append(hits * BLOCK_TOKENS / int(touches.prompt_tokens[half:].sum()))
    return rates


def ours(path: str, sizes: list[int], others: tuple[str, ...]) -> None:
    """In a process of its own: import and analysis apart. `others`: policies beside LRU."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.parquet"
        marks = [time.perf_counter()]
        import_trace(Path(path), trace, source_format="mooncake")
        marks.append(time.perf_counter())
        touches = touches_as_in_source(read_table(trace, COLUMNS), read_footer(trace))
        marks.append(time.perf_counter())
        curve = hit_curve(touches)
        rates = {"lru": [curve.hits_at(size) for size in sizes]}
        marks.append(time.perf_counter())
        for policy in others:
            rates[policy] = policy_hits(touches, policy, sizes)
        marks.append(time.perf_counter())
    print(
        json.dumps(
            {
                "read": marks[1] - marks[0],
                "load": marks[2] - marks[1],
                "lru": marks[3] - marks[2],
                "compute": marks[4] - marks[2],
                "hits": rates,
                "references": len(touches.blocks.ids),
            }
        )
    )


def theirs(path: str, sizes: list[int], peer: str) -> None:
    """In a process of its own: our hits the peers' way."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.parquet"
        import_trace(Path(path), trace, source_format="mooncake")
        touches = touches_as_in_source(read_table(trace, COLUMNS), read_footer(trace))
    start = time.perf_counter()
    found = as_kvcache_simulator(touches, sizes) if peer == "kvcache" else as_llmtrafficlens(touches, sizes)
    print(json.dumps({"compute": time.perf_counter() - start, "found": found}))


def weka_lines(folder: Path, out: Path) -> None:
    """All sessions at once, each from time 0, as Mooncake lines: ids of their own, whole blocks only, called 512 tokens each."""
    rows: list[tuple[float, list[int]]] = []
    base = 0
    for path in sorted(folder.glob("trace_*.json")):
        now = 0.0
        one: list[tuple[float, list[int]]] = []
        for request in json.loads(path.read_text())["requests"]:
            now = max(now, request["t"])
            inner = request["requests"] if request["type"] == "subagent" else [request]
            one += [(now, [base + block for block in part["hash_ids"]]) for part in inner]
        base = max(max(ids, default=base) for _, ids in one) + 1
        rows += one
    rows.sort(key=lambda row: row[0])
    with out.open("w") as file:
        for stamp, ids in rows:
            row = {"timestamp": round(stamp * 1000), "input_length": BLOCK_TOKENS * len(ids), "output_length": 1, "hash_ids": ids}
            file.write(json.dumps(row) + "\n")


def timed(command: list[str]) -> dict:
    """What the process printed, and its seconds in all, on core 0."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {0}))
    return json.loads(done.stdout) | {"whole": time.perf_counter() - start}


def compare(name: str, path: Path, peers_python: str, rounds: int) -> None:
    sizes = list(SIZES[name])
    per_block = float(subprocess.check_output([peers_python, "-c", PER_BLOCK, MODEL, str(BLOCK_TOKENS)], text=True))
    gib = [(size + 0.5) * per_block / 2**30 for size in sizes]
    own = [sys.executable, __file__, "--child"]
    commands = {
        "chatreel": [*own, "ours", str(path), json.dumps(sizes)],
        "chatreel, LRU": [*own, "ours-lru", str(path), json.dumps(sizes)],
        "kvcache-simulator": [peers_python, "-c", KVCACHE_SIMULATOR, str(path), str(BLOCK_TOKENS), MODEL, json.dumps(gib)],
        "llmtrafficlens": [peers_python, "-c", LLMTRAFFICLENS, str(path), str(BLOCK_TOKENS), json.dumps(sizes)],
        "as kvcache-simulator": [*own, "kvcache", str(path), json.dumps(sizes)],
        "as llmtrafficlens": [*own, "lens", str(path), json.dumps(sizes)],
    }
    seen: dict[str, list[dict]] = {peer: [] for peer in commands}
    for turn in range(rounds + 1):
        for peer, command in commands.items():
            one = timed(command)
            if turn:  # the first warms files and compiles
                seen[peer].append(one)
    print_times(name, seen)
    print_rates(sizes, {peer: found[-1] for peer, found in seen.items()})


def print_times(name: str, seen: dict[str, list[dict]]) -> None:
    def middle(peer: str, key: str) -> float:
        return statistics.median(one[key] for one in seen[peer])

    def ratio(peer: str, key: str, own: str = "chatreel", own_key: str | None = None) -> str:
        return f"{statistics.median(a[key] / b[own_key or key] for a, b in zip(seen[peer], seen[own], strict=True)):.2f}x"

    print(f"\n### {name}: {seen['chatreel'][0]['references']:,} references\n")
    print("| | read the file | analysis | to ours | whole call | to ours |\n|---|---|---|---|---|---|")
    print(
        f"| chatreel: FIFO and optimal at 7 sizes, LRU at all | {middle('chatreel', 'read'):.3f} s to a trace file, "
        f"{middle('chatreel', 'load'):.3f} s from it | {middle('chatreel', 'compute'):.3f} s | | "
        f"{middle('chatreel', 'whole'):.2f} s | |"
    )
    print(
        f"| kvcache-simulator: FIFO, LRU and optimal at 7 | {middle('kvcache-simulator', 'read'):.3f} s | "
        f"{middle('kvcache-simulator', 'compute'):.3f} s, of which C++ {middle('kvcache-simulator', 'core'):.3f} s | "
        f"{ratio('kvcache-simulator', 'compute')}, C++ {ratio('kvcache-simulator', 'core', own_key='compute')} | "
        f"{middle('kvcache-simulator', 'whole'):.2f} s | {ratio('kvcache-simulator', 'whole')} |"
    )
    print(
        f"| chatreel: LRU at all | as above | {middle('chatreel, LRU', 'lru'):.3f} s | | "
        f"{middle('chatreel, LRU', 'whole'):.2f} s | |"
    )
    print(
        f"| llmtrafficlens: LRU at 7 and endless | {middle('llmtrafficlens', 'read'):.3f} s | "
        f"{middle('llmtrafficlens', 'compute'):.3f} s | {ratio('llmtrafficlens', 'compute', 'chatreel, LRU', 'lru')} | "
        f"{middle('llmtrafficlens', 'whole'):.2f} s | {ratio('llmtrafficlens', 'whole', 'chatreel, LRU')} |"
    )
    for peer in ("kvcache-simulator", "llmtrafficlens"):
        own = f"as {peer}"
        print(f"| chatreel counting {own} does | | {middle(own, 'compute'):.3f} s | {peer} {ratio(peer, 'compute', own)} | | |")


def print_rates(sizes: list[int], last: dict[str, dict]) -> None:
    """Ours is the share of all looked-up blocks, over the whole trace; the others are under the peer's own rules."""
    kvcache, lens = last["kvcache-simulator"], last["llmtrafficlens"]
    own_kvcache, own_lens = last["as kvcache-simulator"]["found"], last["as llmtrafficlens"]["found"]
    references, hits = last["chatreel"]["references"], last["chatreel"]["hits"]
    print(
        "\n| blocks | chatreel's own rules: FIFO / LRU / optimal | kvcache-simulator | ours its way | hit tokens apart ", end=""
    )
    print("| llmtrafficlens, LRU | ours its way |\n|---|---|---|---|---|---|---|")
    for at, size in enumerate(sizes):
        point = kvcache["hits"].get(str(size))
        mine = [own_kvcache[policy][at] for policy in POLICIES]
        other = [point[policy] for policy in POLICIES] if point else None
        print(
            f"| {size:,} | {percents(hits[policy][at] / references for policy in POLICIES)} | "
            f"{percents(one / kvcache['total'] for one in other) if other else 'left out'} | "
            f"{percents(one / kvcache['total'] for one in mine)} | "
            f"{' / '.join(str(a - b) for a, b in zip(mine, other, strict=True)) if other else ''} | "
            f"{100 * lens['rates'][at]:.2f} | {100 * round(own_lens[at], 4):.2f} |"
        )


def percents(shares) -> str:
    return " / ".join(f"{100 * share:.2f}" for share in shares)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers-python")
    parser.add_argument("--mooncake", type=Path)
    parser.add_argument("--weka", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, path, sizes = options.child
        match what:
            case "ours":
                ours(path, json.loads(sizes), ("fifo", "optimal"))
            case "ours-lru":
                ours(path, json.loads(sizes), ())
            case peer:
                theirs(path, json.loads(sizes), peer)
        return
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder) / "weka.jsonl"
        weka_lines(options.weka, converted)
        for name, path in zip(SIZES, (options.mooncake, converted), strict=True):
            compare(name, path, options.peers_python, options.rounds)


if __name__ == "__main__":
    main()
