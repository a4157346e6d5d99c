"""Server-sent events, incrementally: bytes in, events out.

Grammar: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

import msgspec

_BOM = b"\xef\xbb\xbf"


class SseEvent(msgspec.Struct, frozen=True, gc=False):
    data: bytes  # `data` lines joined by LF
    event: str  # "message" where the stream names none


class SseParser:
    """Give it the stream in any cuts; it returns the events that became complete. Comments (pings) are skipped.

    An event larger than `max_event_bytes` is dropped and counted in `events_dropped`, so memory stays bounded.
    """

    def __init__(self, max_event_bytes: int | None = None) -> None:
        self.events_dropped = 0
        self._max_bytes = max_event_bytes
        self._parts: list[bytes] = []  # pieces of the line that is not complete yet
        self._data: list[bytes] = []
        self._event = ""
        self._size = 0  # bytes of data lines of the event that is not complete yet
        self._held = 0  # bytes of its line that is not complete yet
        self._oversized = False
        self._after_cr = False  # an LF that comes next belongs to the CR already taken as a line end
        self._is_between_events = False  # nothing held: the next byte begins a line and an event
        self._head: bytes | None = b""  # first bytes, held while they may still be a byte order mark

    def feed(self, chunk: bytes) -> list[SseEvent]:
        if self._is_one_event(chunk) and self._fits(len(chunk) - 8):
            return [SseEvent(chunk[6:-2], "message")]
        events = self._feed(chunk)
        held = self._parts or self._data or self._event or self._after_cr or self._oversized
        self._is_between_events = self._head is None and not held
        return events

    def feed_data(self, chunk: bytes) -> list[bytes]:
        """As `feed`, data alone; quicker where many usual events come at once. Not with `max_event_bytes`."""
        if self._is_one_event(chunk):
            return [chunk[6:-2]]
        found: list[bytes] = []
        if not self._is_between_events:
            blank = chunk.find(b"\n\n")
            end = blank + 2 if blank >= 0 else len(chunk)
            found += [event.data for event in self.feed(chunk[:end])]
            chunk = chunk[end:]
        if self._is_between_events and chunk.startswith(b"data: ") and b"\r" not in chunk:
            last = chunk.rfind(b"\n\n")
            usual, end = chunk[6:last].split(b"\n\ndata: "), last + 2
            if last >= 0 and chunk.count(b"\n", 0, end) == 2 * len(usual):  # no event has a second line
                found += usual
                chunk = chunk[end:]
        return found + [event.data for event in self.feed(chunk)] if chunk else found

    def _is_one_event(self, chunk: bytes) -> bool:
        """The usual case: one event, one line, one chunk."""
        return (
            self._is_between_events
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.startswith(b"data: ")
            and chunk.endswith(b"\n")
            and b"\r" not in chunk
        )

    def _feed(self, chunk: bytes) -> list[SseEvent]:
        if self._head is not None:
            chunk = self._without_bom(chunk)
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
        if not chunk:
            return []
        has_cr = b"\r" in chunk
        if not has_cr and b"\n" not in chunk:
            self._hold(chunk)
            return []
        if has_cr:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._parts:
            chunk = b"".join(self._parts) + chunk
            self._parts.clear()
            self._held = 0
        lines = chunk.split(b"\n")
        rest = lines.pop()
        events = [event for line in lines if (event := self._line(line)) is not None]
        if rest:
            self._hold(rest)
        return events

    def finish(self) -> list[SseEvent]:
        """End of the stream. A last event without its blank line counts: some servers close early, and it is whole JSON."""
        chunk = self._head or b""
        self._head = None
        events = self._feed(chunk) if chunk else []
        line = b"".join(self._parts)
        self._parts.clear()
        if line:
            self._line(line)
        last = self._dispatch()
        return events if last is None else [*events, last]

    def _without_bom(self, chunk: bytes) -> bytes:
        head = (self._head or b"") + chunk
        if len(head) < len(_BOM) and _BOM.startswith(head):
            self._head = head
            return b""
        self._head = None
        return head.removeprefix(_BOM)

    def _hold(self, part: bytes) -> None:
        self._held += len(part)
        self._check_size()
        if self._oversized:
            self._parts = [b"x"]  # stands for a line whose content is lost: not blank, and no field
        else:
            self._parts.append(part)

    def _line(self, line: bytes) -> SseEvent | None:
        if not line:
            return self._dispatch()
        if line.startswith(b"data:"):
            self._add_data(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"event:"):
            self._event = line[6:].removeprefix(b" ").decode("utf-8", "replace")
        elif line == b"data":
            self._add_data(b"")
        return None  # comments, id, retry and unknown fields carry nothing for us

    def _add_data(self, value: bytes) -> None:
        self._size += len(value)
        self._check_size()
        if not self._oversized:
            self._data.append(value)

    def _check_size(self) -> None:
        if not self._fits(self._size + self._held):
            self._oversized = True
            self._data.clear()

    def _fits(self, size: int) -> bool:
        return self._max_bytes is None or size <= self._max_bytes

    def _dispatch(self) -> SseEvent | None:
        data, name, oversized = self._data, self._event, self._oversized
        self._data, self._event, self._size, self._oversized = [], "", 0, False
        if oversized:
            self.events_dropped += 1
            return None
        if not data:
            return None
        return SseEvent(data[0] if len(data) == 1 else b"\n".join(data), name or "message")
