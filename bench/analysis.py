"""The full hit curve of 50 million block references on one core, beside a per-block loop; and imports of a million rows.

python bench/analysis.py curve|loop|import [--trace conversation_trace.jsonl]
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from tracer.analysis.reuse import Touches, hit_curve
from tracer.blocks import Blocks
from tracer.importing import import_trace

REFERENCES = 50_000_000
SYSTEM_BLOCKS, SYSTEM_PROMPTS, TURN_BLOCKS = 64, 50, 20


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """All integers of [start, start + length), one range after the other."""
    before = np.cumsum(lengths) - lengths
    return (np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))).astype(np.int32)


def chat(references: int, seed: int = 0) -> Blocks:
    """Conversations of 6 turns on average, interleaved, 16-token blocks, under one of 50 system prompts of 1,024 tokens."""
    random = np.random.default_rng(seed)
    sessions = references // 800
    turns = random.geometric(1 / 6, sessions)
    session = np.repeat(np.arange(sessions), turns)
    turn = np.arange(len(session)) - np.repeat(np.cumsum(turns) - turns, turns)
    begins = random.uniform(0, sessions, sessions)
    at = begins[session] + turn * random.uniform(20, 200, sessions)[session]
    order = np.argsort(at)
    session, turn = session[order], turn[order]
    own_start = SYSTEM_PROMPTS * SYSTEM_BLOCKS + (np.cumsum(turns) - turns) * TURN_BLOCKS
    system = random.integers(0, SYSTEM_PROMPTS, sessions)[session] * SYSTEM_BLOCKS
    own = (turn + 1) * TURN_BLOCKS
    keep = int(np.searchsorted(np.cumsum(own + SYSTEM_BLOCKS), references, side="right"))
    starts = np.stack([system, own_start[session]], 1)[:keep].ravel()
    lengths = np.stack([np.full(len(own), SYSTEM_BLOCKS), own], 1)[:keep].ravel()
    offsets = np.concatenate([[0], np.cumsum(own[:keep] + SYSTEM_BLOCKS)])
    return Blocks(offsets=offsets, ids=ranges(starts, lengths))


def repeated(trace: Path, references: int) -> Blocks:
    """The trace after itself again and again, each time with ids of its own, until there are enough references."""
    one = Blocks.from_lists([json.loads(line)["hash_ids"] for line in trace.open()])
    copies = -(-references // len(one.ids))
    span = int(one.ids.max()) + 1
    ids = (np.arange(copies, dtype=np.int32)[:, None] * np.int32(span) + one.ids[None, :]).ravel()
    offsets = np.concatenate([[0], (np.arange(copies)[:, None] * len(one.ids) + one.offsets[None, 1:]).ravel()])
    return Blocks(offsets=offsets, ids=ids)


def touches_of(blocks: Blocks) -> Touches:
    ones = np.broadcast_to(np.int64(1), len(blocks.ids))
    return Touches(blocks=blocks, units=ones, lookup_units=blocks.lengths, prompt_tokens=blocks.lengths * 16, unit_tokens=16)


def per_block_loop(blocks: Blocks) -> int:
    """Mattson's pass as in a textbook: a Fenwick tree over references, one step a block. Returns hits with endless memory."""
    size = len(blocks.ids) + 1
    tree = [0] * (size + 1)
    last: dict[int, int] = {}
    now = hits = 0

    def add(at: int, value: int) -> None:
        while at <= size:
            tree[at] += value
            at += at & -at

    for ids in blocks:
        path = ids.tolist()
        for block in path:
            at = last.get(block)
            if at is None:
                break
            hits += 1
            total = 0
            while at:
                total += tree[at]
                at &= at - 1
        for block in reversed(path):
            now += 1
            if (at := last.get(block)) is not None:
                add(at, -1)
            last[block] = now
            add(now, 1)
    return hits


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def curve(trace: Path | None) -> None:
    """Each shape in a process of its own, so that the peak memory is its own, inputs included."""
    for name in ("chat", "trace") if trace else ("chat",):
        process = multiprocessing.get_context("spawn").Process(target=measure_curve, args=(name, trace))
        process.start()
        process.join()


