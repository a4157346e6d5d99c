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
from typing import TYPE_CHECKING, Any

import msgspec

from tracer.errors import TraceError
from tracer.record.channel import Frames, framed
from tracer.record.exchange import Exchange, ExchangeFacts
from tracer.record.figures import LiveFigures
from tracer.record.messages import (
    SERVER_TOKENIZER,
    Answered,
    Begun,
    Counted,
    Ended,
    Finished,
    Header,
    Piece,
    Report,
    Started,
    Stop,
    Totals,
    ToWorker,
    WorkerConfig,
)
from tracer.record.privacy import Hasher, load_key
from tracer.record.rows import Pending, RowBuilder
from tracer.record.texts import TextWriter
from tracer.record.writer import SegmentWriter, lock_folder
from tracer.schema import BASE_BLOCK_TOKENS
from tracer.tokens import BUILT_IN, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from tracer.record.server_tokens import ServerTokens

TICK_S = 0.25
REPORT_NS = 500_000_000
WANTED_TOKENIZER = f"{', '.join(BUILT_IN)}, the path of a tokenizer.json, or a model's folder"
LOCK_S = 5.0  # for a worker that was killed: one that has idle time only needs a while even to end
LAST_TOKENS_S = 15.0  # for an upstream that is asked for tokens, after the last request
MAX_UNDER_WAY = 20_000  # requests under way; of more, the oldest surely ended unheard

_decode: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(list[ToWorker])
_pack = msgspec.msgpack.Encoder().encode


class _UnderWay(msgspec.Struct):
    begun: Begun
    endpoint: str
    pending: Pending
    exchange: Exchange
    is_answered: bool = False  # without the head of a response, nobody can tell what its pieces are


class Worker:
    """Messages in, records out. Knows no socket, so tests can drive it."""

    def __init__(self, builder: RowBuilder, writer: SegmentWriter, counts: dict[str, int]) -> None:
        self._builder = builder
        self._writer = writer
        self._figures = LiveFigures()
        self._under_way: dict[int, _UnderWay] = {}  # by flow
        self._late: list[tuple[Pending, Ended]] = []  # over, but for tokens that the server has yet to say
        self._before = Counter(counts)  # by workers that died
        self._told: dict[str, int] = {}  # by the proxy
        self._totals: dict[str, int] = {}

    def take(self, message: ToWorker) -> bool:
        """Returns False when there is nothing more to come."""
        match message:
            case Piece():
                if (found := self._under_way.get(message.flow)) is not None and found.is_answered:
                    found.exchange.received(message.at_ns, message.data)
            case Started():
                self._begin(message)
            case Answered():
                if (found := self._under_way.get(message.flow)) is not None:
                    found.is_answered = True
                    found.exchange.answered(message.status, message.content_type, message.encoding)
            case Finished():
                self._finish(message)
            case Ended():
                found = self._under_way.pop(message.flow, None)
                self._write(found.pending if found is not None else None, message)
            case Counted():
                self._told = message.counts
            case Stop():
                return False
        return True

    def _begin(self, message: Started) -> None:
        begun = Begun(flow=message.flow, arrival_ns=message.arrival_ns)
        self._writer.add(_pack(begun), is_row=False)
        exchange = Exchange(message.arrival_ns, message.endpoint)
        self._under_way[message.flow] = _UnderWay(begun, message.endpoint, self._builder.start(message), exchange)
        if len(self._under_way) > MAX_UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]
            self._before["prompts_forgotten"] += 1

    def _finish(self, message: Finished) -> None:
        found = self._under_way.pop(message.flow, None)
        exchange = found.exchange if found is not None else Exchange(message.arrival_ns, message.endpoint)
        if exchange.bytes_out != message.bytes_out:
            self._before["answers_incomplete"] += 1
            exchange.lost_pieces(message.bytes_out)
        self._write(
            found.pending if found is not None else None,
            Ended(
                flow=message.flow,
                arrival_ns=message.arrival_ns,
                endpoint=message.endpoint,
                facts=facts_of(exchange, message),
                upstream=message.upstream,
            ),
        )

    def _write(self, pending: Pending | None, ended: Ended) -> None:
        if pending is not None and self._builder.awaits(pending, ended.facts):
            self._late.append((pending, ended))
            return
        row = self._builder.end(pending, ended)
        self._figures.add(row)
        self._writer.add(_pack(row))

    def tick(self, now_ns: int) -> None:
        self._write_late()
        self._figures.tick(now_ns)
        self._write_totals()
        self._writer.tick(now_ns)
        if self._builder.texts is not None:
            self._builder.texts.segments.tick(now_ns)

    def _write_late(self) -> None:
        late, self._late = self._late, []
        for pending, ended in late:
            self._write(pending, ended)

    def close(self) -> None:
        """Requests that have not ended become rows without an end; then all is written."""
        for one in self._under_way.values():
            facts = ExchangeFacts(error_kind="recorder_stopped")
            ended = Ended(flow=one.begun.flow, arrival_ns=one.begun.arrival_ns, endpoint=one.endpoint, facts=facts)
            self._write(one.pending, ended)
        self._under_way.clear()
        if self._builder.server is not None:
            self._builder.server.close(LAST_TOKENS_S)
        self._write_late()
        if self._builder.texts is not None:
            self._builder.texts.segments.close()
        self._write_totals()
        self._writer.close()

    def counts(self) -> dict[str, int]:
        own = self._before + self._builder.counts
        own["rows_lost_on_disk"] += self._writer.rows_lost
        if (texts := self._builder.texts) is not None:
            own["texts_lost"] += texts.failures + texts.segments.rows_lost
        return {name: count for name, count in {**self._told, **own}.items() if count}

    def report(self, *, is_final: bool = False) -> Report:
        return Report(
            recorded=self._writer.rows_written,
            waiting=self._writer.rows_waiting,
            counts=self.counts(),
            figures=self._figures.figures(),
            disk_error=self._writer.error,
            trouble=self._builder.server.trouble if self._builder.server is not None else None,
            is_final=is_final,
        )

    def _write_totals(self) -> None:
        totals = self.counts()
        if totals != self._totals:
            self._totals = totals
            self._writer.add(_pack(Totals(counts=totals)), is_row=False)


