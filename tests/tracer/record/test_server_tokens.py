"""Token ids by the upstream's own /tokenize: exact where it has one, and no row or request is lost where it has none."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from replay.sim.server import ServerConfig, serving
from tracer.errors import TraceError
from tracer.record import RecordConfig, RecordResult, record, server_tokens, start_recorder
from tracer.record.exchange import ExchangeFacts
from tracer.record.messages import Ended, Started
from tracer.record.privacy import Hasher
from tracer.record.rows import RowBuilder
from tracer.record.server_tokens import CannotAsk, ServerTokens
from tracer.tokens import encode_chat, load_tokenizer
from tracer.tracefile import iter_requests, read_footer
from tracer.wire import APIS, CHAT, MESSAGES
from tracer.wire.facts import Usage

O200K = load_tokenizer("o200k")
SYSTEM = {"role": "system", "content": "You are a patient teacher of zoology. " * 12}
FIRST = [SYSTEM, {"role": "user", "content": "Tell me of the axolotl, please."}]


@contextmanager
def answering(answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> Iterator[str]:
    """A server that answers each POST with (status, JSON) of `answer(path, body)`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, reply = answer(self.path, json.loads(self.rfile.read(int(self.headers["content-length"]))))
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask_chat(url: str, messages: list[dict[str, Any]], endpoint: str = CHAT, **more: object) -> list[int]:
    server = ServerTokens({"one": url})
    question = server.question("one", "m", b"Bearer secret")
    body = APIS[endpoint].parse_request(json.dumps({"model": "m", "messages": messages, **more}).encode())
    try:
        return question.chat(endpoint, body, 100).result(5).tolist()
    finally:
        server.close(0)


def test_a_recording_holds_the_tokens_that_the_server_itself_counts(tmp_path: Path) -> None:
    """The server's tokenizer is not the recorder's default, yet no count drifts and each turn begins with the one before."""

    async def chat(url: str) -> None:
        asked: dict[str, Any] = {"model": "sim", "max_tokens": 20}
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            answer = (await client.post(CHAT, json={**asked, "messages": FIRST})).json()["choices"][0]["message"]
            again = [*FIRST, answer, {"role": "user", "content": "And what does it eat?"}]
            await client.post(CHAT, json={**asked, "messages": again})
            await client.post("/v1/completions", json={**asked, "prompt": "Once upon a time " * 9})

    async def run() -> RecordResult:
        async with serving(ServerConfig(port=0, model="sim", tokenizer="o200k", speed=20.0)) as url:
            config = RecordConfig(upstream=url, out=str(tmp_path / "t.parquet"), tokenizer="server")
            with await asyncio.to_thread(start_recorder, config) as recorder:
                await chat(recorder.url)
                return await asyncio.to_thread(recorder.stop)

    result = asyncio.run(run())

    first, second, raw = iter_requests(result.path)
    assert result.losses == {}
    assert first["input_tokens"] == sum(map(len, encode_chat(O200K, FIRST)))
    assert [len(row["input_blocks"]) for row in (first, second, raw)] == [
        row["input_tokens"] // 16 for row in (first, second, raw)
    ]
    assert second["input_blocks"][: len(first["input_blocks"])] == first["input_blocks"]
    assert first["output_blocks"] and raw["output_blocks"]
    assert (second["parent_request_id"], second["turn"]) == (0, 1)
    assert [sum(one["tokens"] for one in row["segments"]) for row in (first, second)] == [
        first["input_tokens"],
        second["input_tokens"],
    ]
    assert read_footer(result.path).hashes.tokenizer == "server"


