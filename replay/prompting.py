"""Bodies of the requests that are due: prompts made from block ids, carried on with what the server really answered."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replay.edge.bodies import body_of, streamed
from replay.edge.probe import Target
from replay.plan.pacer import Pacer
from replay.plan.plan import Plan
from replay.plan.prompts import prompt_places, spliced
from tracer.words import Tokens

AHEAD_REQUESTS, AHEAD_TOKENS = 16, 2_048  # built with one that is due, though they wait for it: a stream alone has no batch
AHEAD_HELD = 256  # so many at most wait built


class Body(NamedTuple):
    text: bytes
    prompt: Tokens | None  # kept where a later turn carries it on
    answer_spliced: bool | None


class Bodies:
    """`soon_ns`: a later turn that comes sooner than that after an answer is built before it; 0: none is."""

    def __init__(self, plan: Plan, pacer: Pacer, target: Target, salt: int, hang_up: bool, soon_ns: int) -> None:
        self._plan, self._pacer, self._target, self._salt, self._soon_ns = plan, pacer, target, salt, soon_ns
        self._output_tokens = plan.answer_tokens(hang_up=hang_up)
        self._is_continued = np.zeros(len(plan), dtype=bool)
        self._is_continued[plan.parent[plan.parent >= 0]] = True
        self._spoken: dict[int, Tokens] = {}  # prompt + answer of turns that a later turn continues
        self.built: dict[int, Body] = {}  # by row, ahead of need

    def take(self, rows: Sequence[int]) -> list[Body]:
        wanted = [row for row in rows if row not in self.built]
        if wanted:
            self._build(wanted + self._ahead(wanted))
        return [self.built.pop(row) for row in rows]

    def answered(self, row: int, prompt: Tokens, token_ids: list[int]) -> None:
        """What a turn said, for the next one."""
        self._spoken[row] = np.concatenate([prompt, np.array(token_ids, dtype=np.int64)])

    def _build(self, rows: list[int]) -> None:
        places = prompt_places(self._plan, rows, self._salt, len(self._target.vocabulary.ids))
        for row, found in zip(rows, places, strict=True):
            prompt, answer_spliced = self._prompt(row, found)
            kept = prompt if self._is_continued[row] and self._target.returns_token_ids else None
            self.built[row] = Body(self._text(row, prompt), kept, answer_spliced)

    def _ahead(self, rows: list[int]) -> list[int]:
        """What will be due at once when these have ended, and can be built without their answers."""
        found: dict[int, None] = {}
        if not self._soon_ns or len(self.built) >= AHEAD_HELD:
            return []
        tokens = 0
        for after in rows:
            for row in self._pacer.follow(after, self._soon_ns, AHEAD_REQUESTS - len(found)):
                tokens += int(self._plan.input_tokens[row])
                if tokens > AHEAD_TOKENS:
                    return list(found)
                if row not in self.built and (self._plan.parent[row] < 0 or not self._target.returns_token_ids):
                    found[row] = None
        return list(found)

    def _prompt(self, row: int, places: NDArray[np.int64]) -> tuple[Tokens, bool | None]:
        """The prompt as token ids (mode ids) or places in the vocabulary (the others)."""
        parent = int(self._plan.parent[row])
        if self._target.prompt_mode != "ids":
            keep = max(1, len(places) - self._target.overhead_tokens)
            return places[:keep], None if parent < 0 else False
        tokens = self._target.vocabulary.ids[places]
        if parent < 0:
            return tokens, None
        return spliced(tokens, self._spoken.pop(parent, None), int(self._plan.parent_tokens[row]))

    def _text(self, row: int, prompt: Tokens) -> bytes:
        target, output_tokens = self._target, int(self._output_tokens[row])
        more = streamed(target.prompt_mode, output_tokens)
        if target.returns_token_ids:
            more["return_token_ids"] = True
        return body_of(target.prompt_mode, target.model, prompt, target.vocabulary, output_tokens, **more)
