"""Captures of LLM traffic that other tools made, one format a file. Pure: a file in, captured requests out.

What is read here goes through the recorder's own code (record/capturing.py), so a captured request becomes the row that
it would have become live. What a capture cannot know, such as the times of chunks, stays null.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from tracer.record.exchange import ExchangeFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    arrival_ns: int  # wall clock, since 1970
    endpoint: str  # one that tracer.wire knows
    body: bytes  # of the request, JSON; empty: not in the capture
    facts: ExchangeFacts
    encoding: str = ""  # Content-Encoding of `body`
    credential: bytes = b""  # a secret of the source: only ever used as keyed identity
    identity: bytes = b""  # of the client, where a log names it otherwise
    session: bytes = b""
    upstream: str = ""
    has_secrets: bool = False  # credentials or cookies stand in the source in clear
    has_prompt: bool = True  # False: `body` says what was asked for, but not the prompt


@dataclass(frozen=True, slots=True)
class Rejected:
    """A part of a capture that becomes no row. `reason` holds no text of the capture: it may be written to disk."""

    place: str
    reason: str
    counted_as: str = "bad_entries"
    is_fault: bool = True  # False: left out by intent, such as an answer from a gateway's own cache


Reject = Callable[[Rejected], None]


class Capture(Protocol):
    """What each module of this package offers."""

    NAME: str

    def looks_like(self, head: bytes) -> bool:
        """Do the first bytes of a file show this format?"""

    def read(self, file: BinaryIO, reject: Reject) -> Iterator[Captured]:
        """In any order. Raises TraceError only where nothing can be read on from here."""
