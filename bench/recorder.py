"""What recording costs: direct, a plain mitmproxy reverse proxy, and `chatreel record`, in turns before one upstream.

python bench/recorder.py [--rounds 4]

Four or five processes on loopback: this load generator, the upstream, the proxy, and chatreel's worker. Send stamps stand in
the chunks (CLOCK_MONOTONIC, one for all processes), so a chunk's delay is its own, from upstream's write to client.
"""

import argparse
import asyncio
import contextlib
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from recorder_peers import CHUNKS, LENGTH

from tracer.record.recording import RecordConfig, start_recorder
from tracer.tokens import safe_words

PEERS = str(Path(__file__).with_name("recorder_peers.py"))
STREAMS, GAP_MS = 32, 20
PARTS = 4  # of a paced load, each with a p99 of its own: what the machine does for a moment spoils one, not all
SLICES = 3  # of each short load a round
PROMPT_TOKENS, PROMPT_EVERY_S = 100_000, 0.2
TICKS_PER_S = 100  # of /proc/PID/stat
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: upstream\r\ncontent-type: application/json\r\nx-gap-ms: %d\r\n"


class Client(asyncio.Protocol):
    """One keep-alive connection. `delays_ns` gathers (sent at, delay) of the chunks of all its streams."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.delays_ns: list[tuple[int, int]] = []
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ask(self, request: bytes) -> int:
        """Returns the nanoseconds until the answer is whole."""
        self.buffer, self.needed, self.is_stream = b"", 0, False
        self.done = asyncio.get_running_loop().create_future()
        start = time.monotonic_ns()
        self.transport.write(request)
        return await self.done - start

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.buffer += data
        if not self.needed and not self.is_stream:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return
            assert head.startswith(b"HTTP/1.1 200"), head
            length = LENGTH.search(head)
            self.is_stream = length is None
            self.needed = 0 if length is None else len(head) + 4 + int(length[1])
            self.buffer = rest if self.is_stream else self.buffer
        if self.is_stream:
            *events, self.buffer = self.buffer.split(b"\n\n")
            for event in events:
                if (at := event.find(b'"id":"0')) >= 0:
                    sent_ns = int(event[at + 6 : at + 25])
                    self.delays_ns.append((sent_ns, now - sent_ns))
            if self.buffer.endswith(b"0\r\n\r\n"):
                self.done.set_result(now)
        elif len(self.buffer) >= self.needed:
            self.done.set_result(now)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("closed"))


class Requests:
    """No two alike, so that the recorder's worker has to tokenize each one's last message."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._words = safe_words("cl100k", 5)[0]
        self._number = 0
        self._system, self._user = self._text(50), self._text(35)
        self._prompt = self._text(PROMPT_TOKENS)

    def _text(self, count: int) -> bytes:
        return b"".join(self._random.choice(self._words, count).tolist())

    def chat(self) -> bytes:
        return self._make(self._system, self._user, b"false", 0)

    def stream(self, gap_ms: int) -> bytes:
        return self._make(self._system, self._user, b"true", gap_ms)

    def long(self) -> bytes:
        return self._make(self._system, self._prompt, b"false", 0)

    def _make(self, system: bytes, user: bytes, stream: bytes, gap_ms: int) -> bytes:
        self._number += 1
        messages = b'[{"role": "system", "content": "%s"}, {"role": "user", "content": "%d%s"}]' % (system, self._number, user)
        body = b'{"model": "m", "messages": %s, "stream": %s}' % (messages, stream)
        return HEAD % gap_ms + b"content-length: %d\r\n\r\n" % len(body) + body


