"""Rows of a trace to messages of real words: exact lengths under a tokenizer, exactly the trace's sharing. Pure.

    blocks, tail -> names -> words -> messages, cut where the layout says

Scheme: safe words of one width, so that text is one gather from a table; see tracer/words.py. A tail is named by the
answer block that holds it, if there is one: the next turn then has the same words there.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from synth.frame import ANCHOR, Message
from synth.layout import Segment
from tracer.blocks import Blocks
from tracer.words import Vocabulary, places

type Ints = NDArray[np.int64]


class Batch(NamedTuple):
    """Some rows of a trace. Shapes [rows]; -1: none."""

    first: int  # number of the first row
    block_tokens: int
    input_tokens: Ints
    output_tokens: Ints
    blocks: Blocks
    answers: Blocks
    tail_id: Ints
    in_session: NDArray[np.bool_]


def prompt_words(batch: Batch, salt: int, vocabulary: Vocabulary) -> list[bytes]:
    """The words of each prompt, all of one width, as many as it has tokens."""
    assert vocabulary.words is not None
    counts = batch.blocks.lengths
    first = np.concatenate([[0], np.cumsum(counts + 1)])
    is_rest = np.zeros(first[-1], dtype=bool)
    is_rest[first[1:] - 1] = True
    names = np.empty(first[-1], dtype=np.int64)
    names[~is_rest] = batch.blocks.ids
    rest, is_tail = rests(batch)
    names[is_rest] = rest
    widths = np.full(first[-1], batch.block_tokens)
    widths[is_rest] = batch.input_tokens - counts * batch.block_tokens
    tails = np.zeros(first[-1], dtype=bool)
    tails[is_rest] = is_tail
    found = vocabulary.words.take(places(names, widths, tails, salt, len(vocabulary.words)))
    ends = np.concatenate([[0], np.cumsum(batch.input_tokens)]).tolist()
    return [found[begin:end].tobytes() for begin, end in zip(ends[:-1], ends[1:], strict=True)]


def rests(batch: Batch) -> tuple[Ints, NDArray[np.bool_]]:
    """Name of what follows the last full block, and whether that is a tail's name (else a block's)."""
    count = len(batch.input_tokens)
    has_answer = batch.in_session & (batch.answers.lengths > 0)
    answer = np.zeros(count, dtype=np.int64)
    answer[has_answer] = batch.answers.ids[batch.answers.offsets[:-1][has_answer]]
    rest_tokens = batch.input_tokens - batch.blocks.lengths * batch.block_tokens
    is_named = (batch.tail_id >= 0) & (rest_tokens < batch.block_tokens)  # a longer rest has blocks nobody named: private
    private = 2**32 + batch.first + np.arange(count)
    return np.where(has_answer, answer, np.where(is_named, batch.tail_id, private)), ~has_answer


def messages(segments: list[Segment], words: bytes, width: int) -> list[Message]:
    return [
        {"role": one.role, "content": ANCHOR + words[one.begin * width : one.end * width].decode("ascii")} for one in segments
    ]


def answer_text(row: int, tokens: int, salt: int, vocabulary: Vocabulary) -> str:
    """An answer that nobody goes on from: words of its own."""
    assert vocabulary.words is not None
    name, width, is_tail = np.array([2**33 + row]), np.array([max(tokens - 1, 0)]), np.ones(1, dtype=bool)
    return ANCHOR + vocabulary.words[places(name, width, is_tail, salt, len(vocabulary.words))].tobytes().decode("ascii")
