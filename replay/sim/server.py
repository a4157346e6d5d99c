"""The simulated server over HTTP, and the one loop that ties the engine's virtual time to the wall clock."""

import asyncio
import contextlib
import logging
import signal
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import uvloop
from aiohttp import web

from replay.edge.alarm import Alarm
from replay.sim import api
from replay.sim.engine import Engine, Request, Step
from replay.sim.engines import engine_named
from replay.sim.metrics import Metrics
from replay.sim.presets import Preset, changed
from tracer.errors import TraceError
from tracer.tokens import JsonTokenizer, TiktokenTokenizer, Tokenizer, load_tokenizer, safe_words

log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 64 * 2**20  # 200k token ids are 1.4 MB; as text with escapes a few MB
_TEXT_OFF_LOOP_BYTES = 4096  # longer bodies of text are tokenized in a thread; tiktoken releases the GIL
_LAG_WARNING_S = 0.25
DECIDE_LATE_NS = 2_000_000  # HTTP and JSON of a request take 1 to 2 ms; steps are longer than that
_SHUTDOWN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """None: as the preset says. `port` 0: any free one. `speed` 2: virtual time runs twice as fast as the clock.

    `model`: the name served, else the preset's model. `answer_tokens`: median answer where the client sets no length.
    """

    preset: str = "laptop-demo"
    host: str = "127.0.0.1"
    port: int = 8000
    model: str | None = None
    tokenizer: str = "cl100k"
    speed: float = 1.0
    seed: int = 0
    answer_tokens: int = 150
    kv_tokens: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # other fields of Preset

    def effective_preset(self) -> Preset:
        """The preset with this config's changes. Raises TraceError for one that cannot run."""
        preset = changed(
            engine_named(self.preset),
            kv_tokens=self.kv_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            **self.settings,
        )
        if self.answer_tokens < 1:
            raise TraceError(
                "the simulated server cannot run so", seen=f"answer_tokens = {self.answer_tokens}", wanted="at least 1"
            )
        if self.speed <= 0:
            raise TraceError("the simulated server cannot run so", seen=f"speed = {self.speed}", wanted="more than 0")
        return preset


class Stream:
    """One request's way back to its client. The engine loop writes; the handler waits for `done`."""

    def __init__(self, answer: api.Answer) -> None:
        self.answer = answer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._chunked = True
        self._early = b""

    def attach(self, transport: asyncio.Transport | None, chunked: bool) -> None:
        """The head of the response is out: from now on `write` reaches the client."""
        self._transport = transport
        self._chunked = chunked
        if self._early:
            self.write(self._early)

    def write(self, data: bytes) -> None:
        """Straight to the socket, past the handler's task: half the cost of waking it for each token.

        A client that reads slowly is buffered without limit and slows nobody else, as in vLLM.
        """
        if self._transport is None:
            self._early += data
        elif not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


