"""Where a request goes: to one of the upstreams of a reverse proxy, or as a forward proxy to an allowed host only. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tracer.errors import TraceError


@dataclass(frozen=True, slots=True)
class Upstream:
    scheme: str
    host: str
    port: int
    path_prefix: str = ""

    @property
    def name(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.name}"


def parse_upstream(url: str) -> Upstream:
    """A closing `/v1` is dropped, since clients send it themselves; another path is put before theirs."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.username or parts.query:
        raise TraceError("not an upstream", seen=repr(_without_secrets(url)), wanted="http(s)://host[:port][/path]")
    port = port or (443 if parts.scheme == "https" else 80)
    return Upstream(parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))


def _without_secrets(url: str) -> str:
    return url.rpartition("@")[2].partition("?")[0]


@dataclass(frozen=True, slots=True)
class Route:
    """Requests whose path begins with `path` (which is taken off), or whose Host header names `host`."""

    upstream: Upstream
    path: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class Routes:
    """`others` are tried in turn; what none of them takes goes to `default`."""

    default: Upstream
    others: tuple[Route, ...] = ()

    def pick(self, host_header: str, path: str) -> tuple[Upstream, str]:
        """(upstream, path to ask it for)."""
        host = host_header.rpartition(":")[0] or host_header
        for route in self.others:
            if route.path and (path + "/").startswith(route.path + "/"):
                return route.upstream, route.upstream.path_prefix + (path[len(route.path) :] or "/")
            if route.host and route.host in (host.lower(), host_header.lower()):
                return route.upstream, route.upstream.path_prefix + path
        return self.default, self.default.path_prefix + path


def parse_routes(specs: Sequence[str]) -> Routes:
    """From `URL`, `/path=URL` and `host=URL`, one of them without a condition."""
    defaults, others = [], []
    for spec in specs:
        condition, found, url = spec.partition("=")
        if not found or "://" in condition:
            defaults.append(parse_upstream(spec))
        elif condition.startswith("/"):
            others.append(Route(parse_upstream(url), path=condition.rstrip("/")))
        else:
            others.append(Route(parse_upstream(url), host=condition.lower()))
    if len(defaults) != 1:
        raise TraceError(
            "not a set of upstreams",
            seen=f"{len(defaults)} that take every request",
            wanted="one such --upstream URL, and any number of --upstream /path=URL or host=URL",
        )
    return Routes(defaults[0], tuple(others))


@dataclass(frozen=True, slots=True)
class AllowList:
    """The hosts that a forward proxy may reach. An open proxy would be a door for anybody, so the list is never empty."""

    hosts: frozenset[tuple[str, int]]

    def allows(self, host: str, port: int) -> bool:
        return (host.lower().rstrip("."), port) in self.hosts

    def allows_request(self, host: str, port: int, host_header: str | None) -> bool:
        """The Host header can name another host than the connection goes to; both must be allowed. Never raises."""
        if not self.allows(host, port):
            return False
        if host_header is None:
            return True
        try:
            named = urlsplit(f"//{host_header}")
            return self.allows(named.hostname or "", named.port or port)
        except ValueError:
            return False


def parse_allow_list(hosts: Sequence[str]) -> AllowList:
    """From `host` (port 443) and `host:port`. No patterns: whoever wants ten hosts names ten."""
    found = set()
    for one in hosts:
        parts = urlsplit(f"//{one}")
        try:
            port = parts.port or 443
        except ValueError:
            port = -1
        if not parts.hostname or port == -1 or "*" in one or "/" in one or "@" in one:
            raise TraceError("not a host", seen=repr(_without_secrets(one)), wanted="host or host:port, e.g. api.openai.com")
        found.add((parts.hostname.rstrip("."), port))
    if not found:
        raise TraceError(
            "a forward proxy needs to know which hosts it may reach",
            next_step="Add --allow-host, e.g. --allow-host api.openai.com",
        )
    return AllowList(frozenset(found))
