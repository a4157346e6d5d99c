"""A recording of any length fits into the same memory, and the worker's figures are right."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tracer.record import prompts, worker
from tracer.record.compactor import compact
from tracer.record.exchange import ExchangeFacts
from tracer.record.figures import quantile
from tracer.record.messages import Answered, Ended, Finished, Piece, Started, WorkerConfig
from tracer.record.privacy import create_key
from tracer.record.worker import Worker, build
from tracer.tracefile import iter_requests
from tracer.wire import CHAT, COMPLETIONS
from tracer.wire.facts import Usage

REQUESTS = 100_000  # a message when the body is in, and one at the end


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    create_key(tmp_path / "t.key")
    folder = tmp_path / "t.segments"
    folder.mkdir()
    return WorkerConfig(
        folder=str(folder),
        key_path=str(tmp_path / "t.key"),
        tokenizer="cl100k",
        chunk_times=False,
        epoch_ns=0,
        producer="test",
    )


def started(n: int, endpoint: str, **asked: object) -> Started:
    return Started(flow=n, arrival_ns=n, endpoint=endpoint, body=json.dumps({"model": "m", **asked}).encode())


def ended(n: int, endpoint: str, **facts: object) -> Ended:
    return Ended(flow=n, arrival_ns=n, endpoint=endpoint, facts=ExchangeFacts(http_status=200, end_ns=10, **facts))


def entries(thing: object, seen: set[int]) -> int:
    """How many things all containers below hold, through objects of ours."""
    if id(thing) in seen or isinstance(thing, str | bytes | int | float):
        return 0
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        return len(thing) + sum(entries(one, seen) for one in thing.values())
    if isinstance(thing, list | tuple | set):
        return len(thing) + sum(entries(one, seen) for one in thing)
    if not type(thing).__module__.startswith("tracer.record"):
        return 0
    names = getattr(thing, "__struct_fields__", None) or vars(thing)
    return sum(entries(getattr(thing, name), seen) for name in names)


def test_no_table_grows_with_the_length_of_a_recording(config: WorkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bounds so small that each is met early: all prompts differ, and one end in ten is never heard of."""
    monkeypatch.setattr(worker, "MAX_UNDER_WAY", 1000)
    monkeypatch.setattr(prompts, "MAX_CACHED_BYTES", 1 << 16)
    one = build(config, 0)
    one._builder._tails._max = 1000
    sizes = []

    for n in range(REQUESTS):
        if n % 4 == 0:
            endpoint, asked = CHAT, {"messages": [{"role": "user", "content": f"{n}"}], "user": f"u{n}"}
        else:
            endpoint, asked = COMPLETIONS, {"prompt": [n, *range(20)]}
        one.take(started(n, endpoint, **asked))
        if n % 10:
            one.take(ended(n, endpoint, ttft_ns=1000 * n))
        if n % 100 == 0:
            one.tick(n * 10_000_000)
        if n % (REQUESTS // 4) == REQUESTS // 4 - 1:
            one.tick((n + 1) * 10_000_000)
            sizes.append(entries(one, set()))

    assert sizes[0] > 3000  # the tables are in it
    assert max(sizes) < 1.1 * sizes[0]
    assert one.counts()["prompts_forgotten"] == REQUESTS // 10 - len(one._under_way)
    assert one.report().recorded == REQUESTS - REQUESTS // 10
    one.close()


def test_an_end_that_comes_after_its_prompt_was_forgotten_is_still_a_row(
    config: WorkerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "MAX_UNDER_WAY", 1)
    one = build(config, 0)
    for n in (1, 2):
        one.take(started(n, COMPLETIONS, prompt="word " * 40))
    for n in (1, 2):
        one.take(ended(n, COMPLETIONS))
    one.close()

    result = compact(config.folder)

    assert (result.rows, result.losses) == (2, {"prompts_forgotten": 1})


STREAM = [
    b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": " b"}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}\n\n',
]


@pytest.mark.parametrize("lost", [None, "started", "answered", 0, 1])
def test_an_answer_of_which_pieces_were_shed_is_a_row_without_times_of_tokens(config: WorkerConfig, lost: object) -> None:
    """Shed where the worker lags, or gone with a worker that died."""
    one = build(config, 0)
    begun = started(1, CHAT, messages=[{"role": "user", "content": "hi"}], stream=True)
    if lost != "started":
        one.take(begun)
    if lost != "answered":
        one.take(Answered(flow=1, status=200, content_type="text/event-stream", encoding=""))
    for number, data in enumerate(STREAM):
        if lost != number:
            one.take(Piece(1, 10_000_001 + 1_000_000 * number, data))
    end = {"at_ns": 20_000_001, "broken": None, "status": 200, "bytes_out": len(b"".join(STREAM)), "bytes_in": 50}
    one.take(Finished(flow=1, arrival_ns=1, endpoint=CHAT, upstream="u", dispatch_ns=5, **end))
    one.close()

    (row,) = iter_requests(compact(config.folder).path)

    assert (row["dispatch_ns"], row["end_ns"], row["http_status"], row["bytes_in"]) == (5, 20_000_000, 200, 50)
    assert row["bytes_out"] == end["bytes_out"]
    assert (row["ttft_ns"], row["output_tokens"], row["finish_reason"]) == EXPECTED[lost]
    assert one.counts().get("answers_incomplete", 0) == (lost is not None)


EXPECTED = {
    None: (10_000_000, 2, "stop"),
    "started": (None, None, None),
    "answered": (None, None, None),
    0: (None, 2, "stop"),
    1: (None, 2, "stop"),
}


def talk(one: Worker, n: int, prompt: list[int], answer: list[int], ttft_ms: int) -> None:
    usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(answer))
    one.take(started(n, COMPLETIONS, prompt=prompt))
    one.take(ended(n, COMPLETIONS, ttft_ns=ttft_ms * 1_000_000, token_ids=answer, usage=usage))


def test_figures_tell_reuse_of_prompts_and_answers_and_recent_quantiles(config: WorkerConfig) -> None:
    one = build(config, 0)
    one.tick(0)
    first, answer = list(range(64)), list(range(100, 132))
    talk(one, 1, first, answer, ttft_ms=100)  # 4 blocks, all new
    talk(one, 2, [*first, *answer, *range(16)], answer, ttft_ms=100)  # 7 blocks: 4 of the prompt, 2 of the answer seen
    talk(one, 3, list(range(1000, 1032)), answer, ttft_ms=3000)  # 2 new ones

    figures = one.report().figures
    one.tick(70_000_000_000)
    one.tick(140_000_000_000)
    later = one.report().figures

    assert (figures.prompt_blocks, figures.reused_blocks, figures.forgets) == (13, 6, False)
    assert quantile(figures.ttft_us, 0.5) == pytest.approx(100_000, rel=0.05)
    assert quantile(figures.ttft_us, 0.99) == pytest.approx(3_000_000, rel=0.05)
    assert quantile(figures.input_tokens, 0.5) == pytest.approx(64, rel=0.05)
    assert quantile(figures.output_tokens, 0.5) == pytest.approx(32, rel=0.05)
    assert (later.prompt_blocks, later.ttft_us, later.input_tokens) == (13, {}, {})
    one.close()
