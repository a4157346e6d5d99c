"""The hooks forward whatever happens, and upstream URLs mean what users expect."""

from types import SimpleNamespace
from typing import Any

import pytest
from mitmproxy.http import Headers

from tracer.record.addon import RecorderAddon
from tracer.record.messages import Answered, Finished, Piece, Started
from tracer.record.routes import parse_routes


class BrokenSink:
    def started(self, message: Started) -> None:
        raise RuntimeError("ours")

    def answered(self, message: Answered) -> None:
        raise RuntimeError("ours")

    def received(self, message: Piece) -> None:
        raise RuntimeError("ours")

    def finished(self, message: Finished) -> None:
        raise RuntimeError("ours")


def flow(path: str = "/v1/chat/completions", method: str = "POST") -> Any:
    request = SimpleNamespace(method=method, path=path, headers=Headers(), host_header="h", raw_content=b"{}")
    response = SimpleNamespace(status_code=200, headers=Headers(content_type="text/event-stream"), stream=False)
    return SimpleNamespace(id="f", request=request, response=response, error=None)


def test_a_recorder_that_fails_everywhere_still_forwards_every_byte() -> None:
    addon = RecorderAddon(BrokenSink(), lambda: 0, parse_routes(["http://h"]))
    one = flow()
    addon.requestheaders(one)
    addon.request(one)
    addon.responseheaders(one)

    forwarded = [one.response.stream(chunk) for chunk in (b"data: x\n\n", b"\xff", b"")]
    addon.response(one)

    assert forwarded == [b"data: x\n\n", b"\xff", b""]
    assert addon.counts["hook_failures"] == 5  # request, head, two pieces, end
    assert addon.under_way == set()


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("GET", "/v1/chat/completions"), ("POST", "/x")])
def test_other_requests_are_streamed_and_counted(method: str, path: str) -> None:
    addon = RecorderAddon(BrokenSink(), lambda: 0, parse_routes(["http://h"]))
    one = flow(path, method)

    addon.requestheaders(one)
    addon.request(one)
    addon.responseheaders(one)
    addon.response(one)

    assert one.response.stream is True
    assert addon.counts == {"passed_through": 1}


def test_a_path_of_the_upstream_goes_before_the_clients() -> None:
    addon = RecorderAddon(BrokenSink(), lambda: 0, parse_routes(["http://h/llm/v1/"]))
    one = flow("/v1/chat/completions?x=1")

    addon.requestheaders(one)

    assert one.request.path == "/llm/v1/chat/completions?x=1"
    assert addon.seen == 1
