"""Recording: a proxy that forwards LLM traffic untouched and writes down its shape, never its text.

addon.py       mitmproxy hooks: stamp and forward              proxy process
exchange.py    stamps and bytes of one request -> facts (pure)
channel.py     bounded, never blocking queue to the worker
worker.py      tokenizes, hashes, writes                       worker process
rows.py        request + facts -> the row that may be written (allow-list)
privacy.py     the key, and every hash made with it
writer.py      crash-safe segments; a full disk stops writing, never traffic
compactor.py   segments -> trace file
recording.py   what the command and tests call
"""

from tracer.record.compactor import CompactResult, compact
from tracer.record.recording import (
    RecordConfig,
    RecorderProcess,
    RecordResult,
    RecordStats,
    record,
    start_recorder,
)

__all__ = [
    "CompactResult",
    "RecordConfig",
    "RecordResult",
    "RecordStats",
    "RecorderProcess",
    "compact",
    "record",
    "start_recorder",
]
