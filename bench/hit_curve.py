"""The hit curve of all cache sizes in one pass, beside a direct LRU simulation per size (OrderedDict, block by block).

python bench/hit_curve.py trace.parquet
"""

import sys
import time
from collections import OrderedDict

from tracer.analysis.reuse import hit_curve, touches_as_in_source
from tracer.tracefile import read_footer, read_table

SIZES = (1000, 2000, 5000, 10_000, 20_000)


def direct(lists: list[list[int]], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for ids in lists:
        for block in ids:
            if block not in cache:
                break
            hits += 1
        for block in reversed(ids):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


path = sys.argv[1]
touches = touches_as_in_source(read_table(path, ["input_blocks", "input_tail_id", "input_tokens"]), read_footer(path))
lists = [ids.tolist() for ids in touches.blocks]
start = time.perf_counter()
curve = hit_curve(touches)
one_pass = time.perf_counter() - start
start = time.perf_counter()
found = [direct(lists, size) for size in SIZES]
per_size = (time.perf_counter() - start) / len(SIZES)
assert found == [curve.hits_at(size) for size in SIZES], (found, [curve.hits_at(size) for size in SIZES])
print(f"{len(touches.blocks.ids):,} references: one pass for all sizes {one_pass:.3f} s, direct LRU {per_size:.3f} s per size")
print(f"ratio {per_size / one_pass:.2f} for one size; the same hits at {SIZES}: {found}")