@dataclass
class Target:
    name: str
    port: int
    pid: int | None = None
    asked: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict)

    def keep(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def keep_ms(self, name: str, values_ns: list[int] | np.ndarray) -> None:
        for percent in (50, 99):
            self.keep(f"{name} p{percent} ms", float(np.percentile(values_ns, percent)) / 1e6)

    def cpu_s(self) -> tuple[float, float]:
        """(proxy's, its children's)."""
        if self.pid is None:
            return 0.0, 0.0
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return _cpu_s(self.pid), sum(_cpu_s(int(child)) for child in children)

    def keep_cpu(self, name: str, before: tuple[float, float], count: float) -> None:
        for process, start, end in zip(("proxy", "worker"), before, self.cpu_s(), strict=True):
            self.keep(name.format(process), (end - start) / count)

    async def settle(self) -> None:
        """Until the worker has nothing left to do, so that no load pays for the one before."""
        last = -1.0
        while (now := self.cpu_s()[1]) > last + 1 / TICKS_PER_S:
            last = now
            await asyncio.sleep(0.1)


def _cpu_s(pid: int) -> float:
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / TICKS_PER_S


async def connect(target: Target, count: int, requests: Requests) -> list[Client]:
    """Each has had an answer: opening a connection costs mitmproxy more than a request, and is not what we measure."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(Client, "127.0.0.1", target.port))[1] for _ in range(count)]
    for client in clients:
        await client.ask(requests.chat())
    target.asked += count
    return clients


async def json_load(target: Target, requests: Requests, count: int, seconds: float) -> None:
    clients, taken_ns, cpu = await connect(target, count, requests), [], target.cpu_s()
    start = time.monotonic()

    async def ask_on(client: Client) -> None:
        while time.monotonic() < start + seconds:
            taken_ns.append(await client.ask(requests.chat()))

    await asyncio.gather(*(ask_on(client) for client in clients))
    target.keep(f"json c={count} requests/s", len(taken_ns) / (time.monotonic() - start))
    target.keep_ms(f"json c={count}", taken_ns)
    await target.settle()
    target.keep_cpu(f"json c={count} {{}} CPU ms/request", cpu, len(taken_ns) / 1000)
    target.asked += len(taken_ns)
    close(clients)


async def paced_load(target: Target, requests: Requests, prompts: bool) -> None:
    clients = await connect(target, STREAMS + prompts, requests)
    label = "paced + 100k prompts" if prompts else "paced"
    long_ns, long_client = [], clients.pop() if prompts else None

    async def stream(client: Client, number: int) -> None:
        await asyncio.sleep(number * GAP_MS / 1000 / STREAMS)
        await client.ask(requests.stream(GAP_MS))

    streams = asyncio.gather(*(stream(client, number) for number, client in enumerate(clients)))
    while long_client is not None and not streams.done():
        due = time.monotonic() + PROMPT_EVERY_S
        long_ns.append(await long_client.ask(requests.long()))
        await asyncio.sleep(due - time.monotonic())
    await streams
    delays_ns = [delay for _, delay in sorted(pair for client in clients for pair in client.delays_ns)]
    assert len(delays_ns) == STREAMS * CHUNKS, len(delays_ns)
    for part in np.array_split(delays_ns, PARTS):
        target.keep_ms(f"{label}, chunk delay", part)
    if long_client is not None:
        target.keep("100k prompt p50 ms", float(np.median(long_ns)) / 1e6)
        clients.append(long_client)
    target.asked += STREAMS + len(long_ns)
    await target.settle()
    close(clients)


async def unpaced_load(target: Target, requests: Requests, seconds: float) -> None:
    clients, cpu, streams = await connect(target, STREAMS, requests), target.cpu_s(), 0
    start = time.monotonic()

    async def stream_on(client: Client) -> None:
        nonlocal streams
        while time.monotonic() < start + seconds:
            await client.ask(requests.stream(0))
            streams += 1

    await asyncio.gather(*(stream_on(client) for client in clients))
    chunks = streams * CHUNKS
    target.keep("unpaced chunks/s", chunks / (time.monotonic() - start))
    await target.settle()
    target.keep_cpu("unpaced {} CPU us/chunk", cpu, chunks / 1e6)
    target.asked += streams
    close(clients)


def close(clients: list[Client]) -> None:
    for client in clients:
        client.transport.close()


async def measure(targets: list[Target], rounds: int) -> None:
    requests = Requests()
    gc.collect()
    gc.freeze()
    short = [
        lambda target: json_load(target, requests, 1, 0.4),
        lambda target: json_load(target, requests, STREAMS, 0.6),
        lambda target: unpaced_load(target, requests, 0.4),
    ]
    long = [lambda target: paced_load(target, requests, False), lambda target: paced_load(target, requests, True)]
    for number in range(rounds):
        for turn, load in enumerate(SLICES * short + long):
            first = (number + turn) % 3
            for target in targets[first:] + targets[:first]:
                await load(target)
        print(f"round {number + 1} of {rounds} done", file=sys.stderr, flush=True)


def show(targets: list[Target]) -> None:
    _, plain, ours = targets
    print(f"| median | {' | '.join(target.name for target in targets)} | chatreel / plain |\n|---|---|---|---|---|")
    for name in ours.figures:
        medians = [f"{np.median(target.figures[name]):.4g}" for target in targets]
        ratio = ratio_text(ours, plain, name) if min(plain.figures[name]) > 0 else "-"
        print(f"| {name} | {' | '.join(medians)} | {ratio} |")


def ratio_of(ours: Target, plain: Target, name: str) -> float:
    """Median of the slices' own ratios: what slows the machine for a while slows both."""
    return float(np.median(np.divide(ours.figures[name], plain.figures[name])))


def ratio_text(ours: Target, plain: Target, name: str) -> str:
    """With the 95 % interval of the median, by bootstrap."""
    ratios = np.divide(ours.figures[name], plain.figures[name])
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return f"{np.median(ratios):.2f} ({low:.2f} to {high:.2f})"


def judge(plain: Target, ours: Target) -> None:
    def verdict(text: str, is_met: bool) -> None:
        print(f"{'met   ' if is_met else 'MISSED'} {text}")

    for name in ("json c=1 requests/s", "json c=32 requests/s", "unpaced chunks/s"):
        ratio, text = ratio_of(ours, plain, name), ratio_text(ours, plain, name)
        verdict(f"{name}: {text} of plain mitmproxy's, wanted >= 0.90", ratio >= 0.9)
    for name in ("json c=1 p99 ms", "json c=32 p99 ms", "paced, chunk delay p99 ms"):
        ratio, text = ratio_of(ours, plain, name), ratio_text(ours, plain, name)
        verdict(f"{name}: {text} of plain mitmproxy's, wanted <= 1.10", ratio <= 1.1)
    for target in (plain, ours):
        with_prompts, without = (target.figures[f"paced{label}, chunk delay p99 ms"] for label in (" + 100k prompts", ""))
        rise = float(np.median(np.subtract(with_prompts, without)))
        verdict(f"100k-token prompts: chunk p99 of others rises by {rise:.2f} ms ({target.name}), wanted < 2", rise < 2)


@contextlib.contextmanager
def peer(*arguments: str) -> Iterator[tuple[int, int]]:  # port, pid
    process = subprocess.Popen([sys.executable, PEERS, *arguments], stdout=subprocess.PIPE)
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, peer("upstream") as (port, _):
        url = f"http://127.0.0.1:{port}"
        config = RecordConfig(upstream=url, out=f"{folder}/bench.parquet")
        with peer("plain", url) as (plain_port, plain_pid), start_recorder(config) as recorder:
            ours = Target("chatreel", int(recorder.url.rpartition(":")[2]), recorder.process.pid)
            targets = [Target("direct", port), Target("plain mitmproxy", plain_port, plain_pid), ours]
            asyncio.run(measure(targets, options.rounds))
            result = recorder.stop()
    show(targets)
    judge(targets[1], ours)
    print(f"rows recorded {result.rows} of {ours.asked}; losses {result.losses}")


if __name__ == "__main__":
    main()
