"""Token ids as the upstream itself counts them, by its `/tokenize`. Only the worker asks, in threads; traffic never waits.

Three shapes, told apart by what a probe gets back:
messages  vLLM: `messages` with the model's own template, or `prompt`   -> {"tokens": [...], "count": n}
prompt    SGLang: `prompt` only, so a chat goes as ChatML text          -> {"tokens": [...], "count": n}
content   llama.cpp: `content`, after `/apply-template` for a chat      -> {"tokens": [...]}
An upstream that cannot be asked costs a row its blocks, nothing else; what waits for it is bounded.
"""

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from tracer.record.privacy import Tokens, as_tokens
from tracer.tokens import MEDIA_KINDS, flat_text
from tracer.wire import CHAT
from tracer.wire.openai import RequestBody

THREADS = 4
MAX_ASKED = 512  # questions that wait or are on their way
MAX_ASKED_BYTES = 32 << 20
MAX_REPLY_BYTES = 32 << 20  # 200k token ids are some 1.4 MB
TIMEOUT_S = 10.0
CONNECT_S = 3.0
AGAIN_S = 10.0  # after an upstream could not be asked
MISSING_AGAIN_S = 60.0  # after it said that it has no such endpoint
PROBE = "one two"

type TokensToCome = Future[Tokens]


class CannotAsk(Exception):
    """Its text is for the user, and holds nothing of a prompt."""


class _Reply(msgspec.Struct):
    tokens: list[int] | None = None
    count: int | None = None
    prompt: str | None = None  # of llama.cpp's /apply-template


class _Upstream:
    """What is known of one."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.shape: str | None = None
        self.trouble: str | None = None
        self.blocked_until = 0.0
        self.lock = threading.Lock()  # so that one question alone finds out the shape


class Question:
    """Asks about one request's texts, with the request's own credential."""

    def __init__(self, server: "ServerTokens", upstream: _Upstream, model: str | None, credential: bytes) -> None:
        self._server, self._upstream, self._model = server, upstream, model
        self._headers = {"authorization": credential.decode("latin-1")} if credential.lower().startswith(b"bearer ") else {}

    def chat(self, endpoint: str, body: RequestBody, size: int) -> TokensToCome | None:
        """None: too much waits already, or the upstream cannot be asked now."""
        return self._server.submit(self._upstream, size, lambda shape: self._chat(shape, endpoint, body))

    def prompt(self, text: str) -> TokensToCome | None:
        return self._server.submit(self._upstream, len(text), lambda shape: self._text(shape, text, is_prompt=True))

    def answer(self, text: str) -> TokensToCome | None:
        return self._server.submit(self._upstream, len(text), lambda shape: self._text(shape, text, is_prompt=False))

    def _chat(self, shape: str, endpoint: str, body: RequestBody) -> Tokens:
        messages = [_openai_message(one) if endpoint == CHAT else _flat_message(one) for one in body.messages or []]
        tools = [tool for one in body.tools or [] if (tool := _openai_tool(one)) is not None]
        if shape == "prompt":
            return self._text(shape, _as_text(messages, tools), is_prompt=True)
        asked: dict[str, Any] = {"messages": messages, **({"tools": tools} if tools else {})}
        for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
            if (value := getattr(body, name)) is not None:
                asked[name] = value
        if shape == "content":
            rendered = self._post("/apply-template", asked).prompt
            if rendered is None:
                raise CannotAsk("answers /apply-template without a prompt")
            return self._text(shape, rendered, is_prompt=True)
        return _ids(self._post("/tokenize", asked))

    def _text(self, shape: str, text: str, *, is_prompt: bool) -> Tokens:
        if shape == "content":
            return _ids(self._post("/tokenize", {"content": text, "add_special": is_prompt, "parse_special": is_prompt}))
        return _ids(self._post("/tokenize", {"prompt": text, "add_special_tokens": is_prompt}))

    def find_shape(self) -> str:
        """All three take this one question. Raises CannotAsk."""
        reply = self._post("/tokenize", {"prompt": PROBE, "content": PROBE})
        if reply.tokens is None:
            raise CannotAsk("answers /tokenize without token ids")
        if reply.count is None:
            return "content"
        try:
            self._post("/tokenize", {"messages": [{"role": "user", "content": PROBE}]})
        except CannotAsk:
            return "prompt"
        return "messages"

    def _post(self, path: str, asked: Mapping[str, Any]) -> _Reply:
        body = {"model": self._model, **asked} if self._model is not None else asked
        return self._server.post(self._upstream.base + path, msgspec.json.encode(body), self._headers)


class ServerTokens:
    def __init__(self, bases: Mapping[str, str], upstream_ca: str | None = None) -> None:
        """`bases`: URL of each upstream by the name that rows give it."""
        self._upstreams = {name: _Upstream(base) for name, base in bases.items()}
        tls = ssl.create_default_context()
        if upstream_ca is not None:
            tls.load_verify_locations(upstream_ca)
        limits = httpx.Limits(max_connections=THREADS, max_keepalive_connections=THREADS)
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_S)
        self._client = httpx.Client(verify=tls, timeout=timeout, limits=limits, trust_env=False)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenize")
        self._lock = threading.Lock()
        self._asked = self._asked_bytes = 0

    @property
    def trouble(self) -> str | None:
        """What a user must know: an upstream that cannot be asked. None while all is well."""
        return next((one.trouble for one in self._upstreams.values() if one.trouble is not None), None)

    def probe(self) -> None:
        """Find out at once, so that a user need not wait for the first request to learn of an upstream without /tokenize."""
        for upstream in self._upstreams.values():
            self.submit(upstream, 0, lambda _: as_tokens([]))

    def question(self, upstream: str, model: str | None, credential: bytes) -> Question | None:
        known = self._upstreams.get(upstream)
        return Question(self, known, model, credential) if known is not None else None

    def submit(self, upstream: _Upstream, size: int, work: Callable[[str], Tokens]) -> TokensToCome | None:
        """`work` gets the upstream's shape, in a thread."""
        with self._lock:
            is_full = self._asked >= MAX_ASKED or self._asked_bytes + size > MAX_ASKED_BYTES
            if is_full or time.monotonic() < upstream.blocked_until:
                return None
            self._asked, self._asked_bytes = self._asked + 1, self._asked_bytes + size
        future = self._threads.submit(self._ask, upstream, work)
        future.add_done_callback(lambda _: self._done(size))
        return future

    def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> _Reply:
        """Raises CannotAsk and httpx.HTTPError."""
        sent = {"content-type": "application/json", **headers}
        with self._client.stream("POST", url, content=body, headers=sent) as response:
            received = bytearray()
            for piece in response.iter_bytes():
                received += piece
                if len(received) > MAX_REPLY_BYTES:
                    raise CannotAsk("answers /tokenize with more than can be tokens")
        if response.status_code != 200:
            raise _Refused(response.status_code, b"model" in bytes(received).lower())
        try:
            return msgspec.json.decode(received, type=_Reply)
        except msgspec.DecodeError as error:
            raise CannotAsk("answers /tokenize with something else than token ids") from error

    def close(self, timeout_s: float) -> None:
        """Give what is on its way a last chance; the rest is cancelled."""
        until = time.monotonic() + timeout_s
        while self._asked and time.monotonic() < until:
            time.sleep(0.02)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _ask(self, upstream: _Upstream, work: Callable[[str], Tokens]) -> Tokens:
        if time.monotonic() < upstream.blocked_until:
            raise CannotAsk
        try:
            tokens = work(upstream.shape or self._find_shape(upstream))
        except httpx.HTTPError as error:
            self._block(upstream, f"cannot be asked ({type(error).__name__})", AGAIN_S)
            raise
        upstream.trouble = None
        return tokens

    def _find_shape(self, upstream: _Upstream) -> str:
        with upstream.lock:
            if upstream.shape is not None:
                return upstream.shape
            if time.monotonic() < upstream.blocked_until:
                raise CannotAsk
            try:
                upstream.shape = Question(self, upstream, None, b"").find_shape()
            except _Refused as error:
                is_missing = error.status in (404, 405, 501) and not error.names_model
                why = "has no /tokenize" if is_missing else f"answers /tokenize with status {error.status}"
                self._block(upstream, why, MISSING_AGAIN_S)
                raise
            except CannotAsk as error:
                self._block(upstream, str(error), MISSING_AGAIN_S)
                raise
            return upstream.shape

    def _block(self, upstream: _Upstream, why: str, pause_s: float) -> None:
        upstream.blocked_until = time.monotonic() + pause_s
        upstream.trouble = (
            f"PROMPTS ARE NOT TOKENIZED: {upstream.base} {why}. Traffic and all else is recorded, but rows have no blocks, "
            f"so reuse cannot be seen. Give --tokenizer a model's folder instead, or cl100k"
        )

    def _done(self, size: int) -> None:
        with self._lock:
            self._asked, self._asked_bytes = self._asked - 1, self._asked_bytes - size


