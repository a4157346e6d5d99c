"""Bodies and stream events of OpenAI-compatible servers become facts, and nothing raises."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.wire.facts import ChunkFacts, StreamFacts, Usage
from tracer.wire.openai import parse_chunk, parse_chunks, parse_request, parse_response, text_prompt, token_prompt


def chunk(**body: object) -> bytes:
    return json.dumps({"id": "x", "object": "chat.completion.chunk", "model": "m", **body}).encode()


def delta(index: int = 0, finish: str | None = None, **delta: object) -> bytes:
    return chunk(choices=[{"index": index, "delta": delta, "finish_reason": finish}])


def test_content_reasoning_and_tool_calls_are_tokens() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look", "arguments": ""}}
    piece = {"index": 0, "function": {"arguments": '{"a":'}}

    assert parse_chunk(delta(content=" hi")).text == " hi"
    assert parse_chunk(delta(reasoning_content="hm")).reasoning == "hm"
    assert parse_chunk(delta(reasoning="hm")).has_token
    assert (parse_chunk(delta(tool_calls=[call])).tool_calls, parse_chunk(delta(tool_calls=[piece])).tool_calls) == (1, 0)
    assert parse_chunk(delta(tool_calls=[piece])).has_token


@pytest.mark.parametrize(
    "data",
    [delta(role="assistant", content=""), delta(role="assistant"), delta(finish="stop"), chunk(choices=[]), b"[DONE]"],
)
def test_role_empty_finish_usage_and_done_are_no_tokens(data: bytes) -> None:
    assert not parse_chunk(data).has_token


def test_usage_is_read_with_and_without_choices() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    wanted = Usage(prompt_tokens=9, completion_tokens=4, cached_tokens=8, reasoning_tokens=3)

    assert parse_chunk(chunk(choices=[], usage=usage)).usage == wanted
    assert parse_chunk(chunk(choices=[{"index": 0, "delta": {}}], usage=usage)).usage == wanted
    assert parse_chunk(delta(content="a")).usage is None


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "plain"}', "plain"),
        (b'{"error": {"message": "odd"}, "choices": 5}', "odd"),
        (b'{"object": "error", "message": "flat", "code": 400}', "flat"),
    ],
)
def test_error_objects_in_any_shape_are_errors(data: bytes, error: str) -> None:
    assert parse_chunk(data).error == error


@given(
    st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["choices", "usage", "error", "delta", "message", "index", "tool_calls", "x"]),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
@settings(deadline=None, max_examples=200)
def test_junk_never_raises(data: bytes) -> None:
    facts = parse_chunk(data)

    assert facts.is_parsed or not facts.has_token


def test_a_whole_answer_gives_its_first_choice() -> None:
    body = {
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "one"}, "finish_reason": "stop"},
            {"index": 1, "message": {"role": "assistant", "content": "two"}, "finish_reason": "length"},
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }

    facts = parse_response(json.dumps(body).encode())

    assert (facts.text, facts.finish_reason) == ("one", "stop")


def test_a_stream_folds_into_the_first_choice_with_the_last_usage() -> None:
    answer = StreamFacts()

    for data in (
        delta(role="assistant", content=""),
        chunk(choices=[{"index": 0, "delta": {"content": "a"}}], usage={"completion_tokens": 1}),
        delta(index=1, content="other"),
        chunk(choices=[{"index": 0, "delta": {"content": "b"}}], usage={"completion_tokens": 2}),
        delta(finish="stop"),
        b"[DONE]",
    ):
        answer.add(parse_chunk(data))

    assert ("".join(answer.text), answer.finish_reason, answer.is_done) == ("ab", "stop", True)
    assert answer.usage == Usage(completion_tokens=2)


def test_token_ids_of_completions_and_of_the_prompt_are_read() -> None:
    data = chunk(choices=[{"index": 0, "text": " a", "token_ids": [5], "prompt_token_ids": [1, 2]}])

    facts = parse_chunk(data)

    assert (facts.token_ids, facts.prompt_token_ids) == ([5], [1, 2])


def test_requests_give_what_a_trace_needs_and_bad_ones_name_the_place() -> None:
    body = parse_request(b'{"model": "m", "prompt": [1, 2], "max_tokens": 5, "user": "u", "unknown": {}}')

    assert (body.model, token_prompt(body.prompt), body.output_limit, body.user) == ("m", [1, 2], 5, "u")
    with pytest.raises(msgspec.ValidationError, match=r"\$\.max_tokens"):
        parse_request(b'{"max_tokens": "many"}')


def test_prompts_are_text_or_ids_or_neither() -> None:
    assert (token_prompt([[1, 2]]), token_prompt(["a"]), token_prompt([True]), token_prompt([])) == (
        [1, 2],
        None,
        None,
        None,
    )
    assert (text_prompt("a"), text_prompt(["a"]), text_prompt(["a", "b"]), text_prompt([1])) == ("a", "a", None, None)


EVENTS = [
    delta(content="hi"),
    delta(role="assistant", content=""),
    delta(finish="stop"),
    chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2}),
    chunk(choices=[{"index": 0, "text": "a", "token_ids": [7]}], usage={"completion_tokens": 1}),
    chunk(error={"message": "no"}),
    b"[DONE]",
    b" [DONE]",
    b"",
    b"{",
    b"{}{}",
    b'{"choices":\n[]}',
]


@given(st.lists(st.sampled_from(EVENTS), max_size=8))
def test_many_payloads_at_once_are_what_each_is(payloads: list[bytes]) -> None:
    assert parse_chunks(payloads) == [parse_chunk(one) for one in payloads]


@given(st.lists(st.tuples(*[st.sampled_from([None, 0, 3, 5])] * 5), min_size=1, max_size=5))
def test_counts_of_usage_never_fall_nor_get_lost(counts: list[tuple[int | None, ...]]) -> None:
    facts = StreamFacts()
    for one in counts:
        facts.add(ChunkFacts(usage=Usage(**dict(zip(Usage.__struct_fields__, one, strict=True)))))

    for place, name in enumerate(Usage.__struct_fields__):
        assert getattr(facts.usage, name) == max((one[place] for one in counts if one[place] is not None), default=None)
