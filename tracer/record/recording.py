"""The recorder as a whole: `record` blocks until stopped; `start_recorder` runs it in a process of its own.

A recording `x.parquet` has beside it `x.key` (0600) and, until it is compacted, `x.segments/` (0700).
"""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import msgspec
import uvloop

from tracer.errors import TraceError
from tracer.limits import lift_file_limit
from tracer.record.messages import WorkerConfig
from tracer.record.privacy import create_key, load_key
from tracer.record.session import RecordConfig, RecordStats, Session, tokenize_urls
from tracer.record.supervisor import Supervisor
from tracer.record.texts import texts_path, warning
from tracer.record.writer import segments_folder


class RecordResult(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    rows: int
    losses: dict[str, int]


def record(
    config: RecordConfig,
    on_ready: Callable[[str], None] | None = None,
    on_stats: Callable[[RecordStats], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> RecordResult:
    """Record until SIGINT or SIGTERM (a second one cuts the requests under way), then write the trace.

    `on_ready` gets the URL for clients. Warnings go to stderr by default. Must run in the main thread to get signals.
    """
    if config.workers < 1:
        raise TraceError("not a number of workers", seen=str(config.workers), wanted="1 or more")
    warn = on_warning or _to_stderr
    if config.keep_text:
        warn(warning(Path(config.out)))
    worker, started_ns = prepare(config, tokenize_urls(config))
    kind = Session if config.workers == 1 else Supervisor
    session = kind(config, worker, warn, on_stats or (lambda _: None), started_ns)
    try:
        # With asyncio's own loop a stream's chunks pass a tenth later than through a plain mitmproxy: bench/recorder.py
        uvloop.run(session.run(on_ready or (lambda _: None)))
    except TraceError:
        take_back(config, worker)
        raise
    return finish(config, worker, session, warn)


def prepare(config: RecordConfig, tokenize_urls: Mapping[str, str]) -> tuple[WorkerConfig, int]:
    """(what the worker needs, monotonic clock at arrival_ns == 0). Key and folder of segments stand afterwards.

    Raises TraceError.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would hold prompts
    lift_file_limit()  # each request under way holds two connections
    folder, key_path = _lay_out(Path(config.out), config.key_path)
    producer = f"chatreel {metadata.version('chatreel')}"
    started_ns, epoch_ns = time.monotonic_ns(), time.time_ns()  # one moment on both clocks
    worker = WorkerConfig(
        folder=str(folder),
        key_path=str(key_path),
        tokenizer=config.tokenizer,
        model_tokenizers=config.model_tokenizers,
        chunk_times=config.chunk_times,
        tokenize_urls=dict(tokenize_urls),
        upstream_ca=config.upstream_ca,
        keep_text=config.keep_text,
        epoch_ns=epoch_ns,
        producer=producer,
    )
    return worker, started_ns


def finish(
    config: RecordConfig, worker: WorkerConfig, session: Session | Supervisor, warn: Callable[[str], None]
) -> RecordResult:
    """The trace, once the session is closed."""
    from tracer.record.compactor import compact  # with all that reads and writes Parquet: not needed to start

    _warn_of_losses(session.stats(), warn)
    result = compact(worker.folder, config.out, counts=session.counts())
    return RecordResult(path=str(result.path), rows=result.rows, losses=result.losses)


def _warn_of_losses(stats: RecordStats, warn: Callable[[str], None]) -> None:
    if stats.lost:
        warn(f"the trace lacks {stats.lost} of {stats.seen} requests")


def _to_stderr(text: str) -> None:
    print(f"chatreel: {text}", file=sys.stderr, flush=True)


def _lay_out(out: Path, key_path: str | None) -> tuple[Path, Path]:
    """(segments folder, key file), new unless a key is given. Never overwrites an earlier recording."""
    folder = segments_folder(out)
    if out.suffix != ".parquet":
        raise TraceError("a trace is a Parquet file", seen=str(out), wanted="a path that ends in .parquet")
    for path in (out, texts_path(out)):
        if path.exists():
            raise TraceError("this trace exists already", path=str(path), next_step="Choose another -o path")
    if folder.exists():
        raise TraceError(
            "an unfinished recording stands here",
            path=str(folder),
            next_step=f"Run `chatreel compact {folder}` to turn it into a trace, or choose another -o path",
        )
    if key_path is not None:
        load_key(Path(key_path))
        key = Path(key_path)
    else:
        key = out.with_suffix(".key")
        create_key(key)
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise TraceError(f"cannot write here: {error.strerror}", path=str(folder)) from error
    return folder, key


def take_back(config: RecordConfig, worker: WorkerConfig) -> None:
    """A recording that never began leaves nothing behind."""
    shutil.rmtree(worker.folder)
    if config.key_path is None:
        Path(worker.key_path).unlink(missing_ok=True)


class RecorderProcess:
    """A recorder in its own process, for tests, demos and scripts."""

    def __init__(self, process: "subprocess.Popen[bytes]", url: str) -> None:
        self.process = process
        self.url = url

    def stop(self, timeout_s: float = 60.0) -> RecordResult:
        """Drain, compact, and return the result; kills the recorder when that takes longer than `timeout_s`."""
        self.process.send_signal(signal.SIGTERM)
        try:
            out, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TraceError(f"the recorder did not stop within {timeout_s:.0f} s") from None
        last = out.splitlines()[-1] if out else b"{}"
        if self.process.returncode != 0:
            error = msgspec.json.decode(last).get("error", f"exit code {self.process.returncode}")
            raise TraceError(f"the recorder failed: {error}")
        return msgspec.json.decode(last, type=RecordResult)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> "RecorderProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def start_recorder(config: RecordConfig) -> RecorderProcess:
    """Start and wait until it listens. Its warnings go to our stderr. Raises TraceError if it cannot start."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tracer.record", msgspec.json.encode(config).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    answer = msgspec.json.decode(line) if line else {"error": "it ended at once"}
    if "url" not in answer:
        process.communicate()
        raise TraceError(f"the recorder cannot start: {answer['error']}")
    return RecorderProcess(process, answer["url"])
