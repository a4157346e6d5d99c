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

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracer.record.compactor import CompactResult, compact
    from tracer.record.recording import RecorderProcess, RecordResult, record, start_recorder
    from tracer.record.session import RecordConfig, RecordStats

_FOUND_IN = {
    "CompactResult": "compactor",
    "RecordConfig": "session",
    "RecordResult": "recording",
    "RecordStats": "session",
    "RecorderProcess": "recording",
    "compact": "compactor",
    "record": "recording",
    "start_recorder": "recording",
}

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


def __getattr__(name: str) -> object:
    """A worker, which is a process of this package, starts without the parts that are not its own."""
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FOUND_IN[name]}"), name)
