"""Block ids to tokens: equal ids give equal tokens, different ids different ones, on any machine. Pure.

Tokens come from a counter-based generator over (salt, id, position): nothing is stored, and a new salt makes the whole
workload new to a server's cache.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.plan.plan import Planned

Tokens = NDArray[np.int64]  # places in the vocabulary's table, or token ids
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What prompts are made of: `ids[i]` is the server's token for `words[i]`. Words have one width in bytes."""

    ids: NDArray[np.int64]
    words: NDArray[np.bytes_] | None = None  # None: ids only


def splitmix64(counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014): the output function."""
    with np.errstate(over="ignore"):
        z = counter * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def block_tokens(ids: NDArray[np.int32], width: int, salt: int, vocabulary_size: int) -> Tokens:
    """Places in the vocabulary of `width` tokens for each id, one after the other. Shape [len(ids) * width].

    Of 3,601 words a block of 16 carries 189 bits: no two ids collide in practice.
    """
    with np.errstate(over="ignore"):
        seeds = splitmix64(ids.astype(np.uint64) + np.uint64(1) + (np.uint64(salt % 2**32) << np.uint64(32)))
        counters = (seeds[:, None] + np.arange(width, dtype=np.uint64)[None, :]).ravel()
    high = splitmix64(counters) >> np.uint64(32)
    return ((high * np.uint64(vocabulary_size)) >> np.uint64(32)).astype(np.int64)


def prompt_places(planned: Planned, width: int, salt: int, vocabulary_size: int) -> Tokens:
    """The whole prompt as places in the vocabulary, exactly `input_tokens` long."""
    parts = [block_tokens(planned.blocks, width, salt, vocabulary_size)]
    if planned.tail_tokens:
        name = np.array([planned.tail_id], dtype=np.int32)
        # A tail's name differs from every block's, and its tokens go on as far as the tail does.
        parts.append(block_tokens(name, planned.tail_tokens, salt ^ 0x7A11, vocabulary_size))
    return np.concatenate(parts)[: planned.input_tokens]


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
