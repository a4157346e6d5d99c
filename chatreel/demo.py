"""The whole loop on one machine: simulated server, recorder, a chat crowd; then analyze, generate, replay, report."""

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import numpy as np
from rich.console import Console

from chatreel import PRODUCER
from chatreel.generating import GenerateOptions, run_generate
from chatreel.replaying import run_and_report
from replay.judge.verdict import EXIT_INVALID, EXIT_OK
from replay.run import ReplayConfig
from tracer.analysis.summary import COLUMNS, analyze
from tracer.analysis.text import print_analysis
from tracer.errors import TraceError
from tracer.tokens import safe_words
from tracer.tracefile import read_footer, read_table
from tracer.wire.facts import StreamFacts
from tracer.wire.openai import parse_chunk
from tracer.wire.sse import SseParser

PRESET = "laptop-demo"
START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """People who chat: each has one session with one of a few system prompts, and reads before going on."""

    users: int
    arrive_within_s: float
    turns: int
    think_s: float
    kv_tokens: int  # of the simulated server: small, so that what one laptop can send fills it at 5x
    system_prompts: int = 3
    system_words: int = 700
    message_words: tuple[int, int] = (60, 700)
    answer_tokens: tuple[int, int] = (40, 120)


FULL = Crowd(users=40, arrive_within_s=8.5, turns=4, think_s=0.8, kv_tokens=34_000)
QUICK = Crowd(users=16, arrive_within_s=1.8, turns=2, think_s=0.3, answer_tokens=(20, 60), kv_tokens=12_000)


def run_demo(folder: Path, quick: bool, seed: int, out: Console, err: Console) -> int:
    """Returns an exit code. Everything it makes stays in `folder`.

    A point at which this machine was too slow is marked invalid as in any replay, but it does not fail the demo.
    """
    crowd, scales = (QUICK if quick else FULL), (1.0, 2.0, 5.0)
    if folder.exists() and any(folder.iterdir()):
        if not (folder / "recording.parquet").exists():
            raise TraceError("the folder holds other things", path=str(folder), next_step="Choose another --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    recording, workload, run_dir = folder / "recording.parquet", folder / "workload.parquet", folder / "run"

    def step(number: int, title: str) -> None:
        err.print(f"\n[bold]{number}/4 {title}[/bold]", highlight=False)

    with _started(folder, "serve", "--preset", PRESET, "--kv-tokens", str(crowd.kv_tokens), "--port", "0") as server:
        step(1, f"record: {crowd.users} people chat with a simulated server ({PRESET}, {crowd.kv_tokens} KV tokens)")
        with _started(folder, "record", "--upstream", server, "--port", "0", "-o", str(recording)) as proxy:
            asyncio.run(_chat(proxy, crowd, seed))
        step(2, "analyze: what the recording shows")
        print_analysis(analyze(read_table(recording, COLUMNS), read_footer(recording), str(recording), top=5), out)
        step(3, "generate: draw the recorded sharing groups again")
        for line in run_generate(GenerateOptions(from_trace=recording), seed, workload):
            err.print(line, highlight=False, markup=False)
        step(4, "replay it at 1x, 2x and 5x as many users, and report")
        config = ReplayConfig(trace=workload, target=server, run_dir=run_dir, scales=scales, seed=seed)
        code = run_and_report(config, [], None, out, err)
    shutil.copy(run_dir / "report.html", folder / "report.html")
    err.print(f"open {folder / 'report.html'} in a browser ({PRODUCER})", highlight=False, soft_wrap=True)
    return EXIT_OK if code == EXIT_INVALID else code


@contextmanager
def _started(folder: Path, command: str, *options: str) -> Iterator[str]:
    """A chatreel server as its own process, as a user would run it; yields its URL, and ends it as Ctrl-C would."""
    log_path = folder / f"{command}.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "chatreel", command, *options], stderr=log, stdout=log)
        try:
            yield _url(process, log_path)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: "subprocess.Popen[bytes]", log_path: Path) -> str:
    """The URL in the first line that names one with ` at http://`."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in log_path.read_text(errors="replace").splitlines():
            if " at http://" in line:
                return "http://" + line.split(" at http://", 1)[1].split()[0]
        time.sleep(0.05)
    raise TraceError("a server of the demo did not start", path=str(log_path), seen=log_path.read_text(errors="replace")[-500:])


async def _chat(url: str, crowd: Crowd, seed: int) -> None:
    words = [word.decode() for word in safe_words("cl100k")[0].tolist()]
    rng = np.random.default_rng(seed)
    prompts = [_text(words, crowd.system_words, rng) for _ in range(crowd.system_prompts)]
    starts = np.sort(rng.random(crowd.users)) * crowd.arrive_within_s
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_keepalive_connections=16)) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        async with asyncio.TaskGroup() as group:
            for start_s, child in zip(starts.tolist(), rng.spawn(crowd.users), strict=True):
                # The first prompt is the popular one, as in production.
                system = prompts[min(int(child.exponential(0.7)), len(prompts) - 1)]
                group.create_task(_session(client, model, crowd, system, words, start_s, child))


async def _session(
    client: httpx.AsyncClient, model: str, crowd: Crowd, system: str, words: list[str], start_s: float, rng: np.random.Generator
) -> None:
    await asyncio.sleep(start_s)
    messages = [{"role": "system", "content": system}]
    for _ in range(int(rng.integers(1, crowd.turns + 1))):
        messages.append({"role": "user", "content": _text(words, int(rng.integers(*crowd.message_words)), rng)})
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": int(rng.integers(*crowd.answer_tokens)),
            "ignore_eos": True,
        }
        messages.append({"role": "assistant", "content": await _answer(client, body)})
        await asyncio.sleep(float(rng.exponential(crowd.think_s)))


async def _answer(client: httpx.AsyncClient, body: dict[str, object]) -> str:
    parser, facts = SseParser(), StreamFacts()
    async with client.stream("POST", "/v1/chat/completions", content=msgspec.json.encode(body)) as response:
        response.raise_for_status()
        async for chunk in response.aiter_raw():
            for event in parser.feed(chunk):
                facts.add(parse_chunk(event.data))
    return "".join(facts.text)


def _text(words: list[str], count: int, rng: np.random.Generator) -> str:
    return "Hello" + "".join(words[i] for i in rng.integers(len(words), size=count).tolist())
