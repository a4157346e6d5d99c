"""Run folders told as stories: `story.at(5).requests(...).server(kv=0.99)`, written as a replay writes them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import msgspec
import pytest

from replay.outcome import Outcome, Sample
from replay.sim.server import ServerConfig, serving
from tracer.schema import Request

MS = 1_000_000
type Number = float | Callable[[int], float]


def outcome(
    request_id: int = 0,
    *,
    planned_ms: float = 0.0,
    late_ms: float = 0.3,
    ttft_ms: float = 50.0,
    tpot_ms: float = 10.0,
    output_tokens: int = 11,
    input_tokens: int = 1000,
    cached: int | None = 600,
    error: str | None = None,
    **changes: Any,
) -> Outcome:
    """One request: sent `late_ms` after it was due, first token `ttft_ms` after it was sent, each token its own chunk."""
    planned_ns = round(planned_ms * MS)
    sent_ns = planned_ns + round(late_ms * MS)
    first_ns = sent_ns + round(ttft_ms * MS)
    last_ns = first_ns + round(tpot_ms * (output_tokens - 1) * MS)
    fields: dict[str, Any] = {
        "request_id": request_id,
        "source_request_id": request_id,
        "session_id": request_id,
        "turn": 0,
        "planned_ns": planned_ns,
        "recorded_ns": planned_ns,
        "ready_ns": planned_ns,
        "sent_ns": sent_ns,
        "end_ns": last_ns,
        "planned_input_tokens": input_tokens,
        "planned_output_tokens": output_tokens,
    }
    if error is not None:
        return Outcome(**fields | {"error_kind": error, "end_ns": first_ns} | changes)
    answer = {
        "first_byte_ns": first_ns,
        "first_answer_ns": first_ns,
        "last_token_ns": last_ns,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "cached_tokens": cached,
        "token_count_source": "usage",
        "chunk_gaps_us": [round(tpot_ms * 1000)] * (output_tokens - 1),
        "chunk_tokens": [1] * output_tokens,
        "http_status": 200,
    }
    return Outcome(**fields | answer | changes)


def _value(number: Number, i: int) -> float:
    return number(i) if callable(number) else number


@dataclass
class Scale:
    """One point of a story."""

    facts: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def requests(self, count: int, *, every_ms: float, ttft_ms: Number = 50.0, late_ms: Number = 0.3, **same: Any) -> "Scale":
        for i in range(count):
            due_ms = i * every_ms
            one = outcome(i, planned_ms=due_ms, ttft_ms=_value(ttft_ms, i), late_ms=_value(late_ms, i), **same)
            self.outcomes.append(one)
        self.facts |= {"planned": count, "planned_span_s": (count - 1) * every_ms / 1000}
        return self

    def server(
        self, *, kv: float, running: int = 8, waiting: int = 0, preemptions: int = 0, preempts_from_s: float = 0.0, **same: Any
    ) -> "Scale":
        """A scrape per second; hits and prompt tokens as the outcomes have them; preemptions rise evenly from a moment on."""
        seconds = round(max(one.end_ns or 0 for one in self.outcomes) / 1e9) + 1
        prompt = sum(one.input_tokens or 0 for one in self.outcomes)
        hits = sum(one.cached_tokens or 0 for one in self.outcomes)
        for t in range(seconds + 1):
            past = max(0.0, t - preempts_from_s) / max(1.0, seconds - preempts_from_s)
            fields = {
                "kv_usage": kv,
                "running": running,
                "waiting": waiting,
                "preemptions": round(preemptions * past),
                "prefix_queries_tokens": prompt * t / seconds,
                "prefix_hits_tokens": hits * t / seconds,
                "prompt_tokens": prompt * t / seconds,
                "client_in_flight": running + waiting,
                "client_cpu_share": 0.2,
                "client_loop_lag_ns": 1 * MS,
            }
            self.samples.append(Sample(t_ns=t * 10**9, **fields | same))
        return self


@dataclass
class Story:
    folder: Path
    scales: list[Scale] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def at(self, scale: float, *, predicted: float | None = 0.6, **facts: Any) -> Scale:
        known = {
            "index": len(self.scales),
            "scale": scale,
            "by": "users",
            "seed": 7,
            "later_turns": 0,
            "hit_rate_predicted": predicted,
            "hit_rate_predicted_infinite": 0.7,
            "kv_capacity_tokens": 60_000,
            "answers_reused": True,
            "stopped": None,
        }
        self.scales.append(Scale(facts=known | facts))
        return self.scales[-1]

    def write(self) -> Path:
        manifest = {
            "schema_version": 1,
            "trace": "chat.parquet",
            "target": "http://127.0.0.1:8000",
            "model": "llama-3.2-1b",
            "prompt_mode": "ids",
            "seed": 7,
            "started_utc": "2026-01-02T03:04:05+00:00",
            "notes": self.notes,
            "points": [one.facts for one in self.scales],
        }
        (self.folder / "run.json").write_bytes(msgspec.json.encode(manifest))
        for one in self.scales:
            stem = self.folder / f"point-{one.facts['index']}"
            Path(f"{stem}.outcomes.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in one.outcomes))
            Path(f"{stem}.samples.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in one.samples))
        return self.folder


def chats(sessions: int, turns: int, *, every_ms: int = 50, think_ms: int = 100) -> Iterator[Request]:
    """Sessions with one system prompt, side by side."""
    for number in range(sessions * turns):
        turn, session = divmod(number, sessions)
        yield {
            "request_id": number,
            "arrival_ns": number * every_ms * MS,
            "session_id": session,
            "turn": turn,
            "think_ns": think_ms * MS if turn else None,
            "input_tokens": 60 + 40 * turn,
            "output_tokens": 5,
            "input_blocks": [0, 1, *(2 + session * 10 + i for i in range((60 + 40 * turn) // 16 - 2))],
        }


@contextmanager
def server() -> Iterator[str]:
    """In a thread of its own, so that a test may wait for something else."""
    urls: list[str] = []
    is_up, is_over = Event(), Event()

    async def run() -> None:
        async with serving(ServerConfig(port=0, speed=4)) as url:
            urls.append(url)
            is_up.set()
            await asyncio.to_thread(is_over.wait)

    thread = Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert is_up.wait(30)
        yield urls[0]
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(name="chats")
def chats_of() -> Callable[..., Iterator[Request]]:
    return chats


@pytest.fixture(name="server")
def server_in_a_thread() -> Callable[[], AbstractContextManager[str]]:
    return server


@pytest.fixture(name="outcome")
def make_outcome() -> Callable[..., Outcome]:
    return outcome


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(folder=tmp_path)


@pytest.fixture
def kv_fills_at_5x(story: Story) -> Story:
    """Three times the traffic is carried, five times is not: KV is full, requests are preempted, a queue grows."""
    story.notes.append("arrival stamps spread uniformly inside the recorded grid of 3 s")
    story.at(1, predicted=0.61).requests(300, every_ms=100, ttft_ms=80.0, cached=612).server(kv=0.31, running=9)
    story.at(2, predicted=0.57).requests(600, every_ms=50, ttft_ms=95.0, cached=571).server(kv=0.66, running=18)
    late = story.at(5, predicted=0.37)
    late.requests(1500, every_ms=20, ttft_ms=lambda i: 100.0 + 4.0 * i, tpot_ms=24.0, cached=384)
    late.server(kv=1.0, running=40, waiting=150, preemptions=37, preempts_from_s=6)
    return story
