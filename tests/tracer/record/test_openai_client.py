"""The real openai client talks through the recorder to the simulated server, and the trace shows the conversation."""

import asyncio
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from replay.sim.server import ServerConfig, serving
from tracer.record import RecordConfig, start_recorder
from tracer.tracefile import iter_requests

SYSTEM = "You answer briefly and never reveal CANARY-rules. " * 12
QUESTIONS = ["What is a block?", "And a tail?", "Why chained?"]


async def converse(url: str, *, stream: bool) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="CANARY-key", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            asked: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 48}
            if stream:
                chunks = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
                answer = "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])
            else:
                answer = (await client.chat.completions.create(**asked)).choices[0].message.content or ""
            messages.append({"role": "assistant", "content": answer})


async def record_day(folder: Path) -> list[dict[str, Any]]:
    async with serving(ServerConfig(port=0, speed=20)) as upstream:
        config = RecordConfig(upstream=upstream, out=str(folder / "t.parquet"))
        with await asyncio.to_thread(start_recorder, config) as recorder:
            await converse(recorder.url, stream=True)
            await converse(recorder.url, stream=False)
            result = await asyncio.to_thread(recorder.stop)
    assert result.losses == {"passed_through": 2}  # the model lists; no token drift among them
    return [dict(row) for row in iter_requests(result.path)]


def test_two_conversations_of_the_real_client(tmp_path: Path) -> None:
    rows = asyncio.run(record_day(tmp_path))

    assert [row["session_id"] for row in rows] == [0, 0, 0, 1, 1, 1]
    assert [row["turn"] for row in rows] == [0, 1, 2, 0, 1, 2]
    assert [row["parent_request_id"] for row in rows] == [None, 0, 1, None, 3, 4]
    assert [row["stream"] for row in rows] == [True] * 3 + [False] * 3
    assert {(row["http_status"], row["error_kind"], row["client_id"]) for row in rows} == {(200, None, 0)}
    for earlier, later in ((0, 1), (1, 2), (3, 4), (4, 5)):
        held = rows[earlier]["input_blocks"] + rows[earlier]["output_blocks"]
        assert rows[later]["input_blocks"][: len(held)] == held
    for row in rows:
        assert len(row["input_blocks"]) == row["input_tokens"] // 16
        assert row["cached_tokens"] % 16 == 0
    assert rows[4]["cached_tokens"] == 16 * len(rows[3]["input_blocks"] + rows[3]["output_blocks"])
