"""LiteLLM's logs: StandardLoggingPayload of its callbacks, and rows of its LiteLLM_SpendLogs table, as JSON lines or arrays.

https://docs.litellm.ai/docs/proxy/logging_spec . Content is there only if it was told to store prompts. Its `session_id` and
`trace_id` are made up for each request that brings none, so they say nothing here.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from tracer.captures import Captured, Reject, Rejected
from tracer.captures.answers import Answer, chat_body, completion_body, facts_of, usage_of
from tracer.captures.asked import body_of, first_of, mapping, messages_in, truth, unpacked
from tracer.captures.documents import values
from tracer.captures.openai_jsonl import status_of
from tracer.captures.stamps import BadStamp, since, wall_ns
from tracer.wire import CHAT, COMPLETIONS, MESSAGES, RESPONSES

NAME = "litellm"
REDACTED = "redacted-by-litellm"
_MARKS = (b'"litellm_call_id"', b'"call_type"', b'"proxy_server_request"', b'"completionStartTime"')
_ENDPOINTS = {
    "completion": CHAT,
    "text_completion": COMPLETIONS,
    "responses": RESPONSES,
    "anthropic_messages": MESSAGES,
    "": CHAT,
}
_FAILED = b'{"error": "it failed"}'


def looks_like(head: bytes) -> bool:
    return (
        head.lstrip(b"\xef\xbb\xbf \t\r\n[").startswith(b"{") and b'"startTime"' in head and any(mark in head for mark in _MARKS)
    )


def read(file: BinaryIO, reject: Reject) -> Iterator[Captured]:
    for place, entry in values(file, reject):
        endpoint = _endpoint(entry)
        if truth(entry.get("cache_hit")):
            reject(Rejected(place, "answered from LiteLLM's own cache", "cache_hits", is_fault=False))
        elif endpoint is None:
            reject(Rejected(place, "not a call that is recorded", "passed_through", is_fault=False))
        else:
            try:
                captured = _captured(entry, endpoint)
            except BadStamp as error:
                reject(Rejected(place, str(error)))
                continue
            if not captured.has_prompt:
                reject(Rejected(place, "the log does not hold its prompt", "requests_not_stored", is_fault=False))
            yield captured


def _endpoint(entry: dict[str, Any]) -> str | None:
    call = entry.get("call_type") or ""
    if not isinstance(call, str):
        return None
    return _ENDPOINTS.get(call, _ENDPOINTS.get(call.removeprefix("a"))) if call != "a" else None


def _captured(entry: dict[str, Any], endpoint: str) -> Captured:
    arrival_ns = wall_ns(entry.get("startTime"))
    metadata, sent = mapping(entry.get("metadata")), mapping(entry.get("proxy_server_request"))
    sent = mapping(sent.get("body")) or sent
    parameters = {**sent, **mapping(entry.get("model_parameters")), **_given(entry, "stream")}
    user = first_of(entry, "end_user", "user") or first_of(sent, "user")
    parameters["user"] = user if isinstance(user, str) else None
    parts = _prompt(endpoint, sent) or _prompt(endpoint, entry)
    return Captured(
        arrival_ns=arrival_ns,
        endpoint=endpoint,
        body=body_of(first_of(sent, "model") or first_of(entry, "model_group", "model"), parameters, **parts),
        facts=facts_of(*_answer(entry, endpoint, arrival_ns, metadata)),
        identity=_bytes(first_of(metadata, "user_api_key_hash") or first_of(entry, "api_key")),
        session=_bytes(first_of(mapping(metadata.get("requester_metadata")), "session_id")),
        has_prompt=bool(parts),
    )


def _given(entry: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: entry[name]} if entry.get(name) is not None else {}


def _bytes(value: Any) -> bytes:
    return str(value).encode() if isinstance(value, str | int) else b""


def _prompt(endpoint: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Empty where prompts were not stored, or were redacted."""
    messages = unpacked(entry.get("messages"))
    if endpoint == COMPLETIONS:
        prompt = entry.get("prompt")
        if prompt is None:
            chat = messages_in(messages)
            prompt = chat[0].get("content") if chat and len(chat) == 1 else messages
        return {"prompt": prompt} if isinstance(prompt, str | list) and prompt and prompt != REDACTED else {}
    if endpoint == RESPONSES:
        given = unpacked(entry.get("input")) or messages
        return (
            {"input": given, **_given(entry, "instructions")}
            if isinstance(given, str | list) and given and given != REDACTED
            else {}
        )
    chat = messages_in(messages)
    if not chat or any(message.get("content") == REDACTED for message in chat):
        return {}
    return {"messages": chat, **(_given(entry, "system") if endpoint == MESSAGES else {})}


def _answer(entry: dict[str, Any], endpoint: str, arrival_ns: int, metadata: dict[str, Any]) -> tuple[str, Answer]:
    """(the API that the response is written in, the answer)."""
    end_ns = since(arrival_ns, entry.get("endTime"))
    first_ns = since(arrival_ns, entry.get("completionStartTime"))
    # Answers that were not streamed have their end here.
    is_first = truth(entry.get("stream")) is not False and first_ns is not None and (end_ns is None or first_ns < end_ns)
    ttft_ns = first_ns if is_first else None
    if entry.get("status") == "failure":
        error = mapping(entry.get("error_information")) or mapping(metadata.get("error_information"))
        return CHAT, Answer(status=status_of(error.get("error_code")), body=_FAILED, ttft_ns=ttft_ns, end_ns=end_ns)
    spoken, body = _response(entry, endpoint, metadata)
    return spoken, Answer(body=body, ttft_ns=ttft_ns, end_ns=end_ns)


def _response(entry: dict[str, Any], endpoint: str, metadata: dict[str, Any]) -> tuple[str, bytes | None]:
    response = unpacked(entry.get("response"))
    usage = _usage(entry, metadata)
    if isinstance(response, str) and response and response != REDACTED:
        return (endpoint, completion_body(response, usage=usage)) if endpoint == COMPLETIONS else (CHAT, _said(response, usage))
    if not isinstance(response, dict) or not response:
        return CHAT, _said(None, usage)
    spoken = (COMPLETIONS if endpoint == COMPLETIONS else CHAT) if "choices" in response else endpoint
    if response.get("usage") is None and spoken in (CHAT, COMPLETIONS):
        response = {**response, "usage": usage}
    if REDACTED in str(response.get("choices", response.get("output", response.get("content")))):
        return CHAT, _said(None, mapping(response.get("usage")) or usage)
    return spoken, msgspec.json.encode(response)


def _said(text: str | None, usage: dict[str, Any]) -> bytes:
    return chat_body({"content": text}, usage=usage)


def _usage(entry: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    told = mapping(mapping(entry.get("hidden_params")).get("usage_object")) or mapping(metadata.get("usage_object"))
    return usage_of(
        entry.get("prompt_tokens"),
        entry.get("completion_tokens"),
        mapping(told.get("prompt_tokens_details")).get("cached_tokens"),
        mapping(told.get("completion_tokens_details")).get("reasoning_tokens"),
    )
