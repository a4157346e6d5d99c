"""Bytes of LLM APIs to facts, pure."""

from collections.abc import Callable
from typing import NamedTuple

from tracer.wire import anthropic, openai, responses
from tracer.wire.facts import ChunkFacts
from tracer.wire.openai import RequestBody

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


class Api(NamedTuple):
    """How one endpoint speaks. The response parsers never raise; `parse_request` raises msgspec.DecodeError."""

    kind: str  # of the trace row
    parse_request: Callable[[bytes], RequestBody]
    parse_chunk: Callable[[bytes], ChunkFacts]
    parse_response: Callable[[bytes], ChunkFacts]
    parse_chunks: Callable[[list[bytes]], list[ChunkFacts]]  # `parse_chunk` of each


APIS: dict[str, Api] = {
    CHAT: Api("chat", openai.parse_request, openai.parse_chunk, openai.parse_response, openai.parse_chunks),
    COMPLETIONS: Api("completion", openai.parse_request, openai.parse_chunk, openai.parse_response, openai.parse_chunks),
    RESPONSES: Api("chat", responses.parse_request, responses.parse_chunk, responses.parse_response, responses.parse_chunks),
    MESSAGES: Api("chat", anthropic.parse_request, anthropic.parse_chunk, anthropic.parse_response, anthropic.parse_chunks),
}


def endpoint_of(path: str) -> str | None:
    """The endpoint of a request path, whatever stands before it (`/openai/v1/...`) and behind a `?`."""
    path = path.partition("?")[0].rstrip("/")
    return next((one for one in APIS if path.endswith(one)), None)
