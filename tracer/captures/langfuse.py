"""Langfuse observations of type GENERATION, from its API or its exports: https://langfuse.com/docs/observability/data-model

JSON lines, arrays, or pages of the API ({"data": [...]}), with names in camel or in snake case.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

from tracer.captures import Captured, Reject, Rejected
from tracer.captures.answers import Answer, chat_body, completion_body, facts_of, usage_of
from tracer.captures.asked import body_of, first_of, mapping, messages_in, unpacked
from tracer.captures.documents import values
from tracer.captures.stamps import BadStamp, since, wall_ns
from tracer.wire import CHAT, COMPLETIONS

NAME = "langfuse"
_FAILED = b'{"error": "it failed"}'
_STARTS = (b'"startTime"', b'"start_time"')


def looks_like(head: bytes) -> bool:
    return (
        head.lstrip(b"\xef\xbb\xbf \t\r\n[").startswith(b"{") and b'"GENERATION"' in head and any(one in head for one in _STARTS)
    )


def read(file: BinaryIO, reject: Reject) -> Iterator[Captured]:
    for place, entry in values(file, reject):
        if isinstance(entry.get("data"), list):
            for number, one in enumerate(entry["data"], 1):
                yield from _observation(f"{place}, observation {number}", one, reject)
        else:
            yield from _observation(place, entry, reject)


def _observation(place: str, entry: Any, reject: Reject) -> Iterator[Captured]:
    if not isinstance(entry, dict):
        reject(Rejected(place, "not a JSON object"))
    elif entry.get("type") != "GENERATION":
        reject(Rejected(place, "not a generation", "passed_through", is_fault=False))
    else:
        try:
            captured = _captured(entry)
        except BadStamp as error:
            reject(Rejected(place, str(error)))
            return
        if not captured.has_prompt:
            reject(Rejected(place, "the log does not hold its prompt", "requests_not_stored", is_fault=False))
        yield captured


def _captured(entry: dict[str, Any]) -> Captured:
    arrival_ns = wall_ns(first_of(entry, "startTime", "start_time"))
    endpoint, parts = _prompt(unpacked(entry.get("input")))
    parameters = {**parts, **mapping(first_of(entry, "modelParameters", "model_parameters"))}
    end_ns = since(arrival_ns, first_of(entry, "endTime", "end_time"))
    first_ns = since(arrival_ns, first_of(entry, "completionStartTime", "completion_start_time"))
    user = first_of(entry, "userId", "user_id")
    if first_ns is not None:
        parameters.setdefault("stream", True)  # only streams have a start of their own
    if isinstance(user, str):
        parameters["user"] = user
    model = first_of(entry, "providedModelName", "provided_model_name", "model")
    session = first_of(entry, "sessionId", "session_id")
    return Captured(
        arrival_ns=arrival_ns,
        endpoint=endpoint,
        body=body_of(model, parameters, **{name: parts[name] for name in ("messages", "prompt") if name in parts}),
        facts=facts_of(endpoint, Answer(body=_answer(entry, endpoint), ttft_ns=first_ns, end_ns=end_ns)),
        session=session.encode("utf-8", "surrogatepass") if isinstance(session, str) else b"",
        has_prompt=bool(parts),
    )


def _prompt(given: Any) -> tuple[str, dict[str, Any]]:
    """(endpoint, what the body says of the prompt)."""
    if isinstance(given, str) and given:
        return COMPLETIONS, {"prompt": given}
    messages = messages_in(given)
    if messages is not None:
        return CHAT, {"messages": messages}
    if isinstance(given, dict):
        messages = messages_in(unpacked(given.get("messages")))
        if messages is not None:
            return CHAT, {**given, "messages": messages}
        if isinstance(given.get("prompt"), str) and given["prompt"]:
            return COMPLETIONS, given
    return CHAT, {}


def _answer(entry: dict[str, Any], endpoint: str) -> bytes | None:
    if entry.get("level") == "ERROR":
        return _FAILED
    output, usage = unpacked(entry.get("output")), _usage(entry)
    reason = mapping(entry.get("metadata")).get("finish_reason")
    if isinstance(output, dict) and isinstance(output.get("choices"), list) and output["choices"]:
        choice = mapping(output["choices"][0])
        output, reason = choice.get("message", choice.get("text")), choice.get("finish_reason", reason)
    if isinstance(output, list):
        said = messages_in(output)
        output = said[-1] if said else None
    if isinstance(output, dict) and isinstance(output.get("completion"), str):
        output = output["completion"]
    if endpoint == COMPLETIONS:
        text = output if isinstance(output, str) else mapping(output).get("content")
        return completion_body(text if isinstance(text, str) else "", reason, usage)
    return chat_body(_message(output), reason, usage)


def _message(output: Any) -> dict[str, Any]:
    if isinstance(output, str):
        return {"content": output}
    message = mapping(output)
    return {name: message[name] for name in ("content", "reasoning", "reasoning_content", "tool_calls") if name in message}


def _usage(entry: dict[str, Any]) -> dict[str, Any]:
    """Its kinds of usage exclude each other: what came from a cache is not in `input`, reasoning not in `output`."""
    details = mapping(first_of(entry, "usageDetails", "usage_details"))
    if not details:
        usage = mapping(entry.get("usage"))
        return usage_of(
            first_of(usage, "input", "promptTokens") or first_of(entry, "promptTokens", "prompt_tokens"),
            first_of(usage, "output", "completionTokens") or first_of(entry, "completionTokens", "completion_tokens"),
        )
    cached = first_of(details, "input_cached_tokens", "input_cache_read", "cache_read_input_tokens")
    reasoning = first_of(details, "output_reasoning_tokens", "output_reasoning")
    return usage_of(
        _sum(details, "input", "cache_read_input_tokens", "cache_creation_input_tokens"),
        _sum(details, "output"),
        cached,
        reasoning,
    )


def _sum(details: dict[str, Any], prefix: str, *others: str) -> int | None:
    counts = [value for name, value in details.items() if (name.startswith(prefix) or name in others) and type(value) is int]
    return sum(counts) if counts else None
