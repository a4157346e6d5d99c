"""Usage is asked for where a client did not, and only the event that this adds is taken out again."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.wire import CHAT, MESSAGES
from tracer.wire.usage import MAX_HELD_BYTES, UsageStripper, with_usage

USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}).encode()
WORD = json.dumps({"choices": [{"index": 0, "delta": {"content": "a\n\nb"}}], "usage": None}).encode()


def strip(pieces: list[bytes]) -> bytes:
    stripper = UsageStripper()
    return b"".join([*map(stripper.feed, pieces), stripper.finish()])


def cut(stream: bytes, at: list[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(stream) + 1) for place in at), len(stream)]
    return [stream[a:b] for a, b in zip(places, places[1:], strict=False)]


def test_usage_is_asked_for_only_where_it_was_not() -> None:
    asked = with_usage(CHAT, b'{"stream": true, "stream_options": {"x": 1}, "messages": []}')

    assert asked is not None
    assert json.loads(asked) == {"stream": True, "stream_options": {"x": 1, "include_usage": True}, "messages": []}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, b'{"stream": false}'),
        (CHAT, b'{"messages": []}'),
        (CHAT, b'{"stream": true, "stream_options": {"include_usage": true}}'),
        (CHAT, b'{"stream": true, "stream_options": 5}'),
        (CHAT, b'[{"stream": true}]'),
        (CHAT, b'{"stream": true'),
        (MESSAGES, b'{"stream": true}'),
    ],
)
def test_other_requests_stay_as_they_are(endpoint: str, body: bytes) -> None:
    assert with_usage(endpoint, body) is None


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.sampled_from([b"data: " + WORD, b": ping", b"event: x\ndata: y", b"data: [DONE]", b"id: 7"]), max_size=6),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 10_000), max_size=8),
)
def test_only_the_usage_event_goes_however_the_stream_is_cut(events: list[bytes], newline: bytes, at: list[int]) -> None:
    events = [event.replace(b"\n", newline) for event in events]
    ends = newline * 2
    wanted = b"".join(event + ends for event in events)
    stream = b"".join(event + ends for event in [*events[:2], b"data: " + USAGE, *events[2:]])

    assert strip(cut(stream, at)) == wanted


def test_a_lone_crlf_ends_a_line_not_an_event() -> None:
    stream = b"event: x\r\ndata: " + USAGE + b"\r\n\r\ndata: " + USAGE + b"\r\n\r\n"

    assert strip([stream]) == b"event: x\r\ndata: " + USAGE + b"\r\n\r\n"  # only one bare data line is ours


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"data:", b" ", b"x", b"{}", USAGE[:20]]), max_size=30),
    st.lists(st.integers(0, 500)),
)
def test_without_a_usage_event_no_byte_changes(parts: list[bytes], at: list[int]) -> None:
    stream = b"".join(parts)

    assert strip(cut(stream, at)) == stream


def test_an_event_without_end_is_not_held_for_ever() -> None:
    stripper = UsageStripper()

    passed = [stripper.feed(b"x" * 1000) for _ in range(MAX_HELD_BYTES // 1000 + 2)]

    assert sum(map(len, passed)) == 1000 * len(passed)
    assert stripper.finish() == b""
