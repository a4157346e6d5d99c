"""Prompts made of a user's own text: exact lengths and exactly the trace's sharing, words of any number of tokens. Pure.

The text is cut into pieces (a space and a word) that give the same tokens wherever they stand, which is tried out, and these
into pages of as many tokens as a unit has. A block is some pages: blocks numbered one after the other are text that goes on.
A block that goes on from another than the one before it begins with words that name it, so that no two are alike by chance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from synth.frame import ANCHOR, Message
from synth.layout import Segment
from synth.text import Batch, rests
from tracer.errors import TraceError

type Ints = NDArray[np.int64]
type Inside = Callable[[str], list[int]]  # tokens of words inside a message, without the anchor
UNIT_TOKENS = 16
TRIED_TOGETHER = 256
LEAST_NAMES = 64  # words of one token: what blocks are named and gaps filled with
MOST_NAMES_LOG2 = 12
NAME_BITS = 35  # rows count from 2**32 and 2**33
_ODD, _SALT_ODD = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    pieces: list[str]
    tokens: list[int]  # [pieces]
    pages: list[str]
    page_begin: list[int]  # [pages] piece at which it begins
    names: list[str]  # a power of two of words, of one token each
    unit_tokens: int
    left_out: int  # words

    def name(self, number: int, salt: int) -> list[str]:
        """Words that no other number has."""
        bits = len(self.names).bit_length() - 1
        count = -(-NAME_BITS // bits)
        mixed = ((number + 1) * _ODD + salt * _SALT_ODD) % (1 << bits * count)
        return [self.names[mixed >> bits * place & len(self.names) - 1] for place in range(count)]

    def filled(self, page: int, tokens: int) -> str:
        """The beginning of a page, exactly so long; words of one token where the next piece does not fit."""
        at, found = self.page_begin[page], []
        while tokens:
            place = at % len(self.pieces)
            if self.tokens[place] > tokens:
                found += [self.names[(page + left) % len(self.names)] for left in range(tokens)]
                break
            found.append(self.pieces[place])
            tokens -= self.tokens[place]
            at += 1
        return "".join(found)


def corpus_of(text: str, inside: Inside, mark: str, unit_tokens: int) -> Corpus:
    """`mark`: a safe word with its leading space. `TraceError` where too little of the text can be used."""
    words = text.split()
    pieces = [f" {word}" for word in words if word != mark.strip()]
    counts = _tokens_of(sorted(set(pieces)), inside, mark)
    used = [one for one in pieces if counts.get(one, unit_tokens + 1) <= unit_tokens]
    singles = list(dict.fromkeys(one for one in used if counts[one] == 1 and one[1:].isalpha()))
    if len(singles) < LEAST_NAMES:
        raise TraceError(
            "too little text to make prompts of",
            seen=f"{len(singles)} different words of one token, {len(words):,} words in all",
            wanted=f"{LEAST_NAMES} or more",
            next_step="Give a longer text",
        )
    bits = min(len(singles).bit_length() - 1, MOST_NAMES_LOG2)
    pages = Corpus(
        pieces=used,
        tokens=[counts[one] for one in used],
        pages=[],
        page_begin=[],
        names=singles[: 1 << bits],
        unit_tokens=unit_tokens,
        left_out=len(words) - len(used),
    )
    _fill_pages(pages)
    return pages


def _fill_pages(corpus: Corpus) -> None:
    at = 0
    while at < len(corpus.pieces):
        corpus.page_begin.append(at)
        corpus.pages.append(corpus.filled(len(corpus.pages), corpus.unit_tokens))
        taken = 0
        while at < len(corpus.pieces) and taken + corpus.tokens[at] <= corpus.unit_tokens:
            taken += corpus.tokens[at]
            at += 1


def _tokens_of(pieces: Sequence[str], inside: Inside, mark: str) -> dict[str, int]:
    """Of pieces that have the same tokens between marks, beside each other, and at the end of a message: how many."""
    found: dict[str, list[int]] = {}
    (stop,) = inside(mark)
    for begin in range(0, len(pieces), TRIED_TOGETHER):
        _between_marks(pieces[begin : begin + TRIED_TOGETHER], inside, mark, stop, found)
    shuffled = [list(found)[place] for place in np.random.default_rng(0).permutation(len(found))] if found else []
    whole: list[str] = []
    for begin in range(0, len(shuffled), TRIED_TOGETHER):
        whole += _alike(shuffled[begin : begin + TRIED_TOGETHER], inside, found)
    at_end = {one[-1]: one for one in whole}
    bad_ends = {last for last, one in at_end.items() if inside(one) != found[one]}
    return {one: len(found[one]) for one in whole if one[-1] not in bad_ends}


def _between_marks(pieces: Sequence[str], inside: Inside, mark: str, stop: int, found: dict[str, list[int]]) -> None:
    tokens = inside("".join(piece + mark for piece in pieces))
    ends = [place for place, token in enumerate(tokens) if token == stop]
    if len(ends) == len(pieces) and ends[-1] == len(tokens) - 1:
        begins = [0, *(end + 1 for end in ends[:-1])]
        for piece, begin, end in zip(pieces, begins, ends, strict=True):
            if end > begin:
                found[piece] = tokens[begin:end]
    elif len(pieces) > 1:
        middle = len(pieces) // 2
        _between_marks(pieces[:middle], inside, mark, stop, found)
        _between_marks(pieces[middle:], inside, mark, stop, found)


def _alike(pieces: list[str], inside: Inside, tokens: dict[str, list[int]]) -> list[str]:
    """Those that keep their tokens side by side."""
    if inside("".join(pieces)) == [token for piece in pieces for token in tokens[piece]]:
        return pieces
    if len(pieces) == 1:
        return []
    middle = len(pieces) // 2
    first, second = _alike(pieces[:middle], inside, tokens), _alike(pieces[middle:], inside, tokens)
    while first and second and inside(first[-1] + second[0]) != tokens[first[-1]] + tokens[second[0]]:
        first = first[:-1]
    return first + second


def corpus_messages(batch: Batch, prompts: Sequence[Sequence[Segment]], salt: int, corpus: Corpus) -> list[list[Message]]:
    """Messages of each row, as `text.messages` makes them of safe words."""
    rest, _ = rests(batch)
    found = []
    for row, segments in enumerate(prompts):
        paths = _Path([*batch.blocks[row].tolist(), int(rest[row])], batch.block_tokens, salt, corpus)
        found.append([{"role": one.role, "content": ANCHOR + paths.text(one.begin, one.end)} for one in segments])
    return found


def corpus_answer(row: int, tokens: int, salt: int, corpus: Corpus) -> str:
    """An answer that nobody goes on from."""
    path = _Path([2**33 + row], corpus.unit_tokens, salt, corpus)
    return ANCHOR + path.text(0, max(tokens - 1, 0))


class _Path:
    """Text of one prompt, asked for from its beginning to its end. `names`: of each block, then of what follows them."""

    def __init__(self, names: list[int], block_tokens: int, salt: int, corpus: Corpus) -> None:
        self.names, self.salt, self.corpus = names, salt, corpus
        self.block_tokens = block_tokens
        self._at = -1  # block whose name is being told
        self._left: list[str] = []

    def text(self, begin: int, end: int) -> str:
        unit, pages = self.corpus.unit_tokens, self.corpus.pages
        found: list[str] = []
        while begin < end:
            stop = min(end, (begin // unit + 1) * unit)
            place = min(begin // self.block_tokens, len(self.names) - 1)
            if place != self._at:
                self._enter(place)
            inside = (begin - place * self.block_tokens) // unit
            page = (self.names[place] * (self.block_tokens // unit) + inside + self.salt * 7919) % len(pages)
            if self._left:
                found += self._left[: stop - begin]
                told = min(stop - begin, len(self._left))
                self._left = self._left[told:]
                found.append(self.corpus.filled(page, stop - begin - told))
            else:
                found.append(pages[page] if stop - begin == unit else self.corpus.filled(page, stop - begin))
            begin = stop
        return "".join(found)

    def _enter(self, place: int) -> None:
        goes_on = place > 0 and self.names[place] == self.names[place - 1] + 1
        self._at, self._left = place, [] if goes_on else self.corpus.name(self.names[place], self.salt)


def block_keys(tokens: Sequence[int], names: Ints, block_tokens: int) -> NDArray[np.uint64]:
    """[blocks] a key of each full block's tokens and of the block before it."""
    count = min(len(names), len(tokens) // block_tokens)
    table = np.array(tokens[: count * block_tokens], dtype=np.uint64).reshape(count, block_tokens) + np.uint64(1)
    factors = np.random.default_rng(1).integers(0, 2**63, block_tokens + 1, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    before = np.concatenate([[-1], names[: max(count - 1, 0)]])[:count].astype(np.uint64) + np.uint64(2)
    mixed = table * factors[:-1]
    mixed ^= mixed >> np.uint64(29)
    keys = (mixed * np.uint64(_ODD)).sum(axis=1, dtype=np.uint64) + before * factors[-1]
    keys ^= keys >> np.uint64(32)
    return np.asarray(keys * np.uint64(_ODD))
