"""Several metrics pages are read as one; one that falls silent or starts anew takes nothing away from the sums."""

import asyncio
from typing import Any

import httpx
import pytest

from replay.edge.engines import joint, read_metrics
from replay.edge.scrape import Scraper

A, B = "http://a/metrics", "http://b/metrics"


def engine(running: int, preemptions: int, kv: float, blocks: int = 100) -> str:
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:kv_cache_usage_perc{{engine="0"}} {kv}\n'
        f'vllm:num_preemptions_total{{engine="0"}} {preemptions}\n'
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1\n'
    )


def readings(pages: dict[str, list[str | None]]) -> list[Any]:
    """What a scraper reads, one reading after the other; None: that server does not answer."""
    left = {url: list(texts) for url, texts in pages.items()}

    def answer(request: httpx.Request) -> httpx.Response:
        text = left[str(request.url)].pop(0)
        if text is None:
            raise httpx.ConnectError("down")
        return httpx.Response(200, text=text)

    async def read() -> list[Any]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            scraper = Scraper(client, list(pages))
            return [await scraper.read() for _ in range(len(next(iter(pages.values()))))]

    return asyncio.run(read())


def test_counters_and_queues_are_added_up_and_gauges_kept_by_url() -> None:
    _, last = readings({A: [engine(1, 10, 0.2), engine(3, 12, 0.4)], B: [engine(2, 50, 0.9), engine(5, 51, 1.0, blocks=300)]})

    assert last.values == {"running": 8, "preemptions": 3, "kv_usage": pytest.approx(0.85)}  # the larger cache weighs more
    assert last.servers == {A: {"running": 3, "kv_usage": 0.4}, B: {"running": 5, "kv_usage": 1.0}}
    assert last.missing == []


def test_a_server_that_restarts_loses_no_count() -> None:
    pages = {A: [engine(1, 10, 0.2), engine(1, 14, 0.2), None, engine(1, 3, 0.1)], B: [engine(1, 0, 0.2)] * 4}

    seen = readings(pages)

    assert [one.values["preemptions"] for one in seen] == [0, 4, 4, 7]
    assert [one.missing for one in seen] == [[], [], [A], []]
    assert [one.values["running"] for one in seen] == [2, 2, 1, 2]


def test_nothing_is_made_up_when_all_are_silent() -> None:
    _, last = readings({A: [engine(1, 10, 0.2), None], B: [engine(1, 10, 0.2), "no such page"]})

    assert (last.values, last.servers, last.missing) == ({}, {}, [A, B])


def test_one_page_alone_has_no_figures_by_url() -> None:
    (only,) = readings({A: [engine(1, 10, 0.2)]})

    assert only.servers == {} and only.values["running"] == 1


def test_what_a_router_tells_again_is_not_added_to_its_engines() -> None:
    front = read_metrics(
        "dynamo_frontend_inflight_requests 9\ndynamo_frontend_queued_requests 4\ndynamo_frontend_output_tokens_total 70\n"
    )
    back = read_metrics(engine(5, 0, 0.5))

    found = joint([front, back, back])

    assert found["running"] == 10
    assert found["generation_tokens"] == 70  # only the router tells it
    assert found["waiting"] == 4


def test_sglang_and_vllm_side_by_side() -> None:
    found = joint([read_metrics(engine(5, 1, 0.5)), read_metrics("sglang:num_running_reqs 2\nsglang:token_usage 0.1\n")])

    assert found == {"running": 7, "preemptions": 1, "kv_usage": pytest.approx(0.3)}  # one does not tell its size: the plain mean


def paced(answers: dict[str, float], patience_s: float, readings: int) -> tuple[list[Any], dict[str, int]]:
    """(readings, how often each page was asked) of servers that take so many seconds to answer."""
    asked = dict.fromkeys(answers, 0)

    async def answer(request: httpx.Request) -> httpx.Response:
        url = str(request.url)
        asked[url] += 1
        count = asked[url]
        await asyncio.sleep(answers[url])
        return httpx.Response(200, text=engine(count, 10 * count, 0.5))

    async def read() -> list[Any]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            scraper = Scraper(client, list(answers))
            try:
                return [await scraper.read(patience_s) for _ in range(readings)] + [await scraper.read_afresh()]
            finally:
                scraper.close()

    return asyncio.run(read()), asked


def test_a_slow_page_is_skipped_and_said_and_never_asked_twice_at_a_time() -> None:
    *seen, last = paced({A: 0.0, B: 0.12}, patience_s=0.05, readings=3)[0]

    assert [one.late for one in seen] == [[B], [B], []]
    assert [one.values["running"] for one in seen] == [1, 2, 3 + 1]  # what A says, and B once it has answered
    assert [one.missing for one in seen] == [[], [], []]
    assert last.late == [] and last.values["running"] == 5 + 3


def test_a_slow_page_alone_leaves_readings_without_figures() -> None:
    seen, asked = paced({A: 0.12}, patience_s=0.05, readings=3)

    assert [bool(one.values) for one in seen] == [False, False, True, True]
    assert asked[A] == 3  # one for three readings, then two of which the last is fresh


def test_a_large_page_is_read_as_a_small_one() -> None:
    filler = "".join(f'vllm:e2e_request_latency_seconds_bucket{{le="{i}"}} {i}\n' for i in range(4000))
    pages = {A: [engine(1, 10, 0.2) + filler + engine(2, 20, 0.4), filler + "vllm:num_requests_running 7"]}

    first, cut_off = readings(pages)

    assert first.values == {"running": 3, "preemptions": 0, "kv_usage": pytest.approx(0.3)}
    assert cut_off.missing == [A]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('vllm:num_requests_running{model_name="a } b # c"} 3', 3),
        ("vllm:num_requests_running 4 1700000000000", 4),
        ('vllm:num_requests_running{a="b"}   5   1700000000000', 5),
        ('vllm:num_requests_running{a="b"} 6 # {trace_id="x"} 1.5', 6),
    ],
)
def test_values_are_found_among_labels_time_stamps_and_exemplars(line: str, value: float) -> None:
    assert read_metrics(line + "\n").values == {"running": value}