def test_an_upstream_without_tokenize_is_told_of_loudly_and_costs_the_blocks_only(
    server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with start_recorder(RecordConfig(upstream=server, out=str(tmp_path / "t.parquet"), tokenizer="server")) as recorder:
        told = [httpx.post(recorder.url + CHAT, json={"model": "stream", "stream": True, "messages": FIRST}) for _ in range(3)]
        result = recorder.stop()

    rows = list(iter_requests(result.path))
    assert [one.status_code for one in told] == [200] * 3
    assert "PROMPTS ARE NOT TOKENIZED" in (said := capfd.readouterr().err) and "has no /tokenize" in said
    assert result.losses["prompts_not_tokenized"] == 3
    assert [(row["input_tokens"], row["output_tokens"], row["input_blocks"]) for row in rows] == [(999, 5, None)] * 3


@pytest.mark.parametrize(("status", "tokens"), [(200, ["CANARY"]), (200, [-1]), (200, None), (500, [1])])
def test_an_upstream_that_answers_tokenize_with_rubbish_costs_the_blocks_only(status: int, tokens: object) -> None:
    body = json.dumps({"model": "m", "messages": FIRST}).encode()
    ended = Ended(flow=1, arrival_ns=0, endpoint=CHAT, facts=ExchangeFacts(text="fine", usage=Usage(prompt_tokens=7)))
    with answering(lambda *_: (status, {"tokens": tokens, "count": 1})) as url:
        server = ServerTokens({"one": url})
        builder = RowBuilder(None, Hasher(bytes(32)), chunk_times=False, server=server)
        pending = builder.start(Started(flow=1, arrival_ns=0, endpoint=CHAT, body=body, upstream="one"))
        while builder.awaits(pending, ended.facts):
            pass
        row = builder.end(pending, ended)
        server.close(0)

    assert (row.row["input_tokens"], row.input_hashes, row.parts) == (7, b"", [])
    assert len(row.leaves) == 2
    assert builder.counts["prompts_not_tokenized"] == 1


def test_llama_cpp_renders_a_chat_before_it_counts(tmp_path: Path) -> None:
    asked = []

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        asked.append((path, body))
        if path == "/apply-template":
            return 200, {"prompt": "rendered"}
        return (200, {"tokens": [1, 2, 3]}) if "content" in body else (400, {"error": "no content"})

    with answering(answer) as url:
        ids = ask_chat(url, FIRST, tools=[{"name": "eat", "input_schema": {}}])

    assert ids == [1, 2, 3]
    function = {"type": "function", "function": {"name": "eat", "parameters": {}}}
    assert asked[1:] == [
        ("/apply-template", {"model": "m", "messages": FIRST, "tools": [function]}),
        ("/tokenize", {"model": "m", "content": "rendered", "add_special": True, "parse_special": True}),
    ]


def test_sglang_knows_no_messages_and_gets_text(tmp_path: Path) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if not isinstance(body.get("prompt"), str):
            return 422, {"detail": "prompt is missing"}
        ids = O200K.encode(body["prompt"])
        return 200, {"tokens": ids, "count": len(ids), "max_model_len": 4096}

    longer = [*FIRST, {"role": "assistant", "content": "It regrows limbs."}, {"role": "user", "content": "How?"}]
    with answering(answer) as url:
        short, long = ask_chat(url, FIRST), ask_chat(url, longer)

    opening = len(O200K.encode("<|im_start|>assistant\n"))
    assert long[: len(short) - opening] == short[:-opening]
    assert abs(len(short) - sum(map(len, encode_chat(O200K, FIRST)))) < 40


def test_pictures_are_not_loaded_twice_and_other_apis_become_plain_messages() -> None:
    asked = []

    def answer(_: str, body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return 200, {"tokens": [1], "count": 1}

    picture = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/secret.png"}}
    block = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "3 mm"}]}
    with answering(answer) as url:
        ask_chat(url, [{"role": "user", "content": [{"type": "text", "text": "look"}, picture]}], chat_template_kwargs={"a": 1})
        ask_chat(url, [{"role": "user", "content": [block]}], MESSAGES)

    chat, anthropic = (body for body in asked if body.get("model") and "messages" in body)
    assert "secret.png" not in json.dumps(chat) and "[image " in json.dumps(chat)
    assert chat["chat_template_kwargs"] == {"a": 1}
    assert anthropic["messages"] == [{"role": "user", "content": "3 mm"}]


def test_questions_that_wait_are_bounded_and_a_slow_server_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_tokens, "MAX_ASKED", 5)
    release = threading.Event()

    def answer(_: str, body: dict[str, Any]) -> tuple[int, Any]:
        release.wait(10)
        return 200, {"tokens": [1], "count": 1}

    with answering(answer) as url:
        server = ServerTokens({"one": url})
        question = server.question("one", "m", b"")
        waiting = [question.prompt("text") for _ in range(8)]
        server.close(0.05)
        release.set()

    assert [one is not None for one in waiting] == [True] * 5 + [False] * 3
    assert waiting[4].cancelled()


def test_an_upstream_that_failed_is_left_alone_for_a_while_and_then_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_tokens, "MISSING_AGAIN_S", 0.05)
    status = [404]
    with answering(lambda *_: (status[0], {"tokens": [1], "count": 1})) as url:
        server = ServerTokens({"one": url})
        question = server.question("one", "m", b"")
        with pytest.raises(CannotAsk):
            question.prompt("text").result(5)
        told, refused = server.trouble, question.prompt("text")
        status[0] = 200
        while (again := question.prompt("text")) is None:
            pass
        assert again.result(5).tolist() == [1]
        server.close(0)

    assert refused is None and "has no /tokenize" in (told or "")
    assert server.trouble is None


def test_a_forward_proxy_asks_no_host_by_itself(tmp_path: Path) -> None:
    config = RecordConfig(forward=True, allow_hosts=["api.example"], out=str(tmp_path / "t.parquet"), tokenizer="server")

    with pytest.raises(TraceError, match="of its own accord"):
        record(config)

    assert list(tmp_path.iterdir()) == []
