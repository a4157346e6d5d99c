"""A replay against a real server: llama.cpp with a tiny random model, whose cache knows tokens, not blocks."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replay.outcome import Outcome, Sample
from replay.results import read_lines, read_outcomes
from replay.run import ReplayConfig, replay
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

SCRIPT = Path(__file__).parents[2] / "scripts" / "llama-cpp"
SLOTS, CONTEXT_TOKENS = 4, 16384  # 4096 for each slot


@pytest.fixture(scope="session")
def home() -> Path:
    """Where the server is installed."""
    done = subprocess.run([sys.executable, SCRIPT, "install"], capture_output=True, text=True, timeout=170)
    if done.returncode:
        pytest.skip(f"llama.cpp cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip())


@pytest.fixture
def url(home: Path) -> Iterator[str]:
    """A fresh server, its cache empty."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, SCRIPT, "serve", "--port", port, "--slots", SLOTS, "--context", CONTEXT_TOKENS]
    pipe = subprocess.PIPE
    with subprocess.Popen(list(map(str, command)), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None and server.stdin is not None
        address = server.stdout.readline().strip()
        assert address, "the server ended at its start"
        yield address
        server.stdin.close()  # it ends then


def conversations(sessions: int, turns: int) -> list[Request]:
    """Each with a prefix of its own; a turn carries all that was said so far."""
    rows: list[Request] = []
    next_id = 0
    for session in range(sessions):
        known: list[int] = []
        length = 300
        for turn in range(turns):
            total = length + 20
            path = known + list(range(next_id, next_id + total // 16 - len(known)))
            next_id = max(next_id, *path) + 1
            rows.append(
                {
                    "arrival_ns": session * 50_000_000 + turn * 500_000_000,
                    "session_id": session,
                    "turn": turn,
                    "think_ns": 100_000_000 if turn else None,
                    "input_tokens": length,
                    "output_tokens": 20,
                    "input_blocks": path[: length // 16],
                    "output_blocks": path[length // 16 :],
                }
            )
            known, length = path, total + 45
    rows.sort(key=lambda row: row["arrival_ns"])
    return [{"request_id": i, **row} for i, row in enumerate(rows)]


def played(tmp_path: Path, url: str, rows: list[Request], **changes: Any) -> tuple[dict[str, Any], list[Outcome], list[Sample]]:
    write_trace(tmp_path / "trace.parquet", iter(rows), Footer())
    config = ReplayConfig(trace=tmp_path / "trace.parquet", target=url, run_dir=tmp_path / "run", scales=(1.0,), **changes)
    asyncio.run(replay(config))
    samples, _ = read_lines(tmp_path / "run" / "point-0.samples.jsonl", Sample)
    outcomes, _ = read_outcomes(tmp_path / "run", 0)
    return msgspec.json.decode((tmp_path / "run" / "run.json").read_bytes()), outcomes, samples


@pytest.mark.parametrize("transport", ["own", "httpx"])
def test_cached_tokens_are_those_predicted_but_for_the_rest_of_a_block(tmp_path: Path, url: str, transport: str) -> None:
    manifest, outcomes, samples = played(tmp_path, url, conversations(SLOTS, 4), transport=transport)

    # The server closes each connection after its stream though it says keep-alive: none of the later requests may fail of that.
    assert [one.error_text for one in outcomes if one.error_kind] == []
    assert manifest["prompt_mode"] == "ids"
    assert all(one.input_tokens == one.planned_input_tokens and one.output_tokens == 20 for one in outcomes)
    prompt = sum(one.input_tokens or 0 for one in outcomes)
    cached = sum(one.cached_tokens or 0 for one in outcomes)
    predicted = manifest["points"][0]["hit_rate_predicted_infinite"] * prompt
    assert predicted > 0.5 * prompt
    assert predicted <= cached <= predicted + 16 * len(outcomes)
    assert samples[-1].prefix_hits_tokens == cached
    assert samples[-1].prefix_queries_tokens == samples[-1].prompt_tokens == prompt
    assert samples[-1].generation_tokens == 20 * len(outcomes)
    assert None not in {one.running for one in samples}
    assert {one.kv_usage for one in samples} == {one.preemptions for one in samples} == {None}  # it does not tell them


@pytest.mark.parametrize("mode", ["text", "chat", "responses", "messages"])
def test_text_prompts_come_out_with_exact_lengths(tmp_path: Path, url: str, home: Path, mode: str) -> None:
    tokenizer = str(home / "tokenizer.json")

    manifest, outcomes, _ = played(tmp_path, url, conversations(2, 2), prompt_mode=mode, tokenizer=tokenizer)

    assert manifest["prompt_mode"] == mode
    assert all(one.error_kind is None and one.input_tokens == one.planned_input_tokens for one in outcomes)


def test_a_prompt_beyond_the_context_is_an_outcome_with_the_servers_words(tmp_path: Path, url: str) -> None:
    rows = conversations(3, 1)
    rows[1] |= {"input_tokens": 5000, "input_blocks": list(range(1000, 1312))}

    _, outcomes, _ = played(tmp_path, url, rows)

    by_row = {one.source_request_id: one for one in outcomes}
    assert (by_row[1].error_kind, by_row[1].http_status) == ("http_status", 400)
    assert "exceeds the available context size" in (by_row[1].error_text or "")
    assert by_row[0].error_kind is by_row[2].error_kind is None