class Simulator:
    """Engine, clock and streams. `now_s` is virtual."""

    def __init__(self, config: ServerConfig) -> None:
        self.engine = Engine(config.effective_preset())
        self.model = config.model or self.engine.preset.model.name
        self.metrics = Metrics(self.engine, self.model)
        self.config = config
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.vocabulary = _vocabulary(self.tokenizer)
        self.rng = np.random.default_rng(config.seed)
        words, ids = safe_words(config.tokenizer)
        self._words: list[bytes] = words.tolist()
        self._word_ids: list[int] = ids.tolist()
        self._streams: dict[Request, Stream] = {}
        self._work = asyncio.Event()
        self._start_ns = time.monotonic_ns()
        self._has_warned = False

    @property
    def now_s(self) -> float:
        return (time.monotonic_ns() - self._start_ns) / 1e9 * self.config.speed

    def open(self, ask: api.Ask, prompt: "array[int]", arrival_s: float | None = None) -> tuple[Request, Stream]:
        """Queue a request that came at `arrival_s`, else now. Raises ApiError if it can never run."""
        arrival_s = self.now_s if arrival_s is None else arrival_s
        room = self.engine.max_model_len - len(prompt)
        problem = self.engine.refusal(len(prompt), ask.max_tokens or max(1, ask.min_tokens))
        if problem:
            raise api.ApiError(problem, param="messages" if ask.kind == "chat" else "prompt")
        count, reason = api.plan_answer(ask, room, self.config.answer_tokens, self.rng)
        picks = self.rng.integers(len(self._words), size=count).tolist()
        answer = api.Answer(
            ask,
            answer_id=self.rng.bytes(12).hex(),
            created_s=time.time_ns() // 10**9,
            model=self.model,
            prompt=prompt,
            words=[self._words[i] for i in picks],
        )
        request = Request(prompt=prompt, answer=[self._word_ids[i] for i in picks], arrival_s=arrival_s, ends_with=reason)
        self.engine.submit(request)
        stream = self._streams[request] = Stream(answer)
        self._work.set()
        return request, stream

    def close(self, request: Request) -> None:
        """Forget a request; one that has not finished is aborted."""
        self._streams.pop(request, None)
        if request.finish_reason is None:
            self.engine.abort(request)
            self.metrics.finished["abort"] += 1

    async def run(self) -> None:
        """Step for ever. A step's tokens are delivered when the wall clock reaches its virtual end.

        What a step does is decided a little after its virtual start: by then the requests that came before it are read and
        parsed, which is no part of the model. It ends later than that in any case.

        A host too slow for that falls behind visibly (`add_lag`); virtual time itself never stretches: a request that
        arrives during the lag is not admitted before its own arrival.
        """
        with contextlib.closing(Alarm()) as alarm:
            while True:
                while self.engine.idle:
                    self._work.clear()
                    await self._work.wait()
                await self._reach(alarm, self.engine.next_step_s, DECIDE_LATE_NS)
                if self.engine.idle:  # a client went away meanwhile
                    continue
                step = self.engine.step()
                await self._reach(alarm, step.end_s)
                self._note_lag((self.now_s - step.end_s) / self.config.speed)
                self._deliver(step)

    async def _reach(self, alarm: Alarm, virtual_s: float, later_ns: int = 0) -> None:
        at_ns = self._start_ns + round(virtual_s / self.config.speed * 1e9) + later_ns
        reached = asyncio.Event()
        alarm.call_at(at_ns, reached.set)
        if reached.is_set():
            await asyncio.sleep(0)  # a server that is behind still answers
        else:
            await reached.wait()

    def _note_lag(self, lag_s: float) -> None:
        self.metrics.add_lag(lag_s)
        if lag_s > _LAG_WARNING_S and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the simulated server is %.2f s behind its virtual time: this host is too slow for the load, and clients "
                "see tokens later than the model says. Lower --speed or the load; see chatreel_sim_lag_seconds",
                lag_s,
            )

    def _deliver(self, step: Step) -> None:
        self.metrics.add(step)
        streams = self._streams
        for request, token_id, gap_s in step.tokens:
            stream = streams.get(request)
            if stream is None or not stream.answer.ask.stream:
                continue
            data = stream.answer.token(token_id, request.finish_reason)
            if gap_s is None:
                data = stream.answer.first() + data
            stream.write(data)
        for request in step.finished:
            stream = streams.get(request)
            if stream is not None and not stream.done.done():
                stream.done.set_result(None)


def _vocabulary(tokenizer: Tokenizer) -> int:
    if isinstance(tokenizer, TiktokenTokenizer):
        return tokenizer.encoding.n_vocab
    assert isinstance(tokenizer, JsonTokenizer)
    return int(tokenizer._tokenizer.get_vocab_size())


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_SIMULATOR = web.AppKey("simulator", Simulator)


