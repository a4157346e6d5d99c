"""What is known by its bytes is what the parser would have said."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.wire.alike import Alike
from tracer.wire.facts import ChunkFacts
from tracer.wire.openai import parse_chunk, parse_chunks

SHAPES = {
    "completion": b'{"id":"c-1","choices":[{"index":0,"text":%b,"logprobs":null,"finish_reason":null}]}',
    "chat": b'{"choices": [{"index": 0, "delta": {"content": %b}, "finish_reason": null}], "usage": null}',
    "twice": b'{"model":%b,"choices":[{"text":"earlier","text":%b}]}',
    "other choice": b'{"choices":[{"index":1,"text":%b}]}',
    "counted": b'{"choices":[{"text":%b}],"usage":{"completion_tokens":1}}',
    "ids": b'{"choices":[{"text":%b,"token_ids":[1]}]}',
    "reasoning": b'{"choices":[{"delta":{"reasoning":%b}}]}',
}
TEXTS = st.one_of(
    st.sampled_from(["", " word", "a", '"', "\\", "\n", '","text":"', "é世", "\x7f", "null", "[DONE]"]), st.text(max_size=8)
)
ODD = st.sampled_from(
    [b"[DONE]", b"", b"{}", b"nonsense", b'{"error":"no"}', b'{"choices":[{"text":"\xff"}]}', b'{"a":1}\n{"b":2}']
)


def shaped(shape: bytes, text: str, is_ascii: bool) -> bytes:
    quoted = json.dumps(text, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    return shape.replace(b"%b", quoted)


PAYLOADS = st.sampled_from(sorted(SHAPES)).flatmap(
    lambda name: st.lists(st.one_of(st.builds(shaped, st.just(SHAPES[name]), TEXTS, st.booleans()), ODD), min_size=1, max_size=40)
)


@given(payloads=PAYLOADS, learnt=st.integers(1, 12))
@settings(deadline=None, max_examples=200)
def test_a_known_text_is_all_that_the_parser_finds(payloads: list[bytes], learnt: int) -> None:
    alike = Alike(parse_chunk)
    alike.learn(payloads[:learnt], parse_chunks(payloads[:learnt]))

    texts = alike.texts(payloads)

    assert len(texts) == len(payloads)
    for payload, text in zip(payloads, texts, strict=True):
        if text:
            assert parse_chunk(payload) == ChunkFacts(text=text.decode())


@pytest.mark.parametrize("name", ["completion", "chat"])
def test_usual_events_are_known_after_one(name: str) -> None:
    payloads = [shaped(SHAPES[name], text, False) for text in (" a", " b", " c", 'say "d"', "é")]
    alike = Alike(parse_chunk)
    alike.learn(payloads[:1], parse_chunks(payloads[:1]))

    assert alike.knows
    assert alike.texts(payloads) == [b" a", b" b", b" c", b"", "é".encode()]


@pytest.mark.parametrize("name", ["other choice", "counted", "ids", "reasoning"])
def test_events_that_say_more_are_left_to_the_parser(name: str) -> None:
    payloads = [shaped(SHAPES[name], " a", False)]
    alike = Alike(parse_chunk)
    alike.learn(payloads, parse_chunks(payloads))

    assert not alike.knows
    assert alike.texts(payloads) == [b""]


def test_a_text_that_stands_there_twice_is_told_apart() -> None:
    payload = b'{"model":"x","choices":[{"text":"x"}]}'
    alike = Alike(parse_chunk)
    alike.learn([payload], parse_chunks([payload]))

    assert alike.texts(
        [payload, payload.replace(b'"text":"x"', b'"text":"y"'), payload.replace(b'"model":"x"', b'"model":"z"')]
    ) == [
        b"x",
        b"y",
        b"",
    ]
