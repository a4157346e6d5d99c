"""Errors whose fault lies with the input; the message tells the user what to do next.

A target server that fails is never an exception: it is an outcome with an error kind (see replay/outcome.py).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class TraceError(Exception):
    """A trace, capture or option that cannot be used: where, what was seen, what was wanted, what to do."""

    problem: str
    path: str | None = None
    line: int | None = None
    seen: str | None = None
    wanted: str | None = None
    next_step: str | None = None

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.path, self.line) if part is not None)
        text = f"{place}: {self.problem}" if place else self.problem
        if self.seen is not None:
            text += f"; saw {self.seen}"
        if self.wanted is not None:
            text += f", wanted {self.wanted}"
        if self.next_step is not None:
            text += f". {self.next_step}"
        return text
