"""The tokens of planned prompts, made from their block ids; see tracer/words.py. Pure."""

from collections.abc import Sequence

import numpy as np

from replay.plan.plan import Plan
from tracer.words import Tokens, places


def prompt_places(plan: Plan, rows: Sequence[int], salt: int, vocabulary_size: int) -> list[Tokens]:
    """The prompts of these requests as places in the vocabulary, each exactly `input_tokens` long.

    A block's tokens follow from its id and the salt alone, a tail's from the tail's id; many short prompts at once cost little
    more than one.
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
    found = places(names, widths, is_tail, salt, vocabulary_size)
    starts = np.concatenate([[0], np.cumsum(widths)[first[1:] - 1]]).tolist()
    lengths = plan.input_tokens[wanted].tolist()
    return [found[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def spliced(own: Tokens, previous: Tokens | None, shared_tokens: int) -> tuple[Tokens, bool]:
    """A later turn's prompt with the conversation as it really went for its first `shared_tokens` tokens.

    `previous` is the previous turn's prompt and answer as sent and received; None or too short: not known, and the
    prompt stays as made from ids (False).
    """
    if previous is None or len(previous) < shared_tokens:
        return own, False
    return np.concatenate([previous[:shared_tokens], own[shared_tokens:]]), True
