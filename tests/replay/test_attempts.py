"""Requests that are sent again after a fault, those that are hung up on, and the key that goes with them."""

import asyncio
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from replay import prompting
from replay.errors import PlanError
from replay.outcome import Outcome
from replay.prompting import Bodies
from replay.report.reading import judge_run
from replay.results import read_outcomes
from replay.run import ReplayConfig, replay
from replay.sim.api import ApiError, Ask
from replay.sim.engine import Request as EngineRequest
from replay.sim.server import ServerConfig, Simulator, Stream, serving
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

MS = 1_000_000


def row(number: int, **more: Any) -> Request:
    return {"request_id": number, "arrival_ns": number * 20 * MS, "input_tokens": 64, "output_tokens": 8, **more}  # type: ignore[typeddict-item]


def played(tmp_path: Path, rows: list[Request], **choices: Any) -> list[Outcome]:
    write_trace(tmp_path / "trace.parquet", rows, Footer())

    async def run() -> None:
        async with serving(ServerConfig(port=0)) as url:
            config = ReplayConfig(
                trace=tmp_path / "trace.parquet", target=url, run_dir=tmp_path / "run", scales=(1.0,), **choices
            )
            await replay(config)

    asyncio.run(run())
    seen, _ = read_outcomes(tmp_path / "run", 0)
    return sorted(seen, key=lambda one: one.source_request_id)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Counter[bytes]:
    """Each prompt of a replay is refused once; how often each came."""
    came: Counter[bytes] = Counter()

    def refused_once(self: Simulator, ask: Ask, prompt: "array[int]", arrival_s: float) -> tuple[EngineRequest, Stream]:
        came[prompt.tobytes()] += ask.stream
        if ask.stream and came[prompt.tobytes()] == 1:
            raise ApiError("too busy", status=503)
        return opened(self, ask, prompt, arrival_s)

    opened = Simulator.open
    monkeypatch.setattr(Simulator, "open", refused_once)
    return came


@pytest.mark.parametrize("transport", ["own", "httpx"])
def test_a_failed_request_is_sent_again_if_that_was_asked_for(tmp_path: Path, refusals: Counter[bytes], transport: str) -> None:
    seen = played(tmp_path, [row(i) for i in range(4)], retries=2, transport=transport)

    assert [(one.error_kind, one.output_tokens, one.retried) for one in seen] == [(None, 8, "http_status")] * 4
    assert [count for count in refusals.values() if count] == [2] * 4
    for one in seen:  # lateness is that of the first attempt, what the user waited that of all
        assert one.sent_ns is not None and one.first_byte_ns is not None
        assert one.first_byte_ns - one.sent_ns >= 500 * MS
    point = judge_run(tmp_path / "run", []).points[0]
    assert (point.retried, point.errors) == (4, {})
    assert ["4 requests were sent again after 4 http_status"] == [note.seen for note in point.notes if note.kind == "retried"]


def test_without_the_flag_a_failure_is_a_failure(tmp_path: Path, refusals: Counter[bytes]) -> None:
    seen = played(tmp_path, [row(i) for i in range(3)])

    assert [(one.error_kind, one.retried) for one in seen] == [("http_status", None)] * 3


def test_hang_ups_come_when_they_came_and_free_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[tuple[int, bool]] = []

    def close(self: Simulator, request: EngineRequest) -> None:
        closed.append((len(request.answer), request.finish_reason is None))
        close_really(self, request)

    close_really = Simulator.close
    monkeypatch.setattr(Simulator, "close", close)
    rows = [
        row(0),
        row(1, max_tokens=5000, client_abort_ns=400 * MS),  # 8 tokens had come
        row(2, output_tokens=None, client_abort_ns=1 * MS, session_id=0, turn=0),
        row(3, session_id=0, turn=1, think_ns=5 * MS),
    ]

    seen = played(tmp_path, rows)

    assert [one.error_kind for one in seen] == [None, "client_abort", "client_abort", None]
    left = seen[1]
    assert left.sent_ns is not None and left.end_ns is not None
    assert 400 * MS <= left.end_ns - left.sent_ns
    assert 1 < len(left.chunk_gaps_us) < 5000
    assert seen[3].planned_ns == (seen[2].end_ns or 0) + 5 * MS
    assert (5000, True) in closed
    point = judge_run(tmp_path / "run", []).points[0]
    assert (point.hung_up, point.errors, point.completed) == (2, {}, 2)
    assert "hung_up" in [note.kind for note in point.notes]


def test_patience_may_be_had(tmp_path: Path) -> None:
    seen = played(tmp_path, [row(0), row(1, max_tokens=5000, client_abort_ns=1 * MS)], hang_up=False)

    assert [(one.error_kind, one.output_tokens) for one in seen] == [(None, 8), (None, 8)]


def test_hanging_up_ends_the_wait_for_another_attempt(tmp_path: Path, refusals: Counter[bytes]) -> None:
    seen = played(tmp_path, [row(0, client_abort_ns=200 * MS)], retries=5)

    assert [(one.error_kind, one.retried) for one in seen] == [("http_status", None)]


@pytest.mark.parametrize("mode", ["ids", "text"])
def test_prompts_that_are_built_ahead_are_those_built_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    def opened(self: Simulator, ask: Ask, prompt: "array[int]", arrival_s: float) -> tuple[EngineRequest, Stream]:
        if ask.stream:
            came.append(prompt.tobytes())
        return really_opened(self, ask, prompt, arrival_s)

    def built(self: Bodies, rows: list[int]) -> None:
        really_built(self, rows)
        held.append(len(self.built))

    really_opened, really_built = Simulator.open, Bodies._build
    monkeypatch.setattr(Simulator, "open", opened)
    monkeypatch.setattr(Bodies, "_build", built)
    rows = [
        row(
            at,
            session_id=0,
            turn=at,
            think_ns=0 if at else None,
            input_blocks=list(range(2 * at + 1)),
            input_tokens=16 * (2 * at + 1),
        )
        for at in range(6)
    ]
    seen = []
    for most in (16, 0):
        came: list[bytes] = []
        held: list[int] = []
        monkeypatch.setattr(prompting, "AHEAD_REQUESTS", most)
        folder = tmp_path / str(most)
        folder.mkdir()
        outcomes = played(folder, rows, prompt_mode=mode)
        assert all(one.error_kind is None for one in outcomes)
        seen.append((came, [one.answer_spliced for one in outcomes]))
        assert (max(held) > 1) is (most > 0 and mode == "text")  # in mode ids a turn holds the answer before it

    assert seen[0] == seen[1]
    assert len(set(seen[0][0])) == len(rows)


@pytest.mark.parametrize("held", ["", "two words\n", "sécret\n"])
def test_a_file_that_holds_no_key_is_refused_and_not_shown(tmp_path: Path, held: str) -> None:
    (tmp_path / "key").write_text(held)

    with pytest.raises(PlanError, match="no API key") as refused:
        played(tmp_path, [row(0)], api_key_file=tmp_path / "key")

    assert not held.strip() or held.strip() not in str(refused.value)


def test_the_key_of_a_file_is_sent_and_stays_out_of_the_run_folder(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-verysecret\n")

    seen = played(tmp_path, [row(0)], api_key_file=tmp_path / "key")

    assert seen[0].error_kind is None
    assert not [path for path in (tmp_path / "run").iterdir() if b"verysecret" in path.read_bytes()]