def measure_curve(name: str, trace: Path | None) -> None:
    os.sched_setaffinity(0, {0})
    touches = touches_of(chat(REFERENCES) if name == "chat" else repeated(trace, REFERENCES))
    start = time.perf_counter()
    found = hit_curve(touches)
    seconds = time.perf_counter() - start
    print(
        f"{name}: {len(touches.blocks.ids):,} references in {len(touches.blocks):,} requests: full curve in {seconds:.2f} s, "
        f"peak {peak_gb():.2f} GB with the ids; {len(found.capacities):,} bends, hit rate {found.hit_rate_infinite:.4f}"
    )


def loop() -> None:
    """A hundredth of it, block by block and run by run."""
    blocks = chat(REFERENCES // 100)
    start = time.perf_counter()
    found = hit_curve(touches_of(blocks))
    by_run = time.perf_counter() - start
    start = time.perf_counter()
    hits = per_block_loop(blocks)
    by_block = time.perf_counter() - start
    assert hits == found.hits_infinite
    print(f"{len(blocks.ids):,} references: by block {by_block:.2f} s, by run {by_run:.3f} s, ratio {by_block / by_run:.0f}")


def imports(rows: int = 1_000_000) -> None:
    """Mooncake and Azure files of a million rows, made here; the import in a process of its own, for its peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        for name, make in {"mooncake": _mooncake, "azure": _azure}.items():
            source = Path(folder, name)
            for work in (make, measure_import):
                process = multiprocessing.get_context("spawn").Process(target=work, args=(source, rows))
                process.start()
                process.join()


def measure_import(source: Path, rows: int) -> None:
    os.sched_setaffinity(0, {0})
    start = time.perf_counter()
    done = import_trace(source, source.with_suffix(".parquet"), source_format=source.name)
    seconds = time.perf_counter() - start
    size = source.stat().st_size / 1e6
    print(f"{source.name}: {done.rows:,} of {rows:,} rows, {size:.0f} MB in {seconds:.1f} s, peak {peak_gb():.2f} GB")


def _mooncake(path: Path, rows: int) -> None:
    random = np.random.default_rng(0)
    stamps = np.sort(random.integers(0, rows * 200, rows)).tolist()
    outputs = random.integers(1, 900, rows).tolist()
    blocks = chat(REFERENCES // 10)  # again and again with other ids; blocks of 256 tokens, called 512
    numbers: dict[int, int] = {}
    with path.open("w") as file:
        for number in range(rows):
            own = blocks[number % len(blocks)][::16].tolist()
            shift = number // len(blocks) * 10**8
            ids = [numbers.setdefault(one + shift, len(numbers)) for one in own]
            row = {
                "timestamp": stamps[number],
                "input_length": len(ids) * 512 - 100,
                "output_length": outputs[number],
                "hash_ids": ids,
            }
            file.write(json.dumps(row) + "\n")


def _azure(path: Path, rows: int) -> None:
    random = np.random.default_rng(0)
    ticks = np.sort(random.integers(0, 10**7 * 86_000, rows)).tolist()
    sizes = random.integers(1, 7000, (rows, 2)).tolist()
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
        for tick, (asked, answered) in zip(ticks, sizes, strict=True):
            second, fraction = divmod(tick, 10**7)
            clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
            file.write(f"2023-11-16 {clock}.{fraction:07d},{asked},{answered}\r\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["curve", "loop", "import"])
    parser.add_argument("--trace", type=Path, help="a Mooncake file, for `curve`")
    options = parser.parse_args()
    os.sched_setaffinity(0, {0})  # one core
    match options.what:
        case "curve":
            curve(options.trace)
        case "loop":
            loop()
        case "import":
            imports()
    sys.exit(0)