def facts_of(exchange: Exchange, message: Finished) -> ExchangeFacts:
    """The last of an exchange of which the bodies came before."""
    if message.status is not None:
        exchange.told(message.status)
    if message.dispatch_ns is not None and message.bytes_in is not None:
        exchange.dispatched(message.arrival_ns + message.dispatch_ns, message.bytes_in)
    return exchange.broke(message.at_ns, message.broken) if message.broken is not None else exchange.ended(message.at_ns)


def build(config: WorkerConfig, now_ns: int) -> Worker:
    """Raises TraceError for a tokenizer or key that cannot be used."""
    hasher = Hasher(load_key(Path(config.key_path)))
    names = {"": config.tokenizer, **config.model_tokenizers}
    server = _server_tokens(config) if SERVER_TOKENIZER in names.values() else None
    tokenizer, *others = (load_tokenizer(name) if name != SERVER_TOKENIZER else None for name in names.values())
    by_model = dict(zip(config.model_tokenizers, others, strict=True))
    header = Header(
        producer=config.producer,
        epoch_ns=config.epoch_ns,
        key_id=hasher.key_id,
        tokenizer="; ".join([_name(tokenizer), *(f"{model}={_name(one)}" for model, one in by_model.items())]),
        template="chatml" if tokenizer is not None and tokenizer.template is None else "own",
        block_tokens=BASE_BLOCK_TOKENS,
        source_format=config.source_format,
        keeps_text=config.keep_text,
    )
    texts = TextWriter(Path(config.folder), now_ns) if config.keep_text else None
    builder = RowBuilder(tokenizer, hasher, chunk_times=config.chunk_times, by_model=by_model, server=server, texts=texts)
    writer = SegmentWriter(Path(config.folder), _pack(header), now_ns)
    return Worker(builder, writer, config.counts)


def _server_tokens(config: WorkerConfig) -> "ServerTokens":
    from tracer.record.server_tokens import ServerTokens  # its HTTP client takes a while to import

    if not config.tokenize_urls:
        raise TraceError("there is no server to ask for tokens", seen=f"tokenizer {SERVER_TOKENIZER}", wanted=WANTED_TOKENIZER)
    server = ServerTokens(config.tokenize_urls, config.upstream_ca)
    server.probe()
    return server


def _name(tokenizer: Tokenizer | None) -> str:
    return tokenizer.name if tokenizer is not None else SERVER_TOKENIZER


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
        lock = lock_folder(Path(config.folder), wait_s=LOCK_S)
        worker = build(config, time.monotonic_ns())
    except (TraceError, OSError) as error:
        connection.sendall(framed(Report(failed=str(error))))
        return
    try:
        _tell(connection, worker.report())
        _give_way()
        _loop(connection, frames, waiting, worker)
        worker.close()
        _tell(connection, worker.report(is_final=True))
    finally:
        os.close(lock)


def _give_way() -> None:
    """Only time that nobody else wants: a merely lower priority still made every 50th request wait for a worker's slice.

    What the worker cannot keep up with is shed and counted.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not on Linux, or a sandbox forbids it
        os.nice(19)


def _loop(connection: socket.socket, frames: Frames, waiting: list[bytes], worker: Worker) -> None:
    report_at_ns = 0
    while True:
        for payload in waiting:
            if not _take_all(worker, payload):
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


def _take_all(worker: Worker, payload: bytes) -> bool:
    for message in _decode.decode(payload):
        try:
            if not worker.take(message):
                return False
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
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)


if __name__ == "__main__":
    main()
