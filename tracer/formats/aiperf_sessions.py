"""AIPerf's `mooncake_trace` JSONL with sessions: turns wait for the answer before them, and hold only what they add. Pure.

    {"session_id": "4", "timestamp": 1000.5, "input_length": 300, "output_length": 40, "hash_ids": [0]}
    {"session_id": "4", "delay": 2000.0, "input_length": 150, "output_length": 20}

AIPerf sends a turn after all turns and live answers before it, so a turn's length here is what is new in it. A request that
does not go on where the one before it ended (history rewritten, another agent) begins a session of its own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tracer.formats.aiperf import usage
from tracer.formats.ids import FirstSeen
from tracer.formats.targets import prompt_ids, sendable
from tracer.schema import Footer, Request

__all__ = ["HOLDS", "NAME", "STEP_NS", "usage", "write"]

NAME = "aiperf_sessions"
HOLDS = frozenset(
    {"input_tokens", "output_tokens", "input_blocks", "output_blocks", "session_id", "turn", "parent_request_id", "think_ns"}
)
STEP_NS = 1


@dataclass(slots=True)
class _Talk:
    name: str
    request_id: int
    tokens: int  # of the last turn's prompt and answer
    end_ns: int | None


def write(rows: Iterable[Request], footer: Footer, losses: Counter[str]) -> Iterator[bytes]:
    numbers = FirstSeen()
    talks: dict[tuple[int, str | None], _Talk] = {}
    for row in sendable(rows, losses):
        session = row.get("session_id")
        key = (-1 - row["request_id"] if session is None else session, row.get("agent_id"))
        talk = talks.get(key)
        if talk is not None and _goes_on(row, talk):
            value: dict[str, Any] = {"session_id": talk.name, **_when(row, talk)}
            value["input_length"] = (row["input_tokens"] or 0) - talk.tokens
        else:
            if talk is not None:
                losses["turns that do not go on where the one before ended: sessions of their own"] += 1
            talk = _Talk(_name(row, session), 0, 0, None)
            value = {"session_id": talk.name, "timestamp": row["arrival_ns"] / 10**6, "input_length": row["input_tokens"]}
            value["hash_ids"] = prompt_ids(row, footer.block_tokens, numbers)
        value["output_length"] = row["output_tokens"]
        if session is not None:
            talks[key] = _after(row, talk)
        yield msgspec.json.encode(value) + b"\n"


def _name(row: Request, session: int | None) -> str:
    return f"r{row['request_id']}" if session is None else f"s{session}-r{row['request_id']}"


def _goes_on(row: Request, talk: _Talk) -> bool:
    return row.get("parent_request_id") in (None, talk.request_id) and (row["input_tokens"] or 0) > talk.tokens


def _when(row: Request, talk: _Talk) -> dict[str, float]:
    """The pause after the last answer where it is known, else the recorded time."""
    think_ns = row.get("think_ns")
    if think_ns is None and talk.end_ns is not None:
        think_ns = row["arrival_ns"] - talk.end_ns
    if think_ns is None:
        return {"timestamp": row["arrival_ns"] / 10**6}
    return {"delay": max(think_ns, 0) / 10**6}


def _after(row: Request, talk: _Talk) -> _Talk:
    end_ns = row.get("end_ns")
    return _Talk(
        talk.name,
        row["request_id"],
        (row["input_tokens"] or 0) + (row["output_tokens"] or 0),
        None if end_ns is None else row["arrival_ns"] + end_ns,
    )
