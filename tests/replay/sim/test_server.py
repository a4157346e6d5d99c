"""The simulated server over real HTTP, mostly through the `openai` client."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from replay.sim import api
from replay.sim.server import ServerConfig, Simulator, serving
from tracer.errors import TraceError
from tracer.tokens import load_tokenizer

FAST = ServerConfig(port=0, preset="h100-llama3-1b", model="sim", speed=10.0)


@asynccontextmanager
async def client_of(config: ServerConfig = FAST) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(config) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client


def with_client[Result](scenario: Callable[[openai.AsyncOpenAI], Awaitable[Result]], config: ServerConfig = FAST) -> Result:
    async def run() -> Result:
        async with client_of(config) as client:
            return await scenario(client)

    return asyncio.run(run())


async def post(client: openai.AsyncOpenAI, path: str, body: Any) -> tuple[int, Any]:
    url = str(client.base_url).removesuffix("/v1/") + path
    data = io.BytesIO(json.dumps(body).encode())  # aiohttp warns of a body of bytes over 1 MiB
    async with aiohttp.ClientSession() as session, session.post(url, data=data) as response:
        return response.status, await response.json(content_type=None)


async def samples(client: openai.AsyncOpenAI) -> dict[str, float]:
    """All samples of /metrics by name, `{finished_reason}` and `le` appended where there is one."""
    url = str(client.base_url).removesuffix("/v1/") + "/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "sim"
            extra = "".join(f":{sample.labels[key]}" for key in ("finished_reason", "le") if key in sample.labels)
            found[sample.name + extra] = sample.value
    return found


def test_a_whole_chat_answer_has_text_usage_and_the_length_asked_for() -> None:
    reply = with_client(
        lambda client: client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "hello"}], max_tokens=5, extra_body={"ignore_eos": True}
        )
    )

    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None and reply.usage.completion_tokens == 5
    assert len(load_tokenizer("cl100k").encode(reply.choices[0].message.content or "")) == 5


def test_a_streamed_chat_starts_with_the_role_and_ends_with_usage_and_no_choices() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(
            model="sim",
            messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
            max_completion_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"min_tokens": 4},
        )
        return [chunk async for chunk in stream]

    chunks = with_client(scenario)

    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert [chunk.choices[0].finish_reason for chunk in chunks[1:-1]] == [None, None, None, "length"]
    assert all(chunk.choices[0].delta.content.startswith(" ") for chunk in chunks[1:-1])
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_token_id_completion_counts_its_tokens_in_every_chunk_and_gives_ids() -> None:
    prompt = list(range(200, 240))

    async def scenario(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.completions.create(
            model="sim",
            prompt=prompt,
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
            extra_body={"min_tokens": 6, "ignore_eos": True, "return_token_ids": True},
        )
        return [chunk async for chunk in stream]

    *chunks, last = with_client(scenario)

    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5, 6]
    assert chunks[0].choices[0].prompt_token_ids == prompt
    ids = [token for chunk in chunks for token in chunk.choices[0].token_ids]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert load_tokenizer("cl100k").encode(text) == ids
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (40, 6, 46)


def test_streamed_and_whole_answers_of_the_same_seed_are_the_same_text() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> str:
        return (await client.completions.create(model="sim", prompt="one two", max_tokens=9)).choices[0].text

    async def streamed(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(model="sim", prompt="one two", max_tokens=9, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    assert with_client(scenario) == with_client(streamed)


def test_a_repeated_prompt_and_the_next_turn_are_cached_in_whole_blocks() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> list[int]:
        cached = []
        prompt = list(range(1000, 1100))
        for _ in range(2):
            reply = await client.completions.create(
                model="sim", prompt=prompt, max_tokens=30, extra_body={"ignore_eos": True, "return_token_ids": True}
            )
            cached.append(reply.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
        turn = prompt + reply.choices[0].token_ids + [5, 6, 7]  # type: ignore[attr-defined]
        reply = await client.completions.create(model="sim", prompt=turn, max_tokens=1)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
        await post(client, "/reset_prefix_cache", {})
        reply = await client.completions.create(model="sim", prompt=turn, max_tokens=1)
        return [*cached, reply.usage.prompt_tokens_details.cached_tokens]  # type: ignore[union-attr]

    assert with_client(scenario) == [0, 96, 128, 0]  # 129 tokens computed of 100 + 30


def test_tokenize_agrees_with_the_prompt_tokens_of_usage() -> None:
    messages: list[Any] = [{"role": "user", "content": "How many <|im_end|> tokens, naïvely?"}]

    async def scenario(client: openai.AsyncOpenAI) -> None:
        chat = await client.chat.completions.create(model="sim", messages=messages, max_tokens=1)
        _, chat_tokens = await post(client, "/tokenize", {"messages": messages})
        plain = await client.completions.create(model="sim", prompt="just a text", max_tokens=1)
        _, plain_tokens = await post(client, "/tokenize", {"prompt": "just a text"})
        _, text = await post(client, "/detokenize", {"tokens": plain_tokens["tokens"]})

        assert chat.usage is not None and plain.usage is not None
        assert chat.usage.prompt_tokens == chat_tokens["count"] == len(chat_tokens["tokens"])
        assert plain.usage.prompt_tokens == plain_tokens["count"] == 3
        assert plain_tokens["max_model_len"] == 131072
        assert text == {"prompt": "just a text"}

    with_client(scenario)


def test_models_lists_the_one_model() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> list[str]:
        return [model.id async for model in client.models.list()]

    assert with_client(scenario) == ["sim"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"model": "other"}, 404, "model", "does not exist"),
        ({"n": 2}, 400, "n", "want 1"),
        ({"max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"min_tokens": 9}, 400, "min_tokens", "between 0 and max_tokens=4"),
        ({"max_tokens": 200_000}, 400, "prompt", "maximum context length is 131072"),
        ({"prompt": []}, 400, "prompt", "empty"),
        ({"prompt": ["a", "b"]}, 400, "prompt", "one prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt", "list of token ids"),
        ({"prompt": [-1]}, 400, "prompt", "list of token ids"),
        ({"prompt": [100_300]}, 400, "prompt", "out of vocabulary"),
        ({"prompt": None}, 400, "prompt", "text or a list"),
        ({"max_tokens": "many"}, 400, None, "max_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_in_openais_shape(
    stream: bool, change: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    body = {"model": "sim", "prompt": "hi", "max_tokens": 4, "stream": stream, **change}

    seen, reply = with_client(lambda client: post(client, "/v1/completions", body))

    assert seen == status
    assert words in reply["error"]["message"]
    assert (reply["error"]["param"], reply["error"]["code"]) == (param, status)
    assert reply["error"]["type"] == ("NotFoundError" if status == 404 else "BadRequestError")


def test_the_openai_client_raises_its_own_errors() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.completions.create(model="other", prompt="hi")
        with pytest.raises(openai.BadRequestError, match="at least one message"):
            await client.chat.completions.create(model="sim", messages=[])
        status, reply = await post(client, "/v1/embeddings", {})
        assert (status, reply["error"]["code"]) == (404, 404)

    with_client(scenario)


@pytest.mark.parametrize("prompt", ["some text", ["some text"], [10, 11, 12], [[10, 11, 12]]])
def test_a_prompt_is_a_text_a_list_of_ids_or_a_list_of_one(prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 2}

    status, reply = with_client(lambda client: post(client, "/v1/completions", body))

    assert status == 200
    assert reply["usage"]["prompt_tokens"] == (3 if prompt in ([10, 11, 12], [[10, 11, 12]]) else 2)


def test_a_body_of_200k_token_ids_is_admitted_to_the_check_of_its_length() -> None:
    body = {"prompt": [99_999] * 200_000, "max_tokens": 1}

    status, reply = with_client(lambda client: post(client, "/v1/completions", body))

    assert status == 400
    assert "(200000 in the prompt" in reply["error"]["message"]


def test_metrics_count_what_clients_saw() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> dict[str, float]:
        prompt = list(range(64))
        for _ in range(2):
            await client.completions.create(model="sim", prompt=prompt, max_tokens=10, extra_body={"ignore_eos": True})
        return await samples(client)

    found = with_client(scenario)

    assert found["vllm:prefix_cache_queries_total"] == found["vllm:prompt_tokens_total"] == 128
    assert found["vllm:prefix_cache_hits_total"] == 48
    assert found["vllm:generation_tokens_total"] == 20
    assert found["vllm:num_preemptions_total"] == 0
    assert found["vllm:request_success_total:length"] == 2
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert found["vllm:cache_config_info"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 18
    for stem in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert found[f"vllm:{stem}_seconds_count"] == found[f"vllm:{stem}_seconds_bucket:+Inf"] == 2
    parts = [found[f"vllm:request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(found["vllm:e2e_request_latency_seconds_sum"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_request(stream: bool) -> None:
    slow = ServerConfig(port=0, preset="laptop-demo", model="sim")
    body = {"prompt": "hi", "max_tokens": 20_000, "ignore_eos": True, "stream": stream}

    async def scenario(client: openai.AsyncOpenAI) -> dict[str, float]:
        call = asyncio.create_task(post(client, "/v1/completions", body))
        while not (await samples(client))["vllm:num_requests_running"]:
            await asyncio.sleep(0.01)
        call.cancel()
        while (found := await samples(client))["vllm:num_requests_running"]:
            await asyncio.sleep(0.01)
        return found

    found = with_client(scenario, slow)

    assert found["vllm:request_success_total:abort"] == 1
    assert found["vllm:kv_cache_usage_perc"] == 0


def test_requests_beyond_the_sequence_limit_wait() -> None:
    narrow = ServerConfig(port=0, preset="laptop-demo", model="sim", max_num_seqs=2)
    body = {"prompt": "hi", "max_tokens": 20_000, "ignore_eos": True}

    async def scenario(client: openai.AsyncOpenAI) -> tuple[float, float]:
        calls = [asyncio.create_task(post(client, "/v1/completions", body)) for _ in range(5)]
        while (found := await samples(client))["vllm:num_requests_waiting"] < 3:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]

    assert with_client(scenario, narrow) == (2, 3)


def test_an_answer_without_a_limit_ends_by_itself() -> None:
    async def scenario(client: openai.AsyncOpenAI) -> list[Any]:
        ask = client.completions.create
        return await asyncio.gather(*(ask(model="sim", prompt="hi", max_tokens=100_000) for _ in range(20)))

    replies = with_client(scenario)

    lengths = {reply.usage.completion_tokens for reply in replies}
    assert {reply.choices[0].finish_reason for reply in replies} == {"stop"}
    assert len(lengths) > 5
    assert len({reply.choices[0].text[:40] for reply in replies}) == 20


@pytest.mark.parametrize(
    ("ask", "wanted"),
    [
        ({"max_tokens": 7, "ignore_eos": True}, (7, "length")),
        ({"max_tokens": 7, "min_tokens": 7}, (7, "length")),
        ({"ignore_eos": True}, (1000, "length")),
        ({"max_tokens": 900, "min_tokens": 800}, (800, "stop")),
        ({"max_tokens": 2}, (2, "length")),
    ],
)
def test_an_answer_is_as_long_as_asked(ask: dict[str, Any], wanted: tuple[int, str]) -> None:
    body = api.Body(prompt="hi", **ask)

    plan = api.plan_answer(api.read_ask(body, "completion", "sim"), 1000, 20, np.random.default_rng(1))

    assert plan == wanted


def test_a_host_that_falls_behind_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> Simulator:
        simulator = Simulator(FAST)
        for lag_s in (0.001, 0.5, 2.0, 0.0):
            simulator._note_lag(lag_s)
        return simulator

    simulator = asyncio.run(scenario())

    assert (simulator.metrics.lag_s, simulator.metrics.lag_max_s) == (0.0, 2.0)
    assert [record.getMessage()[:41] for record in caplog.records] == ["the simulated server is 0.50 s behind its"]


@pytest.mark.parametrize("change", [{"speed": 0.0}, {"kv_tokens": 3}, {"max_num_seqs": 0}, {"preset": "none"}])
def test_a_config_that_cannot_run_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(TraceError):
        ServerConfig(**change).effective_preset()


def test_a_taken_port_is_a_clear_error() -> None:
    async def scenario() -> None:
        async with serving(FAST) as url:
            taken = ServerConfig(port=int(url.rsplit(":", 1)[1]), preset="laptop-demo")
            with pytest.raises(TraceError, match="cannot listen"):
                async with serving(taken):
                    pass

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_cleanly_with_nothing_on_stdout(number: signal.Signals) -> None:
    code = (
        "import sys; from replay.sim.server import *; "
        "run_server(ServerConfig(port=0), lambda url: print(url, file=sys.stderr, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=os.getcwd(),
        text=True,
    )
    assert process.stderr is not None
    url = process.stderr.readline()

    process.send_signal(number)
    out, err = process.communicate(timeout=60)

    assert url.startswith("http://127.0.0.1:")
    assert (process.returncode, out, err) == (0, "", "")