class _Refused(CannotAsk):
    def __init__(self, status: int, names_model: bool) -> None:
        super().__init__(f"status {status}")
        self.status, self.names_model = status, names_model


def _ids(reply: _Reply) -> Tokens:
    if reply.tokens is None:
        raise CannotAsk("answers /tokenize without token ids")
    return as_tokens(reply.tokens)


def _openai_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """As it is, but for pictures and sounds: the server would load them a second time, and gives all of them one token."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part) for part in content]}


def _part(part: Any) -> Any:
    is_media = isinstance(part, Mapping) and str(part.get("type")) in MEDIA_KINDS
    return {"type": "text", "text": flat_text(part)} if is_media else part


def _flat_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of other APIs, whose parts a chat template does not know."""
    text = flat_text(message.get("content"))
    if message.get("tool_calls"):
        text += flat_text(message["tool_calls"])
    return {"role": message.get("role", "user"), "content": text}


def _openai_tool(tool: Any) -> dict[str, Any] | None:
    """Anthropic and the Responses API name a function's fields otherwise."""
    if not isinstance(tool, dict):
        return None
    if isinstance(tool.get("function"), dict):
        return tool
    if not isinstance(tool.get("name"), str):
        return None
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    if tool.get("input_schema") is not None:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _as_text(messages: list[Mapping[str, Any]], tools: list[dict[str, Any]]) -> str:
    """ChatML: turn n + 1 begins with turn n, which is what blocks are about; the count drifts from the server's own."""
    said = [("tools", flat_text(tools))] if tools else []
    for one in map(_flat_message, messages):
        said.append((str(one["role"]), str(one["content"])))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in said) + "<|im_start|>assistant\n"
