"""Dialogues: what happens on the wire, at which millisecond, and which facts come out."""

import gzip
import json
import zlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.record import exchange
from tracer.record.exchange import Exchange, ExchangeFacts

MS = 1_000_000
SSE = "text/event-stream; charset=utf-8"


def event(**body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def content(text: str, **more: object) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more)


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
STOP = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
USAGE = event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2})
DONE = b"data: [DONE]\n\n"


def stream(*steps: tuple[int, bytes], broke: str | None = None, end: int = 100, encoding: str = "") -> ExchangeFacts:
    """A request at 1000 ms, sent at +1; chunks at the given milliseconds after arrival."""
    played = Exchange(1000 * MS)
    played.dispatched(1001 * MS, 50)
    played.answered(200, SSE, encoding)
    for at, data in steps:
        played.received((1000 + at) * MS, data)
    now_ns = (1000 + end) * MS
    return played.broke(now_ns, broke) if broke else played.ended(now_ns)


def test_a_whole_stream() -> None:
    facts = stream((10, ROLE), (30, content("a")), (50, content("b")), (51, STOP), (52, USAGE), (53, DONE), end=54)

    assert (facts.dispatch_ns, facts.ttft_ns, facts.end_ns) == (1 * MS, 30 * MS, 54 * MS)
    assert (facts.text, facts.finish_reason, facts.error_kind) == ("ab", "stop", None)
    assert list(array("i", facts.chunk_delta_us)) == [30_000, 20_000]
    assert facts.usage is not None and facts.usage.completion_tokens == 2
    assert facts.chunk_tokens is None
    assert facts.bytes_in == 50


def test_reasoning_is_the_first_token() -> None:
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "hm"}}])

    facts = stream((10, ROLE), (20, thought), (40, content("a")), (41, STOP), (42, DONE))

    assert (facts.ttft_ns, facts.reasoning, facts.text) == (20 * MS, "hm", "a")


def test_running_usage_counts_the_tokens_of_each_chunk() -> None:
    facts = stream(
        (10, content("a", usage={"completion_tokens": 1})),
        (20, content("bcd", usage={"completion_tokens": 4})),
        (21, STOP),
    )

    assert facts.chunk_tokens is not None
    assert list(array("i", facts.chunk_tokens)) == [1, 3]


def test_token_ids_count_only_if_every_chunk_has_them() -> None:
    with_ids = event(choices=[{"index": 0, "text": "ab", "token_ids": [5, 6]}])
    without = event(choices=[{"index": 0, "text": "c"}])

    assert stream((1, with_ids), (2, with_ids), (3, STOP)).token_ids == [5, 6, 5, 6]
    assert stream((1, with_ids), (2, without), (3, STOP)).token_ids is None


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([(5, ROLE)], "no_tokens"),
        ([(5, content("a"))], "connection_lost"),
        ([(5, content("a")), (6, event(error={"message": "secret words"}))], "stream_error"),
        ([(5, content("a")), (6, STOP)], None),
        ([(5, STOP)], None),
    ],
)
def test_how_a_stream_ends_says_what_went_wrong(steps: list[tuple[int, bytes]], kind: str | None) -> None:
    assert stream(*steps).error_kind == kind


def test_a_client_that_hangs_up_keeps_what_it_got() -> None:
    facts = stream((10, content("a")), broke="client_abort", end=20)

    assert (facts.error_kind, facts.client_abort_ns, facts.end_ns) == ("client_abort", 20 * MS, 20 * MS)
    assert (facts.ttft_ns, facts.text, facts.http_status) == (10 * MS, "a", 200)


def test_an_upstream_that_breaks_before_its_head() -> None:
    played = Exchange(0)
    played.dispatched(MS, 10)
    played.answered(502)

    facts = played.broke(5 * MS, "connect")

    assert (facts.error_kind, facts.http_status, facts.ttft_ns, facts.end_ns) == ("connect", 502, None, 5 * MS)


def answer(body: bytes, status: int = 200) -> ExchangeFacts:
    played = Exchange(0)
    played.dispatched(MS, 10)
    played.answered(status, "application/json")
    for at in range(0, len(body), 7):
        played.received(2 * MS, body[at : at + 7])
    return played.ended(3 * MS)


def test_a_whole_body_has_usage_and_text_but_no_first_token_time() -> None:
    body = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 3}}

    facts = answer(json.dumps(body).encode())

    assert (facts.text, facts.finish_reason, facts.ttft_ns, facts.error_kind) == ("hi", "stop", None, None)
    assert facts.usage is not None and facts.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b'{"error": {"message": "too long"}}', 400, "http_status"),
        (b"<html>", 503, "http_status"),
        (b"<html>", 200, "bad_response"),
        (b'{"error": "x"}', 200, "stream_error"),
        (b'{"choices": []}', 200, "no_tokens"),
    ],
)
def test_bodies_that_are_no_answer(body: bytes, status: int, kind: str) -> None:
    facts = answer(body, status)

    assert (facts.error_kind, facts.http_status) == (kind, status)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_encoded_streams_are_read_through(encoding: str) -> None:
    raw = ROLE + content("a") + content("b") + STOP + DONE
    packed = {"gzip": gzip.compress, "deflate": zlib.compress, "br": _brotli, "zstd": _zstd}[encoding](raw)

    facts = stream(*((10 + at, packed[at : at + 9]) for at in range(0, len(packed), 9)), encoding=encoding)

    assert (facts.text, facts.finish_reason, facts.bytes_out) == ("ab", "stop", len(packed))


def _brotli(raw: bytes) -> bytes:
    return pytest.importorskip("brotli").compress(raw)


def _zstd(raw: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(raw)


def test_an_unknown_or_broken_encoding_costs_only_our_copy() -> None:
    assert stream((1, b"xx"), encoding="rot13").is_truncated
    assert stream((1, b"no gzip"), (2, b"more"), encoding="gzip").is_truncated


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_ANSWER_BYTES", 100)
    monkeypatch.setattr(exchange, "MAX_CHUNKS", 10)

    facts = stream(*((at, content("x" * 20)) for at in range(50)), (51, STOP), (52, USAGE))

    assert facts.is_truncated
    assert len(facts.text) <= 100
    assert len(array("i", facts.chunk_delta_us)) == 10
    assert (facts.finish_reason, facts.error_kind) == ("stop", None)
    assert facts.usage is not None


@given(cuts=st.lists(st.integers(0, 600), max_size=10))
@settings(deadline=None, max_examples=60)
def test_cuts_of_the_bytes_do_not_change_the_answer(cuts: list[int]) -> None:
    raw = ROLE + content("é世") + content("b") + STOP + USAGE + DONE
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})

    facts = stream(*((10, raw[a:b]) for a, b in zip(edges, edges[1:], strict=False)))

    assert (facts.text, facts.finish_reason, facts.bytes_out) == ("é世b", "stop", len(raw))
    assert len(array("i", facts.chunk_delta_us)) == 2
