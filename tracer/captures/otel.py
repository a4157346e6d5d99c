"""OpenTelemetry spans of GenAI calls, as OTLP JSON: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/

Messages are opt-in there. Older names are read too, and those of OpenLLMetry, OpenInference and vLLM.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

from tracer.captures import Captured, Reject, Rejected
from tracer.captures.answers import Answer, chat_body, completion_body, facts_of, usage_of
from tracer.captures.asked import body_of, first_of, unpacked
from tracer.captures.documents import values
from tracer.captures.genai_messages import indexed, messages_of, text_of
from tracer.captures.openai_jsonl import status_of
from tracer.captures.stamps import BadStamp, since, wall_ns
from tracer.wire import CHAT, COMPLETIONS

NAME = "otel"
MAX_DEPTH = 20
_ENDPOINTS = {"chat": CHAT, "generate_content": CHAT, "text_completion": COMPLETIONS, "completion": COMPLETIONS, "LLM": CHAT}
_MARKS = ("gen_ai.request.model", "gen_ai.response.model", "gen_ai.request.max_tokens", "llm.model_name")
_FIRST_TOKEN_S = (
    "gen_ai.response.time_to_first_chunk",
    "gen_ai.server.time_to_first_token",
    "gen_ai.latency.time_to_first_token",
)
_PARAMETERS = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed", "stream")
_FAILED = b'{"error": "it failed"}'


def looks_like(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n[").startswith(b"{") and (b'"resourceSpans"' in head or b'"resource_spans"' in head)


def read(file: BinaryIO, reject: Reject) -> Iterator[Captured]:
    for place, batch in values(file, reject):
        number = 0
        for span in _spans(batch):
            number += 1
            yield from _one(f"{place}, span {number}", span, reject)
        if not number:
            reject(Rejected(place, "no spans in it", "passed_through", is_fault=False))


def _one(place: str, span: dict[str, Any], reject: Reject) -> Iterator[Captured]:
    found = _attributes(span.get("attributes"))
    for event in _dicts(span.get("events")):
        found |= {name: value for name, value in _attributes(event.get("attributes")).items() if name.startswith("gen_ai.")}
    operation = first_of(found, "gen_ai.operation.name", "llm.request.type", "openinference.span.kind")
    endpoint = _ENDPOINTS.get(str(operation)) if operation is not None else CHAT
    if endpoint is None or not any(name in found for name in _MARKS):
        reject(Rejected(place, "not a span of a model call", "passed_through", is_fault=False))
        return
    try:
        captured = _captured(span, found, endpoint)
    except BadStamp as error:
        reject(Rejected(place, str(error)))
        return
    if not captured.has_prompt:
        reject(Rejected(place, "the span does not hold its prompt", "requests_not_stored", is_fault=False))
    yield captured


def _captured(span: dict[str, Any], found: dict[str, Any], endpoint: str) -> Captured:
    arrival_ns = wall_ns(first_of(span, "startTimeUnixNano", "start_time_unix_nano"))
    parts = _prompt(found, endpoint)
    parameters: dict[str, Any] = {name: found.get(f"gen_ai.request.{name}") for name in _PARAMETERS}
    parameters |= {"n": first_of(found, "gen_ai.request.choice.count", "gen_ai.request.n")}
    parameters |= {"tools": unpacked(found.get("gen_ai.tool.definitions")), "user": first_of(found, "enduser.id", "user.id")}
    kind = found.get("gen_ai.output.type")
    parameters["response_format"] = {"type": "json_object"} if kind == "json" else None
    model = first_of(found, "gen_ai.request.model", "llm.model_name", "gen_ai.response.model")
    session = first_of(found, "gen_ai.conversation.id", "session.id")
    return Captured(
        arrival_ns=arrival_ns,
        endpoint=endpoint,
        body=body_of(model, parameters, **parts),
        facts=facts_of(endpoint, _answer(span, found, endpoint, arrival_ns)),
        session=session.encode("utf-8", "surrogatepass") if isinstance(session, str) else b"",
        upstream=_upstream(found),
        has_prompt=bool(parts),
    )


def _prompt(found: dict[str, Any], endpoint: str) -> dict[str, Any]:
    given = unpacked(first_of(found, "gen_ai.input.messages", "gen_ai.prompt"))
    messages = messages_of(given) or indexed(found, "gen_ai.prompt", "") or indexed(found, "llm.input_messages", "message.")
    rules = messages_of([{"role": "system", "parts": unpacked(found.get("gen_ai.system_instructions"))}])
    if endpoint == COMPLETIONS:
        text = given if isinstance(given, str) else "".join(text_of(message) for message in messages)
        return {"prompt": text} if text else {}
    return {"messages": [*rules, *messages]} if messages else {}


def _answer(span: dict[str, Any], found: dict[str, Any], endpoint: str, arrival_ns: int) -> Answer:
    fault = found.get("error.type")
    status = status_of(first_of(found, "http.response.status_code", "http.status_code")) or status_of(fault)
    state = span.get("status")
    has_failed = fault is not None or (isinstance(state, dict) and state.get("code") in (2, "STATUS_CODE_ERROR"))
    return Answer(
        status=status,
        is_told=True,
        body=_FAILED if has_failed else _response(found, endpoint),
        ttft_ns=_seconds_ns(first_of(found, *_FIRST_TOKEN_S)),
        end_ns=since(arrival_ns, first_of(span, "endTimeUnixNano", "end_time_unix_nano")),
    )


def _response(found: dict[str, Any], endpoint: str) -> bytes:
    given = unpacked(first_of(found, "gen_ai.output.messages", "gen_ai.completion"))
    said = messages_of(given) or indexed(found, "gen_ai.completion", "") or indexed(found, "llm.output_messages", "message.")
    message = said[0] if said else {}
    reasons = unpacked(found.get("gen_ai.response.finish_reasons"))
    first = reasons[0] if isinstance(reasons, list) and reasons else reasons
    reason = message.pop("finish_reason", None) or first
    reason = "tool_calls" if reason == "tool_call" else reason
    if endpoint == COMPLETIONS:
        return completion_body(given if isinstance(given, str) else text_of(message), reason, _usage(found))
    return chat_body(message, reason, _usage(found))


def _usage(found: dict[str, Any]) -> dict[str, Any]:
    return usage_of(
        first_of(found, "gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
        first_of(found, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
        first_of(found, "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens"),
        first_of(found, "gen_ai.usage.reasoning.output_tokens", "gen_ai.usage.reasoning_tokens"),
    )


def _seconds_ns(value: Any) -> int | None:
    is_time = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
    return round(value * 1e9) if is_time else None


def _upstream(found: dict[str, Any]) -> str:
    host, port = found.get("server.address"), found.get("server.port")
    if not isinstance(host, str) or "@" in host or "?" in host:
        return ""
    return f"{host}:{port}" if isinstance(port, int) else host


def _spans(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in _dicts(first_of(batch, "resourceSpans", "resource_spans")):
        for scope in _dicts(first_of(resource, "scopeSpans", "scope_spans", "instrumentationLibrarySpans")):
            yield from _dicts(scope.get("spans"))


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    return (one for one in (value if isinstance(value, list) else ()) if isinstance(one, dict))


def _attributes(pairs: Any) -> dict[str, Any]:
    found = {pair["key"]: _plain(pair.get("value"), 0) for pair in _dicts(pairs) if isinstance(pair.get("key"), str)}
    return {name: value for name, value in found.items() if value is not None}


def _plain(value: Any, depth: int) -> Any:
    """An AnyValue of OTLP as a JSON value; 64-bit integers come as text there."""
    if not isinstance(value, dict) or depth > MAX_DEPTH:
        return None
    for name in ("stringValue", "boolValue", "doubleValue"):
        if name in value:
            return value[name]
    if "intValue" in value:
        text = str(value["intValue"])
        return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None
    if "arrayValue" in value and isinstance(value["arrayValue"], dict):
        return [_plain(one, depth + 1) for one in _dicts(value["arrayValue"].get("values"))]
    if "kvlistValue" in value and isinstance(value["kvlistValue"], dict):
        members = _dicts(value["kvlistValue"].get("values"))
        return {str(one.get("key")): _plain(one.get("value"), depth + 1) for one in members}
    return None
