"""How large and how fast trace files are, beside JSON lines, Polars' Parquet and DuckDB's, for one public trace.

python bench/trace_size.py conversation_trace.jsonl
"""

import sys
import tempfile
import time
from pathlib import Path

import duckdb
import polars as pl

from tracer.importing import import_trace
from tracer.tracefile import count_requests, iter_requests

source = Path(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    trace = Path(folder) / "trace.parquet"
    start = time.perf_counter()
    rows = import_trace(source, trace).rows
    imported = time.perf_counter() - start
    start = time.perf_counter()
    assert sum(1 for _ in iter_requests(trace)) == count_requests(trace) == rows
    read = time.perf_counter() - start
    frame = pl.read_parquet(trace)
    by_polars, by_duckdb = Path(folder) / "polars.parquet", Path(folder) / "duckdb.parquet"
    frame.write_parquet(by_polars, compression="zstd")
    duckdb.sql(f"copy (from '{trace}') to '{by_duckdb}' (format parquet, compression zstd, parquet_version V2)")
    print(f"{rows} requests, import {rows / imported:,.0f} rows/s, read back as rows {rows / read:,.0f} rows/s")
    for name, path in (("JSON lines", source), ("Polars", by_polars), ("DuckDB", by_duckdb), ("chatreel", trace)):
        size = path.stat().st_size
        print(f"{name:12} {size / rows:8.1f} bytes/request  {size / trace.stat().st_size:5.1f}x")
