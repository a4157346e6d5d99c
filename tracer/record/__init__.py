"""Recording: a proxy that forwards LLM traffic untouched and writes down its shape, never its text.

addon.py       mitmproxy hooks: stamp and forward              proxy process
exchange.py    stamps and bytes of one request -> facts (pure)
channel.py     bounded, never blocking queue to the worker
worker.py      tokenizes, hashes, writes                       worker process
rows.py        request + facts -> the row that may be written (allow-list)
privacy.py     the key, and every hash made with it
writer.py      crash-safe segments; a full disk stops writing, never traffic
compactor.py   segments -> trace file
capturing.py   captures of other tools (tracer/captures) -> trace file, through the same worker
session.py     one proxy and its worker
supervisor.py  several of them on one port; lane.py is one of those
recording.py   what the command and tests call
"""

from tracer.record.compactor import CompactResult, compact
from tracer.record.recording import RecorderProcess, RecordResult, record, start_recorder
from tracer.record.session import RecordConfig, RecordStats

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
