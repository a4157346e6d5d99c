"""Names to tokens to text: equal names give equal words, different names different ones, on any machine. Pure.

Tokens come from a counter-based generator over (salt, name, position): nothing is stored, and a new salt makes everything
new to a server's cache.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

type Ints = NDArray[np.int64]
Tokens = NDArray[np.int64]  # places in the vocabulary's table, or token ids
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TAIL_SALT = 0x7A11
_CHUNK = 1 << 14  # numbers mixed at a time: they stay in the core's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What prompts are made of: `ids[i]` is the server's token for `words[i]`. Words have one width in bytes."""

    ids: Ints
    words: NDArray[np.bytes_] | None = None  # None: ids only


def splitmix64(counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014): the output function."""
    z = counter.copy()
    _mix(z, np.empty_like(z))
    return z


def _mix(z: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """In place."""
    z *= _GOLDEN
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(z, np.uint64(shift), out=scratch)
        z ^= scratch
        z *= np.uint64(factor)
    np.right_shift(z, np.uint64(31), out=scratch)
    z ^= scratch


def places(names: Ints, widths: Ints, is_tail: NDArray[np.bool_], salt: int, vocabulary_size: int) -> Tokens:
    """Places in the vocabulary, `widths[i]` of them for `names[i]`, one after the other.

    A tail's name is no block's: 5 as a tail and 5 as a block give different tokens. Of 3,601 words a block of 16 carries
    189 bits: no two names collide in practice.
    """
    salts = np.where(is_tail, salt ^ _TAIL_SALT, salt).astype(np.uint64) << np.uint64(32)
    seeds = splitmix64(names.astype(np.uint64) + np.uint64(1) + salts)
    ends = np.cumsum(widths)
    found = np.repeat(seeds - (ends - widths).astype(np.uint64), widths)
    found += np.arange(len(found), dtype=np.uint64)
    scratch = np.empty(min(_CHUNK, len(found)), dtype=np.uint64)
    for begin in range(0, len(found), _CHUNK):
        z = found[begin : begin + _CHUNK]
        _mix(z, scratch[: len(z)])
        z >>= np.uint64(32)
        z *= np.uint64(vocabulary_size)
        z >>= np.uint64(32)
    return found.view(np.int64)


def as_text(these: Tokens, vocabulary: Vocabulary) -> str:
    """Words that re-tokenize to exactly these tokens, wherever the tokenizer cuts before a space and letters."""
    assert vocabulary.words is not None
    return vocabulary.words[these].tobytes().decode("ascii")
