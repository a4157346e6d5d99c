"""OpenAI-compatible chat and completions: bodies and stream events to facts. Never raises on what a server or client sent.

Fields beyond OpenAI's own are vLLM's: `token_ids` (with `return_token_ids`), `reasoning` / `reasoning_content`.
"""

from typing import Any

import msgspec

from tracer.wire.facts import ChunkFacts, Usage, error_text


class Details(msgspec.Struct, gc=False):
    """Of prompt or completion tokens; the Responses API has the same."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None
    completion_tokens_details: Details | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class _ToolCall(msgspec.Struct):
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, gc=False):
    content: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int | None = None
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None  # completions put them here, chat beside `choices`


class _Body(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


class _Error(msgspec.Struct):
    error: Any


_decoder = msgspec.json.Decoder(_Body)
_decode, _decode_lines = _decoder.decode, _decoder.decode_lines
_decode_error = msgspec.json.Decoder(_Error).decode
_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DONE = ChunkFacts(is_done=True)


def parse_chunk(data: bytes) -> ChunkFacts:
    """Facts of one SSE payload."""
    if data == b"[DONE]" or data.strip() == b"[DONE]":
        return _DONE
    return parse_response(data)


def parse_chunks(payloads: list[bytes]) -> list[ChunkFacts]:
    """`parse_chunk` of each; quicker, since one call decodes all of them where all are well."""
    is_last = bool(payloads) and payloads[-1] == b"[DONE]"
    try:
        bodies = _decode_lines(b"\n".join(payloads[:-1] if is_last else payloads))
    except _FAULTS:
        bodies = []
    if len(bodies) + is_last != len(payloads) or b"" in payloads:
        return [parse_chunk(one) for one in payloads]
    facts = [_facts(one) for one in bodies]
    return [*facts, _DONE] if is_last else facts


def parse_response(body: bytes) -> ChunkFacts:
    """Facts of a whole JSON body (or one event's). What is no such body has `is_parsed` False."""
    try:
        raw = _decode(body)
    except _FAULTS:
        return _unusual(body)
    return _facts(raw)


def _facts(raw: _Body) -> ChunkFacts:
    if raw.error is not None or raw.object == "error":
        return ChunkFacts(error=error_text(raw.error if raw.error is not None else raw.message))
    usage = _usage(raw.usage) if raw.usage is not None else None
    if not raw.choices:
        return ChunkFacts(usage=usage, prompt_token_ids=raw.prompt_token_ids)
    choice = raw.choices[0]
    text, reasoning, calls, tool_text = choice.text or "", "", 0, ""
    message = choice.delta or choice.message
    if message is not None:
        if message.content:
            text += message.content if isinstance(message.content, str) else _parts_text(message.content)
        reasoning = message.reasoning or message.reasoning_content or ""
        if message.tool_calls:
            calls, tool_text = _tool_calls(message.tool_calls)
    return ChunkFacts(
        choice_index=choice.index or 0,
        text=text,
        reasoning=reasoning,
        tool_calls=calls,
        tool_text=tool_text,
        token_ids=choice.token_ids,
        prompt_token_ids=raw.prompt_token_ids or choice.prompt_token_ids,
        finish_reason=choice.finish_reason,
        usage=usage,
    )


def is_usage_alone(data: bytes) -> bool:
    """Whether a stream event holds usage and no choice: the one that `include_usage` adds."""
    try:
        raw = _decode(data)
    except _FAULTS:
        return False
    return raw.usage is not None and raw.choices == []


def _unusual(body: bytes) -> ChunkFacts:
    """An error object inside a body that is odd elsewhere still counts as one."""
    try:
        error = _decode_error(body).error
    except _FAULTS:
        return ChunkFacts(is_parsed=False)
    return ChunkFacts(is_parsed=False, error=error_text(error) if error is not None else None)


def _parts_text(content: Any) -> str:
    if not isinstance(content, list):
        return ""
    return "".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)


def _tool_calls(calls: list[_ToolCall]) -> tuple[int, str]:
    """(calls that begin, their text). A call's later pieces carry neither id nor name."""
    begun, text = 0, ""
    for call in calls:
        name = call.function.name if call.function else None
        arguments = call.function.arguments if call.function else None
        begun += bool(call.id or name)
        text += (name or "") + (arguments if isinstance(arguments, str) else "")
    return begun, text


def _usage(raw: _Usage) -> Usage:
    prompt, completion = raw.prompt_tokens_details, raw.completion_tokens_details
    return Usage(
        prompt_tokens=raw.prompt_tokens,
        completion_tokens=raw.completion_tokens,
        cached_tokens=prompt.cached_tokens if prompt else None,
        reasoning_tokens=completion.reasoning_tokens if completion else None,
    )


class RequestBody(msgspec.Struct):
    """The fields of a request that a trace or a simulated server needs; all others are passed over."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt: Any = None
    tools: list[Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Any = None
    tool_choice: Any = None
    response_format: Any = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    previous_response_id: str | None = None  # Responses: what came before stands on the server only
    conversation: str | None = None  # Responses: as well, by its id
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


_decode_request = msgspec.json.Decoder(RequestBody).decode


def parse_request(body: bytes) -> RequestBody:
    """Raises msgspec.DecodeError (or its ValidationError) with the place of the fault, for whoever must answer 400."""
    return _decode_request(body)


def token_prompt(prompt: Any) -> list[int] | None:
    """The ids if the prompt is one list of token ids (bare, or the only member of a list), else None."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    return None


def text_prompt(prompt: Any) -> str | None:
    """The text if the prompt is one string (bare, or the only member of a list), else None."""
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else None
