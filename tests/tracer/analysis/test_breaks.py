"""Planted prefix breaks of each kind are found, named, and priced; a clean trace has none."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tracer.analysis.breaks import PrefixBreaks, breaks_in_words, find_breaks
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.blocks import DenseIds
from tracer.schema import SCHEMA, Footer

SYSTEM, TOOL, USER, ANSWER, REASONING, SUMMARY = 400, 150, 60, 200, 320, 300
SESSIONS, TURNS = 12, 6

Tokens = list[int]
Message = tuple[str, str, Tokens]  # role, kind, tokens


@dataclass
class Conversation:
    """What a client sends in each turn. Subclassed by what goes wrong."""

    random: np.random.Generator
    system: Tokens
    tools: list[Tokens]
    messages: list[Message] = field(default_factory=list)
    reasoning: int = 0
    lost: int = 0  # tokens computed again although they need not be, where the lengths differ from a clean trace's

    def words(self, count: int) -> Tokens:
        return self.random.integers(1000, 10**6, count).tolist()

    def head(self, turn: int) -> list[Message]:
        return [("system", "tools", tool) for tool in self.tools] + [("system", "system", self.system)]

    def prompt(self, turn: int) -> list[Message]:
        self.messages.append(("user", "user", self.words(USER)))
        return self.head(turn) + self.messages

    def answered(self, tokens: Tokens) -> None:
        self.messages.append(("assistant", "history", tokens))

    def model(self, turn: int) -> str:
        return "m"


class Clock(Conversation):
    """The 50th token of the system prompt is the time."""

    def head(self, turn: int) -> list[Message]:
        system = [*self.system[:50], *self.words(1), *self.system[51:]]
        return [("system", "system", system)] + [("system", "tools", tool) for tool in self.tools]


class Reordered(Conversation):
    def head(self, turn: int) -> list[Message]:
        tools = self.tools[turn % 3 :] + self.tools[: turn % 3]  # of three orders, each known from other sessions
        return [("system", "tools", tool) for tool in tools] + [("system", "system", self.system)]


class Compacted(Conversation):
    def prompt(self, turn: int) -> list[Message]:
        if turn == 4:
            self.messages = [("user", "history", self.words(SUMMARY))]
            self.lost += SUMMARY
        return super().prompt(turn)


class Stripped(Conversation):
    def answered(self, tokens: Tokens) -> None:
        super().answered(tokens[self.reasoning :])

    def prompt(self, turn: int) -> list[Message]:
        if turn:
            self.lost += len(self.messages[-1][2])
        return super().prompt(turn)


class Rewritten(Conversation):
    def prompt(self, turn: int) -> list[Message]:
        if turn == 3:
            self.messages[0] = ("user", "history", self.words(USER))
        return super().prompt(turn)


class Switched(Conversation):
    def model(self, turn: int) -> str:
        return "n" if turn >= 3 else "m"


class Changed(Conversation):
    def head(self, turn: int) -> list[Message]:
        if turn == 2:
            self.tools = [*self.tools[:2], self.words(TOOL)]
        return super().head(turn)


class Template(Conversation):
    """From turn 3 on other control tokens at the start; the messages are the same."""


def trace(kind: type[Conversation], reasoning: int = 0, has_segments: bool = True) -> tuple[pa.Table, int]:
    """Interleaved sessions as a recording would have them, and the tokens lost by construction."""
    random = np.random.default_rng(1)
    system, tools = random.integers(1000, 10**6, SYSTEM).tolist(), random.integers(1000, 10**6, (3, TOOL)).tolist()
    sessions = [kind(random, list(system), [list(tool) for tool in tools], reasoning=reasoning) for _ in range(SESSIONS)]
    blocks: DenseIds[Any] = DenseIds()
    contents: DenseIds[Any] = DenseIds()
    rows: list[dict[str, Any]] = []

    def chain(model: str, tokens: Tokens) -> list[int]:
        ids, above = [], -1
        for at in range(0, len(tokens) - 15, 16):
            above = blocks[model, above, tuple(tokens[at : at + 16])]
            ids.append(above)
        return ids

    for turn in range(TURNS):
        for number, one in enumerate(sessions):
            prompt, model = one.prompt(turn), one.model(turn)
            tokens = [token for _, _, part in prompt for token in part]
            if kind is Template and turn >= 3:
                tokens[0] = 7
            answer = one.words(ANSWER + reasoning)
            ids, whole = chain(model, tokens), chain(model, tokens + answer)
            segments = [
                {"role": role, "kind": what, "tokens": len(part), "content_id": contents[tuple(part)]}
                for role, what, part in prompt
            ]
            rows.append(
                {
                    "request_id": len(rows),
                    "arrival_ns": len(rows) * 10**9,
                    "session_id": number,
                    "turn": turn,
                    "parent_request_id": (turn - 1) * SESSIONS + number if turn else None,
                    "model": model,
                    "tools_count": 3,
                    "input_tokens": len(tokens),
                    "output_tokens": len(answer),
                    "reasoning_tokens": reasoning or None,
                    "input_blocks": ids,
                    "output_blocks": whole[len(ids) :],
                    "segments": segments if has_segments else None,
                }
            )
            one.answered(answer)
    return pa.Table.from_pylist(rows, schema=SCHEMA), sum(one.lost for one in sessions)


def cached_tokens(table: pa.Table) -> int:
    """What an endless cache serves."""
    return hit_curve(touches_as_engine(table, Footer())).hits_infinite * 16


def found_in(table: pa.Table) -> PrefixBreaks:
    return find_breaks(table, Footer(), sizes_tokens=[20_000, 10**9])


@pytest.mark.parametrize(
    ("kind", "reasoning", "cause"),
    [
        (Clock, 0, "volatile_system_prompt"),
        (Reordered, 0, "tools_reordered"),
        (Changed, 0, "tools_changed"),
        (Compacted, 0, "history_compacted"),
        (Rewritten, 0, "history_rewritten"),
        (Stripped, REASONING, "reasoning_stripped"),
        (Switched, 0, "model_switched"),
        (Template, 0, "template_switched"),
    ],
)
def test_a_planted_break_is_found_named_and_priced(kind: type[Conversation], reasoning: int, cause: str) -> None:
    table, lost = trace(kind, reasoning)
    lost = lost or cached_tokens(trace(Conversation)[0]) - cached_tokens(table)

    found = found_in(table)

    assert [one.cause for one in found.causes][0] == cause
    assert found.causes[0].lost_tokens == pytest.approx(lost, rel=0.05)
    assert sum(one.lost_tokens for one in found.causes[1:]) <= 0.05 * lost
    assert found.causes[0].evidence == "segments"


def test_a_clean_trace_has_no_breaks() -> None:
    found = found_in(trace(Conversation)[0])

    assert (found.broken, found.causes) == (0, [])
    assert found.compared == SESSIONS * TURNS - 1
    assert breaks_in_words(found) == [f"No prefix breaks in {found.compared} requests that had a turn to go on from."]


@pytest.mark.parametrize("kind", [Clock, Reordered, Changed, Rewritten])
def test_the_repaired_curve_is_that_of_the_clean_trace(kind: type[Conversation]) -> None:
    """The clean trace has equal lengths in these cases, so both can be held against each other at every size."""
    clean = hit_curve(touches_as_engine(trace(Conversation)[0], Footer()))

    (cause, *_) = found_in(trace(kind)[0]).causes

    assert cause.hit_rate_if_fixed == pytest.approx(clean.hit_rate_infinite, abs=0.02)
    assert cause.hit_rate_if_fixed_at["1000000000"] == pytest.approx(clean.hit_rate_infinite, abs=0.02)
    assert cause.hit_rate_if_fixed_at["20000"] == pytest.approx(clean.hit_rate_at(20_000 // 16), abs=0.05)


def test_without_segments_the_pattern_of_depths_is_all_there_is() -> None:
    compacted = found_in(trace(Compacted, has_segments=False)[0]).causes[0]
    rewritten = found_in(trace(Rewritten, has_segments=False)[0]).causes[0]

    assert (compacted.cause, compacted.evidence) == ("history_compacted", "block depths")
    assert (rewritten.cause, rewritten.evidence) == ("history_rewritten", "block depths")


def test_words_name_cause_price_and_remedy() -> None:
    text = "\n".join(breaks_in_words(found_in(trace(Clock)[0])))

    assert "volatile system prompt: 71 requests" in text
    assert "Move that part to the end" in text or "move that part to the end" in text


def test_sub_agents_are_not_held_against_who_started_them() -> None:
    rows = [
        {"request_id": 0, "arrival_ns": 0, "session_id": 0, "input_tokens": 64, "input_blocks": [0, 1, 2, 3]},
        {"request_id": 1, "arrival_ns": 1, "session_id": 0, "agent_id": "a", "input_tokens": 64, "input_blocks": [4, 5, 6, 7]},
        {"request_id": 2, "arrival_ns": 2, "session_id": 0, "input_tokens": 80, "input_blocks": [0, 1, 2, 3, 8]},
    ]
    rows[1]["parent_request_id"] = 0

    found = find_breaks(pa.Table.from_pylist(rows, schema=SCHEMA), Footer())

    assert (found.compared, found.broken) == (1, 0)
