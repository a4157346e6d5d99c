"""Asking a server for usage on behalf of a client that did not, and keeping that from the client.

Only where the user wants it: it changes the request, and holds back an event until it is whole.
"""

import re

import msgspec

from tracer.wire import CHAT, COMPLETIONS
from tracer.wire.openai import is_usage_alone

MAX_HELD_BYTES = 1 << 20
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")  # atomic: a CRLF is never read as two line ends


def with_usage(endpoint: str, body: bytes) -> bytes | None:
    """The body with `stream_options.include_usage` set; None where it is set, or no stream of chat or completions."""
    if endpoint not in (CHAT, COMPLETIONS) or b'"stream"' not in body:
        return None
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(request, dict) or request.get("stream") is not True:
        return None
    options = request.get("stream_options") or {}
    if not isinstance(options, dict) or options.get("include_usage"):
        return None
    return msgspec.json.encode({**request, "stream_options": {**options, "include_usage": True}})


class UsageStripper:
    """Takes the usage event out of a stream; every other byte passes, whole events at a time.

    An event that grows over `MAX_HELD_BYTES` passes as it comes, and so does all that follows.
    """

    def __init__(self) -> None:
        self._held = b""
        self._is_open = False

    def feed(self, data: bytes) -> bytes:
        if self._is_open:
            return data
        held, passing, at = self._held + data, [], 0
        for end in _EVENT_END.finditer(held):
            if held.endswith(b"\r", 0, end.end()) and end.end() == len(held):
                break  # its LF may come with the next bytes
            event = held[at : end.end()]
            at = end.end()
            if not _is_usage(event):
                passing.append(event)
        self._held = held[at:]
        if len(self._held) > MAX_HELD_BYTES:
            self._is_open = True
            passing.append(self._held)
            self._held = b""
        return b"".join(passing)

    def finish(self) -> bytes:
        """What is held when the stream ends; a last event may lack its blank line."""
        held, self._held = self._held, b""
        return b"" if _is_usage(held) else held


def _is_usage(event: bytes) -> bool:
    lines = [line for line in event.splitlines() if line]
    return len(lines) == 1 and lines[0].startswith(b"data:") and is_usage_alone(lines[0][5:])
