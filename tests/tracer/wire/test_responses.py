"""Bodies and events of the Responses API become the same facts as those of chat, and nothing raises."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.wire.facts import StreamFacts, Usage
from tracer.wire.responses import parse_chunk, parse_request, parse_response

ANSWER: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "output": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"q":1}'},
    ],
    "usage": {
        "input_tokens": 90,
        "input_tokens_details": {"cached_tokens": 64},
        "output_tokens": 25,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 115,
    },
}
STREAM: list[dict[str, Any]] = [
    {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress", "output": []}},
    {"type": "response.output_item.added", "item": {"type": "reasoning", "summary": []}},
    {"type": "response.reasoning_summary_text.delta", "delta": "hm"},
    {"type": "response.output_item.added", "item": {"type": "message", "content": []}},
    {"type": "response.output_text.delta", "delta": "Let me"},
    {"type": "response.output_text.delta", "delta": " look."},
    {"type": "response.output_text.done", "text": "Let me look."},
    {"type": "response.output_item.added", "item": {"type": "function_call", "name": "look", "arguments": ""}},
    {"type": "response.function_call_arguments.delta", "delta": '{"q"'},
    {"type": "response.function_call_arguments.delta", "delta": ":1}"},
    {"type": "response.function_call_arguments.done", "arguments": '{"q":1}'},
    {"type": "response.completed", "response": ANSWER},
]


def test_a_stream_and_a_body_of_the_same_answer_say_the_same() -> None:
    stream, whole = StreamFacts(), StreamFacts()

    for event in STREAM:
        stream.add(parse_chunk(json.dumps(event).encode()))
    whole.add(parse_response(json.dumps(ANSWER).encode()))

    for facts in (stream, whole):
        assert "".join(facts.text) == "Let me look."
        assert "".join(facts.reasoning) == "hm"
        assert "".join(facts.tool_text) == 'look{"q":1}'
        assert (facts.tool_calls, facts.finish_reason, facts.response_id, facts.is_done) == (1, "stop", "resp_1", True)
        assert facts.usage == Usage(prompt_tokens=90, completion_tokens=25, cached_tokens=64, reasoning_tokens=3)


@pytest.mark.parametrize(
    ("kind", "rest", "reason", "error"),
    [
        ("incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}, "max_output_tokens", None),
        ("failed", {"error": {"code": "server_error", "message": "broke"}}, None, "broke"),
    ],
)
def test_usage_is_read_from_every_kind_of_end(kind: str, rest: dict[str, Any], reason: str | None, error: str | None) -> None:
    response = {**ANSWER, "status": kind, **rest}

    facts = parse_chunk(json.dumps({"type": f"response.{kind}", "response": response}).encode())

    assert (facts.finish_reason, facts.error, facts.text) == (reason, error, "")
    assert facts.usage is not None and facts.usage.completion_tokens == 25


def test_an_error_event_is_read() -> None:
    assert parse_chunk(b'{"type": "error", "code": "x", "message": "too many"}').error == "too many"


def test_a_request_becomes_the_chat_it_amounts_to() -> None:
    body = {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "function_call", "id": "fc_9", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "found"},
        ],
        "max_output_tokens": 9,
        "text": {"format": {"type": "json_schema"}},
        "previous_response_id": "resp_0",
    }

    found = parse_request(json.dumps(body).encode())

    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "content": "found"},
    ]
    assert (found.output_limit, found.response_format, found.previous_response_id) == (9, {"type": "json_schema"}, "resp_0")
    assert parse_request(b'{"input": "Hi"}').messages == [{"role": "user", "content": "Hi"}]


KEYS = ["type", "delta", "item", "response", "output", "usage", "content", "error", "status"]
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.sampled_from([event["type"] for event in STREAM]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_nothing_a_server_sends_raises(data: bytes) -> None:
    parse_chunk(data)
    parse_response(data)


@pytest.mark.parametrize(("given", "found"), [("c1", "c1"), ({"id": "c1"}, "c1"), ({}, None), (7, None), (None, None)])
def test_a_conversation_is_named_by_its_id_or_an_object_that_has_one(given: object, found: str | None) -> None:
    body = json.dumps({"model": "m", "input": "hi", "conversation": given}).encode()

    assert parse_request(body).conversation == found
