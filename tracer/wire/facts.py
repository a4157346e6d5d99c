"""What every API's stream events and bodies are turned into, and how a stream's add up."""

from dataclasses import dataclass, field
from typing import Any

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None  # None: the server does not say; 0: it says none
    reasoning_tokens: int | None = None
    cache_write_tokens: int | None = None

    def followed_by(self, later: "Usage") -> "Usage":
        """Counts in a stream are cumulative, and an event may hold some of them only: the highest of each counts."""
        if self.is_before(later):
            return later
        return Usage(**{name: _highest(getattr(self, name), getattr(later, name)) for name in self.__struct_fields__})

    def is_before(self, later: "Usage") -> bool:
        """Only the answer has grown since: the usual case, told apart quickly."""
        return (
            self.prompt_tokens == later.prompt_tokens
            and self.cached_tokens == later.cached_tokens
            and self.reasoning_tokens == later.reasoning_tokens
            and self.cache_write_tokens == later.cache_write_tokens
            and later.completion_tokens is not None
            and (self.completion_tokens or 0) <= later.completion_tokens
        )


class ChunkFacts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one stream event, or one whole body, says about its first choice. A struct: cheapest to make per chunk."""

    choice_index: int = 0  # with n > 1, events of several choices are interleaved
    text: str = ""
    reasoning: str = ""
    tool_calls: int = 0  # calls that begin here
    tool_text: str = ""  # their names and arguments, or pieces of them
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None  # the server's own words
    response_id: str | None = None  # only where a later request can name it to continue
    is_done: bool = False
    is_parsed: bool = True

    @property
    def has_token(self) -> bool:
        """A token of reasoning, answer or tool call: not a role, not an empty chunk, not usage alone."""
        return bool(self.text or self.reasoning or self.tool_calls or self.tool_text or self.token_ids)


def error_text(error: Any) -> str:
    """The server's own words, from an error object or a bare text."""
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return str(error)


def _highest(one: int | None, other: int | None) -> int | None:
    return max(one, other) if one is not None and other is not None else one if other is None else other


@dataclass(slots=True)
class StreamFacts:
    """Folds the facts of a stream's events into those of its first answer (choice 0).

    Usage spans all choices.
    """

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    has_all_token_ids: bool = True  # every token-bearing event carried its ids
    tool_calls: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    response_id: str | None = None
    is_done: bool = False

    def add(self, facts: ChunkFacts) -> None:
        if facts.choice_index == 0:
            self._add_answer(facts)
        if facts.usage is not None:
            self.usage = self.usage.followed_by(facts.usage) if self.usage is not None else facts.usage
        if facts.prompt_token_ids is not None:
            self.prompt_token_ids = facts.prompt_token_ids
        if facts.error is not None:
            self.error = facts.error
        if facts.response_id is not None:
            self.response_id = facts.response_id
        if facts.is_done:
            self.is_done = True

    def add_texts(self, text: str) -> None:
        """`add` for events that hold pieces of this text, none of them empty, and nothing else."""
        self.text.append(text)
        self.has_all_token_ids = False

    def _add_answer(self, facts: ChunkFacts) -> None:
        if facts.text:
            self.text.append(facts.text)
        if facts.reasoning:
            self.reasoning.append(facts.reasoning)
        if facts.tool_text:
            self.tool_text.append(facts.tool_text)
        if facts.token_ids is not None:
            self.token_ids.extend(facts.token_ids)
        elif facts.has_token:
            self.has_all_token_ids = False
        self.tool_calls += facts.tool_calls
        if facts.finish_reason is not None:
            self.finish_reason = facts.finish_reason
