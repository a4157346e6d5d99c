"""The recorder in a mitmdump (or mitmproxy, mitmweb) of your own, beside your other add-ons:

    mitmdump -s "$(python -m tracer.record.mitmdump_script)" --set chatreel_out=monday.parquet

It goes where chatreel is installed: it brings mitmdump along. It changes no request and
routes none; the trace is written when mitmdump ends.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from tracer.errors import TraceError
from tracer.record.recording import finish, prepare, take_back
from tracer.record.session import STATS_S, RecordConfig, Session

_log = logging.getLogger("chatreel")  # not the module's name, which mitmproxy chooses


class Script:
    """Records from `running` to `done`."""

    def __init__(self) -> None:
        self._master: Any = None
        self._session: Session | None = None
        self._ticking: asyncio.Task[None] | None = None

    def load(self, loader: Any) -> None:
        self._master = loader.master
        loader.add_option("chatreel_out", str, "", "Trace file to write, .parquet. Empty: nothing is recorded.")
        loader.add_option("chatreel_tokenizer", Sequence[str], ["cl100k"], "cl100k, o200k, a tokenizer.json or a model's folder.")
        loader.add_option("chatreel_key", str, "", "Key of an earlier recording, to compare with it.")
        loader.add_option("chatreel_chunk_times", bool, False, "Also keep the time of every chunk.")

    async def running(self) -> None:
        options = self._master.options
        if not options.chatreel_out:
            _log.error("chatreel records nothing: add --set chatreel_out=recording.parquet")
            return
        try:
            self._config = RecordConfig(
                out=options.chatreel_out,
                tokenizer=next((one for one in options.chatreel_tokenizer if "=" not in one), "cl100k"),
                model_tokenizers=dict(one.split("=", 1) for one in options.chatreel_tokenizer if "=" in one),
                key_path=options.chatreel_key or None,
                chunk_times=options.chatreel_chunk_times,
            )
            self._worker, started_ns = prepare(self._config, {})
            await self._start(started_ns)
        except TraceError as error:
            _log.error("chatreel cannot record: %s", error)  # while mitmdump starts, an error ends it

    async def done(self) -> None:
        if self._session is None or self._ticking is None:
            return
        self._ticking.cancel()
        await self._session.close()
        try:
            result = finish(self._config, self._worker, self._session, _log.warning)
        except TraceError as error:
            _log.error("chatreel: %s", error)
        else:
            _log.info("chatreel: %d requests -> %s", result.rows, result.path)

    async def _start(self, started_ns: int) -> None:
        session = Session(self._config, self._worker, _log.warning, lambda _: None, started_ns)
        try:
            recorder = await session.open(None)
        except TraceError:
            take_back(self._config, self._worker)
            raise
        self._session, self._ticking = session, asyncio.create_task(self._tick(session))
        self._master.addons.add(recorder)
        _log.info("chatreel records into %s", self._config.out)

    async def _tick(self, session: Session) -> None:
        while True:
            await asyncio.sleep(STATS_S)
            session.tick()


addons = [Script()]

if __name__ == "__main__":
    print(__file__)
