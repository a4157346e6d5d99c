"""Block ids to tokens: equal ids give equal tokens, different ids different ones, on any machine. Pure.

Tokens come from a counter-based generator over (salt, id, position): nothing is stored, and a new salt makes the whole
workload new to a server's cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.plan.plan import Plan

Tokens = NDArray[np.int64]  # places in the vocabulary's table, or token ids
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TAIL_SALT = 0x7A11


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What prompts are made of: `ids[i]` is the server's token for `words[i]`. Words have one width in bytes."""

    ids: NDArray[np.int64]
    words: NDArray[np.bytes_] | None = None  # None: ids only


def splitmix64(counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014): the output function."""
    z = counter * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def prompt_places(plan: Plan, rows: Sequence[int], salt: int, vocabulary_size: int) -> list[Tokens]:
    """The prompts of these requests as places in the vocabulary, each exactly `input_tokens` long.

    A block's tokens follow from its id and the salt alone, a tail's from the tail's id; many short prompts at once cost little
    more than one. Of 3,601 words a block of 16 carries 189 bits: no two ids collide in practice.
    """
    wanted = np.asarray(rows, dtype=np.int64)
    counts = plan.blocks.lengths_of(wanted)
    first = np.concatenate([[0], np.cumsum(counts + 1)])  # names of a request: its blocks, then its tail
    is_tail = np.zeros(first[-1], dtype=bool)
    is_tail[first[1:] - 1] = True
    names = np.empty(first[-1], dtype=np.int64)
    names[~is_tail] = plan.blocks.rows(wanted).ids
    names[is_tail] = plan.tail_id[wanted]
    widths = np.full(first[-1], plan.block_tokens)
    widths[is_tail] = plan.tail_tokens[wanted]
    salts = np.where(is_tail, salt ^ _TAIL_SALT, salt).astype(np.uint64) << np.uint64(32)  # a tail's name is no block's
    seeds = splitmix64(names.astype(np.uint64) + np.uint64(1) + salts)
    ends = np.cumsum(widths)
    counters = np.repeat(seeds - (ends - widths).astype(np.uint64), widths) + np.arange(ends[-1], dtype=np.uint64)
    high = splitmix64(counters) >> np.uint64(32)
    places = ((high * np.uint64(vocabulary_size)) >> np.uint64(32)).astype(np.int64)
    starts = np.concatenate([[0], ends[first[1:] - 1]]).tolist()
    lengths = plan.input_tokens[wanted].tolist()
    return [places[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def spliced(own: Tokens, previous: Tokens | None, shared_tokens: int) -> tuple[Tokens, bool]:
    """A later turn's prompt with the conversation as it really went for its first `shared_tokens` tokens.

    `previous` is the previous turn's prompt and answer as sent and received; None or too short: not known, and the
    prompt stays as made from ids (False).
    """
    if previous is None or len(previous) < shared_tokens:
        return own, False
    return np.concatenate([previous[:shared_tokens], own[shared_tokens:]]), True


def as_text(places: Tokens, vocabulary: Vocabulary) -> str:
    """Words that re-tokenize to exactly these tokens, wherever the tokenizer cuts before a space and letters."""
    assert vocabulary.words is not None
    return vocabulary.words[places].tobytes().decode("ascii")
