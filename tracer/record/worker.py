"""The worker process: everything that costs time or touches the disk, away from the proxy's event loop.

It ends when told to, or when the proxy is gone (end of file on the socket); either way all it got is written first.
Run as `python -m tracer.record.worker FD`.
"""

import os
import resource
import select
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from tracer.errors import TraceError
from tracer.record.channel import Frames, framed
from tracer.record.exchange import ExchangeFacts
from tracer.record.figures import LiveFigures
from tracer.record.messages import (
    Begun,
    Counted,
    Ended,
    Header,
    Report,
    Started,
    Stop,
    Totals,
    ToWorker,
    WorkerConfig,
)
from tracer.record.privacy import Hasher, load_key
from tracer.record.rows import Pending, RowBuilder
from tracer.record.writer import SegmentWriter, lock_folder
from tracer.schema import BASE_BLOCK_TOKENS
from tracer.tokens import load_tokenizer

TICK_S = 0.25
REPORT_NS = 500_000_000
MAX_PENDING = 20_000  # requests under way; of more, the oldest surely ended unheard
NICENESS = 10  # where cores are short, traffic goes first; what the worker cannot keep up with is shed and counted

_decode: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToWorker)
_pack = msgspec.msgpack.Encoder().encode


class Worker:
    """Messages in, records out. Knows no socket, so tests can drive it."""

    def __init__(self, builder: RowBuilder, writer: SegmentWriter, counts: dict[str, int]) -> None:
        self._builder = builder
        self._writer = writer
        self._figures = LiveFigures()
        self._pending: dict[int, tuple[Begun, str, Pending]] = {}  # with endpoint
        self._before = Counter(counts)  # by workers that died
        self._told: dict[str, int] = {}  # by the proxy
        self._totals: dict[str, int] = {}

    def take(self, message: ToWorker) -> bool:
        """Returns False when there is nothing more to come."""
        match message:
            case Started():
                self._begin(message)
            case Ended():
                _, _, pending = self._pending.pop(message.flow, (None, None, None))
                row = self._builder.end(pending, message)
                self._figures.add(row)
                self._writer.add(_pack(row))
            case Counted():
                self._told = message.counts
            case Stop():
                return False
        return True

    def _begin(self, message: Started) -> None:
        begun = Begun(flow=message.flow, arrival_ns=message.arrival_ns)
        self._writer.add(_pack(begun), is_row=False)
        self._pending[message.flow] = begun, message.endpoint, self._builder.start(message)
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
            self._before["prompts_forgotten"] += 1

    def tick(self, now_ns: int) -> None:
        self._figures.tick(now_ns)
        self._write_totals()
        self._writer.tick(now_ns)

    def close(self) -> None:
        """Requests that have not ended become rows without an end; then all is written."""
        for begun, endpoint, pending in self._pending.values():
            facts = ExchangeFacts(error_kind="recorder_stopped")
            ended = Ended(flow=begun.flow, arrival_ns=begun.arrival_ns, endpoint=endpoint, facts=facts)
            self._writer.add(_pack(self._builder.end(pending, ended)))
        self._pending.clear()
        self._write_totals()
        self._writer.close()

    def counts(self) -> dict[str, int]:
        own = self._before + self._builder.counts
        own["rows_lost_on_disk"] += self._writer.rows_lost
        return {name: count for name, count in {**self._told, **own}.items() if count}

    def report(self, *, is_final: bool = False) -> Report:
        return Report(
            recorded=self._writer.rows_written,
            waiting=self._writer.rows_waiting,
            counts=self.counts(),
            figures=self._figures.figures(),
            disk_error=self._writer.error,
            is_final=is_final,
        )

    def _write_totals(self) -> None:
        totals = self.counts()
        if totals != self._totals:
            self._totals = totals
            self._writer.add(_pack(Totals(counts=totals)), is_row=False)


def build(config: WorkerConfig, now_ns: int) -> Worker:
    """Raises TraceError for a tokenizer or key that cannot be used."""
    hasher = Hasher(load_key(Path(config.key_path)))
    tokenizer = load_tokenizer(config.tokenizer)
    by_model = {model: load_tokenizer(name) for model, name in config.model_tokenizers.items()}
    header = Header(
        producer=config.producer,
        epoch_ns=config.epoch_ns,
        key_id=hasher.key_id,
        tokenizer="; ".join([tokenizer.name, *(f"{model}={one.name}" for model, one in by_model.items())]),
        template="chatml" if tokenizer.template is None else "own",
        block_tokens=BASE_BLOCK_TOKENS,
        source_format=config.source_format,
    )
    builder = RowBuilder(tokenizer, hasher, chunk_times=config.chunk_times, by_model=by_model)
    writer = SegmentWriter(Path(config.folder), _pack(header), now_ns)
    return Worker(builder, writer, config.counts)


def serve(connection: socket.socket) -> None:
    frames = Frames()
    waiting: list[bytes] = []
    while not waiting:
        data = connection.recv(1 << 16)
        if not data:
            return
        waiting = frames.feed(data)
    config = msgspec.msgpack.decode(waiting.pop(0), type=WorkerConfig)
    try:
        lock = lock_folder(Path(config.folder), wait_s=0)
        worker = build(config, time.monotonic_ns())
    except (TraceError, OSError) as error:
        connection.sendall(framed(Report(failed=str(error))))
        return
    try:
        _tell(connection, worker.report())
        _loop(connection, frames, waiting, worker)
        worker.close()
        _tell(connection, worker.report(is_final=True))
    finally:
        os.close(lock)


def _loop(connection: socket.socket, frames: Frames, waiting: list[bytes], worker: Worker) -> None:
    report_at_ns = 0
    while True:
        for payload in waiting:
            if not _take(worker, payload):
                return
        now_ns = time.monotonic_ns()
        worker.tick(now_ns)
        if now_ns >= report_at_ns:
            _tell(connection, worker.report())
            report_at_ns = now_ns + REPORT_NS
        waiting = []
        if select.select([connection], [], [], TICK_S)[0]:
            data = _receive(connection)
            if not data:
                return
            waiting = frames.feed(data)


def _take(worker: Worker, payload: bytes) -> bool:
    try:
        return worker.take(_decode.decode(payload))
    except Exception as error:  # one odd request must not cost the others; its text must not reach a log
        print(f"chatreel: a request could not be recorded ({type(error).__name__})", file=sys.stderr)
        return True


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 20)
    except ConnectionError:
        return b""


def _tell(connection: socket.socket, report: Report) -> None:
    try:
        connection.send(framed(report), socket.MSG_DONTWAIT)
    except OSError:
        pass  # the proxy is gone, or too busy to read; the next report says it again


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the proxy decides when to stop; its end is ours
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold prompts
    os.umask(0o077)
    os.nice(NICENESS)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
