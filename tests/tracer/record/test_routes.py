"""Upstream URLs, routes and the allow-list mean what users expect."""

import pytest

from tracer.errors import TraceError
from tracer.record.routes import parse_allow_list, parse_routes, parse_upstream


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


@pytest.mark.parametrize(
    ("host", "path", "wanted"),
    [
        ("any", "/v1/chat/completions", ("main:80", "/v1/chat/completions")),
        ("any:9000", "/small/v1/models?x=1", ("small:8001", "/v1/models?x=1")),
        ("any", "/small", ("small:8001", "/")),
        ("any", "/smaller/v1", ("main:80", "/smaller/v1")),
        ("CHAT.example:9000", "/v1/models", ("chat:443", "/openai/v1/models")),
        ("chat.example", "/small/v1", ("small:8001", "/v1")),
        ("other.chat.example", "/v1", ("main:80", "/v1")),
    ],
)
def test_routes_by_path_and_host(host: str, path: str, wanted: tuple[str, str]) -> None:
    routes = parse_routes(["/small/=http://small:8001/v1", "http://main", "chat.example=https://chat/openai"])

    upstream, asked = routes.pick(host, path)

    assert (upstream.name, asked) == wanted


@pytest.mark.parametrize("specs", [[], ["/a=http://x"], ["http://x", "http://y"]])
def test_exactly_one_upstream_takes_the_rest(specs: list[str]) -> None:
    with pytest.raises(TraceError, match="not a set of upstreams"):
        parse_routes(specs)


def test_only_listed_hosts_and_ports_are_allowed() -> None:
    allowed = parse_allow_list(["api.example.org", "Localhost:8000", "[::1]:7"])

    assert allowed.allows("api.example.org", 443) and allowed.allows("API.example.org.", 443)
    assert allowed.allows("localhost", 8000) and allowed.allows("::1", 7)
    assert not allowed.allows("api.example.org", 80)
    assert not allowed.allows("evil.api.example.org", 443)
    assert not allowed.allows("169.254.169.254", 80)


@pytest.mark.parametrize(
    ("header", "is_allowed"),
    [
        (None, True),
        ("api.example.org", True),
        ("api.example.org:443", True),
        ("api.example.org:80", False),
        ("evil", False),
        ("[x", False),
    ],
)
def test_the_host_header_must_be_allowed_too(header: str | None, is_allowed: bool) -> None:
    assert parse_allow_list(["api.example.org"]).allows_request("api.example.org", 443, header) is is_allowed


@pytest.mark.parametrize("hosts", [[], ["*.example.org"], ["http://x"], ["x:99999"], ["u:CANARY@x"], [""]])
def test_what_is_no_list_of_hosts_is_refused(hosts: list[str]) -> None:
    with pytest.raises(TraceError) as raised:
        parse_allow_list(hosts)
    assert "CANARY" not in str(raised.value)
