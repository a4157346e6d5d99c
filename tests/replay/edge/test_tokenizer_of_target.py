"""A server's vocabulary, found out from a server that is strict about how it is asked."""

import asyncio

import httpx
import msgspec
import pytest

from replay.edge.client import Client
from replay.edge.probe import _vocabulary  # the smallest door to it

CONTEXT_TOKENS = 300


def strict(field: str) -> httpx.MockTransport:
    """Takes JSON that says so, the text under one name, and no more of it than its context holds; one token for a word."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = msgspec.json.decode(request.content)
        words = str(body.get(field, "")).split()
        if request.headers.get("content-type") != "application/json" or len(words) > CONTEXT_TOKENS:
            return httpx.Response(400)
        return httpx.Response(200, json={"tokens": [sum(word.encode()) for word in words]})

    return httpx.MockTransport(answer)


@pytest.mark.parametrize("field", ["prompt", "content"])
def test_the_servers_own_tokenizer_is_asked(field: str) -> None:
    async def found() -> tuple[int, list[str]]:
        async with httpx.AsyncClient(transport=strict(field)) as http:
            notes: list[str] = []
            vocabulary = await _vocabulary(Client(http, None), "http://target", "m", "cl100k", notes)
            assert vocabulary.words is not None
            return len(vocabulary.ids), notes

    size, notes = asyncio.run(found())

    assert size > CONTEXT_TOKENS
    assert notes == []
