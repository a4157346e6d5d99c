"""Which headers of a captured request count: as in live recording, and for nothing else."""

from collections.abc import Iterable, Mapping

from tracer.record.addon import CREDENTIAL_HEADERS, SESSION_HEADER


def lower_cased(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The first value of each name counts."""
    found: dict[str, str] = {}
    for name, value in pairs:
        found.setdefault(name.lower(), value)
    return found


def credential_of(headers: Mapping[str, str]) -> bytes:
    return next((headers[name].encode("utf-8", "surrogateescape") for name in CREDENTIAL_HEADERS if headers.get(name)), b"")


def has_secrets(headers: Mapping[str, str]) -> bool:
    return any(headers.get(name) for name in (*CREDENTIAL_HEADERS, "proxy-authorization", "cookie"))


def session_of(headers: Mapping[str, str]) -> bytes:
    return headers.get(SESSION_HEADER, "").encode("utf-8", "surrogateescape")
