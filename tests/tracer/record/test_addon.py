"""The hooks forward whatever happens, and upstream URLs mean what users expect."""

from types import SimpleNamespace
from typing import Any

import pytest

from tracer.errors import TraceError
from tracer.record.addon import RecorderAddon, parse_upstream
from tracer.record.messages import Ended, Started


class BrokenSink:
    def started(self, message: Started) -> None:
        raise RuntimeError("ours")

    def ended(self, message: Ended) -> None:
        raise RuntimeError("ours")


def flow(path: str = "/v1/chat/completions", method: str = "POST") -> Any:
    request = SimpleNamespace(method=method, path=path, headers={}, raw_content=b"{}")
    response = SimpleNamespace(status_code=200, headers={"content-type": "text/event-stream"}, stream=False)
    return SimpleNamespace(id="f", request=request, response=response, error=None)


def test_a_recorder_that_fails_everywhere_still_forwards_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    addon = RecorderAddon(BrokenSink(), now_ns=lambda: 0)
    one = flow()
    addon.requestheaders(one)
    addon.request(one)
    addon.responseheaders(one)
    monkeypatch.setattr("tracer.record.exchange.Exchange.received", lambda *_: 1 / 0)

    forwarded = [one.response.stream(chunk) for chunk in (b"data: x\n\n", b"\xff", b"")]
    addon.response(one)

    assert forwarded == [b"data: x\n\n", b"\xff", b""]
    assert addon.counts["hook_failures"] == 4
    assert addon.under_way == set()


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("GET", "/v1/chat/completions"), ("POST", "/x")])
def test_other_requests_are_streamed_and_counted(method: str, path: str) -> None:
    addon = RecorderAddon(BrokenSink(), now_ns=lambda: 0)
    one = flow(path, method)

    addon.requestheaders(one)
    addon.request(one)
    addon.responseheaders(one)
    addon.response(one)

    assert one.response.stream is True
    assert addon.counts == {"passed_through": 1}


def test_a_path_of_the_upstream_goes_before_the_clients() -> None:
    addon = RecorderAddon(BrokenSink(), now_ns=lambda: 0, path_prefix=parse_upstream("http://h/llm/v1/").path_prefix)
    one = flow("/v1/chat/completions?x=1")

    addon.requestheaders(one)

    assert one.request.path == "/llm/v1/chat/completions?x=1"
    assert addon.seen == 1


@pytest.mark.parametrize(
    ("url", "origin", "prefix"),
    [
        ("http://gpu:8000", "http://gpu:8000", ""),
        ("gpu:8000", "http://gpu:8000", ""),
        ("http://gpu:8000/v1", "http://gpu:8000", ""),
        ("https://api.example.org/openai/v1/", "https://api.example.org:443", "/openai"),
        ("http://[::1]:8000", "http://[::1]:8000", ""),
        ("http://gpu", "http://gpu:80", ""),
    ],
)
def test_upstreams(url: str, origin: str, prefix: str) -> None:
    upstream = parse_upstream(url)

    assert (upstream.origin, upstream.path_prefix) == (origin, prefix)


@pytest.mark.parametrize("url", ["", "http://", "ftp://x", "http://x:99999", "http://u:CANARY@x", "http://x?key=CANARY"])
def test_what_is_no_upstream_is_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(TraceError, match="not an upstream") as raised:
        parse_upstream(url)
    assert "CANARY" not in str(raised.value)
