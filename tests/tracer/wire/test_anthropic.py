"""Bodies and events of the Messages API become the same facts as OpenAI's, and nothing raises."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.wire.anthropic import parse_chunk, parse_request, parse_response
from tracer.wire.facts import StreamFacts, Usage

STREAM: list[dict[str, Any]] = [
    {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "role": "assistant",
            "content": [],
            "usage": {"input_tokens": 10, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 16, "output_tokens": 1},
        },
    },
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "ping"},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "xyz"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Let me"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": " look."}},
    {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "t1", "name": "look", "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"q"'}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": ":1}"}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": {"output_tokens": 25}},
    {"type": "message_stop"},
]
WHOLE = {
    "type": "message",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "xyz"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"q": 1}},
    ],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 10, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 16, "output_tokens": 25},
}


def test_a_stream_and_a_body_of_the_same_answer_say_the_same() -> None:
    stream, whole = StreamFacts(), StreamFacts()

    for event in STREAM:
        stream.add(parse_chunk(json.dumps(event).encode()))
    whole.add(parse_response(json.dumps(WHOLE).encode()))

    for facts in (stream, whole):
        assert "".join(facts.text) == "Let me look."
        assert "".join(facts.reasoning) == "hm"
        assert "".join(facts.tool_text) == 'look{"q":1}'
        assert (facts.tool_calls, facts.finish_reason, facts.error) == (1, "tool_use", None)
        assert facts.usage == Usage(prompt_tokens=90, completion_tokens=25, cached_tokens=64, cache_write_tokens=16)
    assert stream.is_done


def test_only_events_with_content_are_tokens() -> None:
    bearing = [event["type"] for event in STREAM if parse_chunk(json.dumps(event).encode()).has_token]

    # thinking, two pieces of text, the call's name, two pieces of its arguments
    assert bearing == ["content_block_delta"] * 3 + ["content_block_start"] + ["content_block_delta"] * 2


def test_cumulative_usage_that_repeats_all_counts_is_not_added() -> None:
    facts = StreamFacts()

    facts.add(parse_chunk(json.dumps(STREAM[0]).encode()))
    last = {"input_tokens": 10, "cache_read_input_tokens": 64, "cache_creation_input_tokens": 16, "output_tokens": 7}
    facts.add(parse_chunk(json.dumps({"type": "message_delta", "delta": {}, "usage": last}).encode()))

    assert facts.usage == Usage(prompt_tokens=90, completion_tokens=7, cached_tokens=64, cache_write_tokens=16)


@pytest.mark.parametrize("parse", [parse_chunk, parse_response])
def test_errors_are_read(parse: Any) -> None:
    body = b'{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}'

    assert parse(body).error == "Overloaded"


def test_a_request_becomes_the_chat_it_amounts_to() -> None:
    body = {
        "model": "claude",
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "stream": True,
        "tool_choice": {"type": "any"},
        "metadata": {"user_id": "u1"},
    }

    found = parse_request(json.dumps(body).encode())

    assert found.messages == [{"role": "system", "content": body["system"]}, {"role": "user", "content": "Hi"}]
    assert (found.model, found.output_limit, found.stream, found.tool_choice, found.user) == ("claude", 9, True, "required", "u1")


def test_a_request_that_is_none_raises_with_the_place() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"\$\.max_tokens"):
        parse_request(b'{"max_tokens": "many"}')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted({k for e in STREAM for k in e})), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()), st.sampled_from(STREAM))
def test_nothing_a_server_sends_raises(data: bytes, event: dict[str, Any]) -> None:
    odd = {**event, "message": [], "delta": {"text": 5}, "usage": None}

    for body in (data, json.dumps(odd).encode()):
        parse_chunk(body)
        parse_response(body)
