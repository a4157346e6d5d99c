"""Events of a stream that differ from one another in a piece of plain text alone: known by their bytes, without a JSON parser.

A model's answer is hundreds of such events. One of them is parsed, and parsed again with another text in its place: that shows
which bytes are the text. An event with the same bytes around a text that needs no escape is the same JSON but for that text.
"""

import re
from collections.abc import Callable, Sequence

from tracer.wire.facts import ChunkFacts

_TRIES = 3  # streams whose events are not alike are not tried for ever
_OTHER_TEXT = "\u00a7 other \u00a7"
_NOT_PLAIN = re.compile(rb'["\\\x00-\x1f]')


class Alike:
    """Knows the events of one stream, once it has learnt from some of them."""

    def __init__(self, parse_chunk: Callable[[bytes], ChunkFacts]) -> None:
        self._parse_chunk = parse_chunk
        self._before = self._after = b""
        self._tries = 0

    @property
    def may_learn(self) -> bool:
        return self._tries < _TRIES

    @property
    def knows(self) -> bool:
        return bool(self._before)

    def texts(self, payloads: Sequence[bytes]) -> list[bytes]:
        """The text of each payload whose `parse_chunk` is `ChunkFacts(text=text)`; empty where that is not known."""
        before, after = self._before, self._after
        begin, end, least = len(before), -len(after), len(before) + len(after)
        found = [
            one[begin:end] if one.startswith(before) and one.endswith(after) and len(one) > least else b"" for one in payloads
        ]
        if _is_plain(b"".join(found)):
            return found
        return [one if _is_plain(one) else b"" for one in found]

    def learn(self, payloads: Sequence[bytes], facts: Sequence[ChunkFacts]) -> None:
        """From payloads and what they say."""
        self._tries += 1
        for payload, seen in zip(payloads, facts, strict=True):
            if seen.text not in ("", _OTHER_TEXT) and seen == ChunkFacts(text=seen.text) and self._learn_from(payload, seen.text):
                return

    def _learn_from(self, payload: bytes, text: str) -> bool:
        quoted = b'"%b"' % text.encode()
        at = payload.find(quoted)
        while at >= 0:
            before, after = payload[: at + 1], payload[at + len(quoted) - 1 :]
            if self._parse_chunk(before + _OTHER_TEXT.encode() + after) == ChunkFacts(text=_OTHER_TEXT):
                self._before, self._after = before, after
                return True
            at = payload.find(quoted, at + 1)
        return False


def _is_plain(text: bytes) -> bool:
    """It stands in JSON as it is: UTF-8 without quotes, backslashes and control characters."""
    if _NOT_PLAIN.search(text):
        return False
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