@web.middleware
async def _errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Every refusal in OpenAI's shape, also for unknown paths and bodies over the limit."""
    try:
        return await handler(request)
    except api.ApiError as error:
        return _json(error.body(), status=error.status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _json(api.ApiError(error.reason, status=error.status).body(), status=error.status)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


async def _chat(request: web.Request) -> web.StreamResponse:
    return await _answer(request, "chat")


async def _completion(request: web.Request) -> web.StreamResponse:
    return await _answer(request, "completion")


async def _answer(http: web.Request, kind: api.Kind) -> web.StreamResponse:
    simulator = http.app[_SIMULATOR]
    arrival_s = simulator.now_s
    body = api.read_body(await http.read())
    ask = api.read_ask(body, kind, simulator.model)
    prompt = await _prompt(simulator, body, kind)
    request, stream = simulator.open(ask, prompt, arrival_s)
    try:
        if ask.stream:
            return await _stream(http, request, stream)
        await stream.done
        return _json(stream.answer.whole(request.answer, str(request.finish_reason), request.cached_tokens or 0))
    finally:
        simulator.close(request)  # a client that goes away cancels this handler


async def _prompt(simulator: Simulator, body: api.Body, kind: api.Kind) -> "array[int]":
    arguments = (body, kind, simulator.tokenizer, simulator.vocabulary)
    if kind == "chat" or (isinstance(body.prompt, str) and len(body.prompt) > _TEXT_OFF_LOOP_BYTES):
        return await asyncio.to_thread(api.prompt_tokens, *arguments)
    return api.prompt_tokens(*arguments)


async def _stream(http: web.Request, request: Request, stream: Stream) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.headers["Cache-Control"] = "no-cache"
    chunked = http.version >= (1, 1)
    if chunked:
        response.enable_chunked_encoding()
    await response.prepare(http)
    stream.attach(http.transport, chunked)
    await stream.done
    await response.write(stream.answer.last(request.cached_tokens or 0))
    await response.write_eof()
    return response


async def _models(http: web.Request) -> web.Response:
    simulator = http.app[_SIMULATOR]
    model = {
        "id": simulator.model,
        "object": "model",
        "created": 0,
        "owned_by": "chatreel",
        "max_model_len": simulator.engine.max_model_len,
    }
    return _json(msgspec.json.encode({"object": "list", "data": [model]}))


async def _tokenize(http: web.Request) -> web.Response:
    simulator = http.app[_SIMULATOR]
    body = api.read_body(await http.read())
    kind: api.Kind = "chat" if body.messages is not None else "completion"
    ids = (await _prompt(simulator, body, kind)).tolist()
    reply = {"count": len(ids), "max_model_len": simulator.engine.max_model_len, "tokens": ids}
    return _json(msgspec.json.encode(reply))


class _Ids(msgspec.Struct):
    tokens: list[int]


async def _detokenize(http: web.Request) -> web.Response:
    simulator = http.app[_SIMULATOR]
    try:
        ids = msgspec.json.decode(await http.read(), type=_Ids).tokens
        text = simulator.tokenizer.decode(ids)
    except (msgspec.MsgspecError, KeyError, OverflowError) as error:
        raise api.ApiError(f"These tokens cannot be decoded: {error}", param="tokens") from error
    return _json(msgspec.json.encode({"prompt": text}))


async def _reset_prefix_cache(http: web.Request) -> web.Response:
    http.app[_SIMULATOR].engine.cache.reset()
    return web.Response()


async def _health(http: web.Request) -> web.Response:
    return web.Response()


async def _metrics(http: web.Request) -> web.Response:
    body = http.app[_SIMULATOR].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _application(simulator: Simulator) -> web.Application:
    app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors])
    app[_SIMULATOR] = simulator
    app.add_routes(
        [
            web.post("/v1/chat/completions", _chat),
            web.post("/v1/completions", _completion),
            web.get("/v1/models", _models),
            web.post("/tokenize", _tokenize),
            web.post("/detokenize", _detokenize),
            web.post("/reset_prefix_cache", _reset_prefix_cache),
            web.get("/health", _health),
            web.get("/metrics", _metrics),
        ]
    )
    return app


@contextlib.asynccontextmanager
async def serving(config: ServerConfig) -> AsyncIterator[str]:
    """A running server; yields its URL without a path. Leaving closes it after at most 2 s of draining."""
    async with _running(config) as (url, _):
        yield url


@contextlib.asynccontextmanager
async def _running(config: ServerConfig) -> AsyncIterator[tuple[str, "asyncio.Task[None]"]]:
    simulator = Simulator(config)
    runner = web.AppRunner(_application(simulator), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    loop_task = asyncio.get_running_loop().create_task(simulator.run())
    try:
        try:
            await web.TCPSite(runner, config.host, config.port, backlog=1024).start()
        except OSError as error:
            raise TraceError(
                "cannot listen",
                seen=f"{config.host}:{config.port}: {error.strerror}",
                next_step="Choose another --port",
            ) from error
        host, port = runner.addresses[0][:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}", loop_task
    finally:
        await runner.cleanup()
        loop_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop_task


def run_server(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` gets the URL once requests are accepted. Prints nothing."""
    uvloop.run(_serve(config, on_ready))


async def _serve(config: ServerConfig, on_ready: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with _running(config) as (url, loop_task):
        on_ready(url)
        stopped = loop.create_task(stop.wait())
        await asyncio.wait([stopped, loop_task], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
