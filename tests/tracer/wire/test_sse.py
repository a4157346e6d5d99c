"""Server-sent events: the same bytes in any cuts give the same events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.wire.sse import SseEvent, SseParser

LINES = st.sampled_from(
    [
        b"data: {}", b"data:x", b"data", b"data:  two", b": ping", b":", b"event: error", b"event:a", b"id: 7",
        b"retry: 10", b"nonsense", b"", b"", "data: \u00e9\u4e16".encode(), b"data: [DONE]", b"datax: 1",
    ]
)  # fmt: skip
STREAMS = st.builds(
    lambda bom, lines: bom + b"".join(line + end for line, end in lines),
    st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb"]),
    st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=20),
)


def events(chunks: list[bytes], limit: int | None = None) -> list[SseEvent]:
    parser = SseParser(max_event_bytes=limit)
    found = [event for chunk in chunks for event in parser.feed(chunk)]
    return found + parser.finish()


def single_bytes(stream: bytes) -> list[bytes]:
    return [stream[i : i + 1] for i in range(len(stream))]


@given(stream=STREAMS, cuts=st.lists(st.integers(0, 300), max_size=12))
@settings(deadline=None, max_examples=200)
def test_cuts_do_not_matter(stream: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in zip(edges, edges[1:], strict=False)]

    whole = events([stream])

    assert events(single_bytes(stream)) == whole
    assert events(pieces) == whole


@given(
    stream=st.one_of(
        STREAMS, st.lists(st.sampled_from([b"data: {}\n\n", b"data: \n\n", b"data: a\ndata: b\n\n", b": p\n\n"])).map(b"".join)
    ),
    cuts=st.lists(st.integers(0, 300), max_size=12),
)
@settings(deadline=None, max_examples=200)
def test_data_alone_is_that_of_the_events(stream: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    parser = SseParser()

    found = [data for piece in pieces for data in parser.feed_data(piece)]

    assert found + [event.data for event in parser.finish()] == [event.data for event in events([stream])]


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\n", [SseEvent(b"a", "message")]),
        (b"data: a\r\n\r\n", [SseEvent(b"a", "message")]),
        (b"data: a\r\rdata: b\r\r", [SseEvent(b"a", "message"), SseEvent(b"b", "message")]),
        (b"data: a\ndata: b\n\n", [SseEvent(b"a\nb", "message")]),
        (b": ping\n\n: ping\n\ndata: a\n\n", [SseEvent(b"a", "message")]),
        (b"\xef\xbb\xbfdata: a\n\n", [SseEvent(b"a", "message")]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [SseEvent(b"a", "error"), SseEvent(b"b", "message")]),
        (b"data: a\n\ndata: b", [SseEvent(b"a", "message"), SseEvent(b"b", "message")]),
        (b"data:   a\n\n", [SseEvent(b"  a", "message")]),
        (b"data\n\n", [SseEvent(b"", "message")]),
        (b"event: lonely\n\n", []),
        (b"", []),
    ],
)
def test_streams_follow_the_grammar(stream: bytes, expected: list[SseEvent]) -> None:
    assert events([stream]) == expected
    assert events(single_bytes(stream)) == expected


def test_an_event_is_out_as_soon_as_its_blank_line_is_in() -> None:
    parser = SseParser()

    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\n\r") == [SseEvent(b"a", "message")]
    assert parser.feed(b"\ndata: b\n\n") == [SseEvent(b"b", "message")]


@given(cuts=st.lists(st.integers(0, 600), max_size=8))
@settings(deadline=None, max_examples=50)
def test_an_event_over_the_limit_is_dropped_counted_and_the_next_one_is_whole(cuts: list[int]) -> None:
    stream = b"data: " + b"x" * 500 + b"\ndata: more\n\ndata: small\n\n"
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    parser = SseParser(max_event_bytes=100)

    found = [e for a, b in zip(edges, edges[1:], strict=False) for e in parser.feed(stream[a:b])] + parser.finish()

    assert found == [SseEvent(b"small", "message")]
    assert parser.events_dropped == 1
