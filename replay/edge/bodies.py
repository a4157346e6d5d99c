"""How each API is asked for an answer of a given length: paths and JSON bodies. Pure."""

from typing import Any

import msgspec

from tracer.wire import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api
from tracer.words import Tokens, Vocabulary, as_text

PATHS = {"ids": COMPLETIONS, "text": COMPLETIONS, "chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
_LIMIT = {RESPONSES: "max_output_tokens"}


def api_of(mode: str) -> Api:
    return APIS[PATHS[mode]]


def body_of(mode: str, model: str, tokens: Tokens, vocabulary: Vocabulary, output_tokens: int, **more: Any) -> bytes:
    """A request whose answer has `output_tokens`. `tokens` are ids in mode ids, else places in the vocabulary."""
    limit = _LIMIT.get(PATHS[mode], "max_tokens")
    return msgspec.json.encode({"model": model, limit: output_tokens} | prompt_of(mode, tokens, vocabulary) | more)


def streamed(mode: str, output_tokens: int) -> dict[str, Any]:
    """What a request of a replay says beyond that: stream, count, do not end early."""
    wanted: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "stream": True}
    match PATHS[mode]:
        case "/v1/responses":
            return wanted | {"store": False}
        case "/v1/messages":
            return wanted
    # ignore_eos alone does not fix the length on every server
    usage = {"include_usage": True, "continuous_usage_stats": True}
    return wanted | {"min_tokens": output_tokens, "stream_options": usage}


def prompt_of(mode: str, tokens: Tokens, vocabulary: Vocabulary) -> dict[str, object]:
    """The part of a request that is its prompt."""
    if mode == "ids":
        return {"prompt": tokens.tolist()}
    text = as_text(tokens, vocabulary)
    match mode:
        case "text":
            return {"prompt": text}
        case "responses":
            return {"input": text}
    return {"messages": [{"role": "user", "content": text}]}
