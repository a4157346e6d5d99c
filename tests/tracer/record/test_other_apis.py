"""The real anthropic and openai clients through the recorder: what they get is what the server sent, and the rows are right."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiohttp import web

from tracer.record import RecordConfig, RecorderProcess, start_recorder
from tracer.tracefile import iter_requests

Json = dict[str, Any]
CONTENT: list[Json] = [
    {"type": "text", "text": "Let me look."},
    {"type": "tool_use", "id": "t1", "name": "look", "input": {"q": 1}},
]
START_USAGE = {"input_tokens": 26, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 0, "output_tokens": 1}
MESSAGE: Json = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": CONTENT,
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {**START_USAGE, "output_tokens": 25},
}
MESSAGE_EVENTS: list[Json] = [
    {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None, "usage": START_USAGE}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Let me"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": " look."}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {**CONTENT[1], "input": {}}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"q": 1}'}},
    {"type": "content_block_stop", "index": 1},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": {"output_tokens": 25}},
    {"type": "message_stop"},
]
OVERLOADED: Json = {"type": "error", "error": {"type": "overloaded_error", "message": "CANARY Overloaded"}}
RESPONSE: Json = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "model": "m",
    "status": "completed",
    "output": [
        {
            "id": "m1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "usage": {
        "input_tokens": 90,
        "input_tokens_details": {"cached_tokens": 64},
        "output_tokens": 25,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 115,
    },
}
PLACE = {"item_id": "m1", "output_index": 0, "content_index": 0, "logprobs": []}
RESPONSE_EVENTS: list[Json] = [
    {"type": "response.created", "response": {**RESPONSE, "status": "in_progress", "output": [], "usage": None}},
    {"type": "response.output_item.added", "output_index": 0, "item": {**RESPONSE["output"][0], "content": []}},
    {"type": "response.content_part.added", **PLACE, "part": {"type": "output_text", "text": "", "annotations": []}},
    {"type": "response.output_text.delta", **PLACE, "delta": "Let me"},
    {"type": "response.output_text.delta", **PLACE, "delta": " look."},
    {"type": "response.completed", "response": RESPONSE},
]


def as_stream(events: list[Json]) -> bytes:
    named = (event | {"sequence_number": number} for number, event in enumerate(events))
    return b"".join(f"event: {event['type']}\r\ndata: {json.dumps(event)}\r\n\r\n".encode() for event in named)


MESSAGE_STREAM, RESPONSE_STREAM = as_stream(MESSAGE_EVENTS), as_stream(RESPONSE_EVENTS)
BROKEN_STREAM = as_stream([*MESSAGE_EVENTS[:4], OVERLOADED])
CUTS = (1, 7, 40, 41, 180, 181, 182, 500, 777)


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["model"] == "full":
        return web.json_response(OVERLOADED, status=529)
    is_anthropic = request.path.endswith("messages")
    if not body.get("stream"):
        return web.json_response(MESSAGE if is_anthropic else RESPONSE)
    stream = MESSAGE_STREAM if is_anthropic else RESPONSE_STREAM
    stream = BROKEN_STREAM if body["model"] == "breaks" else stream
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for start, end in zip((0, *CUTS), (*CUTS, len(stream)), strict=True):
        await response.write(stream[start:end])
    return response


@asynccontextmanager
async def recording(folder: Path) -> AsyncIterator[RecorderProcess]:
    app = web.Application()
    app.router.add_post("/v1/messages", answer)
    app.router.add_post("/v1/responses", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        config = RecordConfig(upstream=f"http://127.0.0.1:{runner.addresses[0][1]}", out=str(folder / "t.parquet"))
        with await asyncio.to_thread(start_recorder, config) as recorder:
            yield recorder
    finally:
        await runner.cleanup()


def rows_of(recorder: RecorderProcess) -> list[Json]:
    return [dict(row) for row in iter_requests(recorder.stop().path)]


async def talk_to_messages(url: str) -> None:
    asked: Json = {
        "model": "claude",
        "max_tokens": 99,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Look it up"}],
    }
    tool = {"name": "look", "input_schema": {"type": "object"}}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="CANARY-key", max_retries=0) as client:
        whole = await client.messages.create(**asked, tools=[tool])
        async with client.messages.stream(**asked, tools=[tool]) as stream:
            streamed = await stream.get_final_message()
        assert [block.model_dump(include={"type", "text", "name", "input"}) for block in streamed.content] == [
            block.model_dump(include={"type", "text", "name", "input"}) for block in whole.content
        ]
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}
        asked["messages"] += [{"role": "assistant", "content": CONTENT}, {"role": "user", "content": [result]}]
        await client.messages.create(**asked, tools=[tool])
        with pytest.raises(anthropic.APIStatusError, match="Overloaded"):
            await client.messages.create(**{**asked, "model": "full"})
        with pytest.raises(anthropic.APIStatusError, match="Overloaded"):
            async with client.messages.stream(**{**asked, "model": "breaks"}) as stream:
                await stream.get_final_message()


def test_the_anthropic_client_passes_through_and_its_rows_are_right(tmp_path: Path) -> None:
    async def run() -> list[Json]:
        async with recording(tmp_path) as recorder:
            await talk_to_messages(recorder.url)
            return await asyncio.to_thread(rows_of, recorder)

    rows = asyncio.run(run())

    assert [(row["http_status"], row["error_kind"]) for row in rows] == [
        (200, None),
        (200, None),
        (200, None),
        (529, "http_status"),
        (200, "stream_error"),
    ]
    for row in rows[:3]:
        assert (row["endpoint"], row["kind"], row["finish_reason"], row["tool_calls_out"]) == (
            "/v1/messages",
            "chat",
            "tool_use",
            1,
        )
        assert (row["input_tokens"], row["output_tokens"], row["cached_tokens"], row["cache_write_tokens"]) == (90, 25, 64, 0)
        assert (row["max_tokens"], row["tools_count"], row["client_id"]) == (99, 1, 0)
    assert rows[1]["ttft_ns"] is not None and rows[1]["itl_summary"]["count"] == 3
    assert (rows[2]["session_id"], rows[2]["turn"]) == (rows[1]["session_id"], 1)  # the tool result continues the turn
    held = rows[1]["input_blocks"] + rows[1]["output_blocks"]
    assert rows[2]["input_blocks"][: len(held)] == held


def test_the_openai_client_speaks_responses_through_the_recorder(tmp_path: Path) -> None:
    async def run() -> list[Json]:
        async with recording(tmp_path) as recorder:
            async with openai.AsyncOpenAI(base_url=f"{recorder.url}/v1", api_key="CANARY-key", max_retries=0) as client:
                whole = await client.responses.create(model="m", input="Look it up", instructions="Be brief.")
                assert whole.output_text == "Let me look."
                async with client.responses.stream(model="m", input="Look it up") as stream:
                    assert (await stream.get_final_response()).output_text == "Let me look."
                await client.responses.create(model="m", input="And then?", previous_response_id="resp_1")
                for conversation in ({"id": "CANARY-conversation"}, "CANARY-conversation"):
                    await client.responses.create(
                        model="m", input="And now?", conversation=conversation, extra_body={"prompt_cache_key": "shared"}
                    )
                await client.responses.create(model="m", input="Hello", extra_body={"prompt_cache_key": "shared"})
            return await asyncio.to_thread(rows_of, recorder)

    rows = asyncio.run(run())

    for row in rows:
        assert (row["endpoint"], row["kind"], row["finish_reason"], row["error_kind"]) == ("/v1/responses", "chat", "stop", None)
        assert (row["input_tokens"], row["output_tokens"], row["cached_tokens"]) == (90, 25, 64)
    assert rows[1]["ttft_ns"] is not None and rows[1]["itl_summary"]["count"] == 1
    assert (rows[2]["session_id"], rows[2]["turn"]) == (rows[1]["session_id"], 1)
    sessions = [row["session_id"] for row in rows]
    assert sessions[3] == sessions[4] != sessions[5] and sessions[3] not in sessions[:3]
    assert (rows[4]["turn"], rows[4]["parent_request_id"]) == (1, 3) and rows[4]["think_ns"] is not None
    assert rows[4]["input_blocks"] is None
    assert all(b"CANARY" not in path.read_bytes() for path in tmp_path.iterdir())
    assert rows[2]["input_blocks"] is None  # what came before stands on the server only: no made-up sharing


@pytest.mark.parametrize(("path", "stream"), [("messages", MESSAGE_STREAM), ("responses", RESPONSE_STREAM)])
def test_every_byte_of_a_stream_arrives(tmp_path: Path, path: str, stream: bytes) -> None:
    async def run() -> bytes:
        async with recording(tmp_path) as recorder, httpx.AsyncClient() as client:
            body = {"model": "m", "stream": True, "messages": [], "input": "x"}
            return (await client.post(f"{recorder.url}/v1/{path}?beta=true", json=body)).content

    assert asyncio.run(run()) == stream
