"""Block ids to tokens: exact lengths, equal for equal ids, fresh under a new salt."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from replay.plan.plan import Plan
from replay.plan.prompts import prompt_places, spliced
from tracer.blocks import Blocks
from tracer.tokens import load_tokenizer, safe_words
from tracer.words import Vocabulary, as_text

ids = st.lists(st.integers(0, 2**31 - 1), max_size=30)
Prompt = tuple[list[int], int]  # block ids, tail tokens


def places_of(prompts: list[Prompt], salt: int, size: int = 3601, rows: list[int] | None = None) -> list[NDArray[np.int64]]:
    """The tail of request i is named 2**31 + i."""
    tails = np.array([tail for _, tail in prompts])
    lengths = np.array([len(blocks) for blocks, _ in prompts]) * 16 + tails
    zeros = np.zeros(len(prompts), dtype=np.int64)
    plan = Plan(
        block_tokens=16,
        source_request_id=zeros,
        session_id=zeros,
        turn=zeros,
        planned_ns=zeros,
        think_ns=zeros - 1,
        parent=zeros - 1,
        parent_tokens=zeros,
        tail_id=np.where(tails > 0, 2**31 + np.arange(len(prompts)), -1),
        tail_tokens=tails,
        input_tokens=lengths,
        output_tokens=zeros + 1,
        asked_tokens=zeros + 1,
        abort_ns=zeros - 1,
        blocks=Blocks.from_lists([blocks for blocks, _ in prompts]),
        answer_blocks=Blocks.from_lists([()] * len(prompts)),
    )
    return prompt_places(plan, range(len(prompts)) if rows is None else rows, salt, size)


@given(st.lists(st.tuples(ids, st.integers(0, 40)), min_size=1, max_size=6), st.data())
def test_prompts_made_together_are_those_made_alone(prompts: list[Prompt], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1))

    together = places_of(prompts, 9, rows=rows)

    for row, places in zip(rows, together, strict=True):
        assert (places == places_of(prompts, 9, rows=[row])[0]).all()


@given(ids, st.integers(0, 15), st.integers(0, 2**32 - 1))
def test_length_is_exact_and_places_are_in_the_vocabulary(blocks: list[int], tail: int, salt: int) -> None:
    places = places_of([(blocks, tail)], salt)[0]

    assert len(places) == len(blocks) * 16 + tail
    assert ((places >= 0) & (places < 3601)).all()


@given(ids.filter(bool), ids)
def test_a_shared_prefix_of_ids_is_a_shared_prefix_of_tokens(shared: list[int], rest: list[int]) -> None:
    a, b = places_of([(shared, 0), (shared + rest, 0)], 1)

    assert (b[: len(a)] == a).all()


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=200, unique=True))
def test_different_ids_give_different_tokens(blocks: list[int]) -> None:
    rows = places_of([(blocks, 0)], 1)[0].reshape(-1, 16)

    assert len(np.unique(rows, axis=0)) == len(blocks)


def test_a_new_salt_makes_everything_new() -> None:
    one, other = (places_of([([0, 1, 2], 0)], salt)[0].reshape(-1, 16) for salt in (1, 2))

    assert not (one == other).all(axis=1).any()


def test_text_re_tokenizes_to_exactly_these_tokens() -> None:
    words, word_ids = safe_words("cl100k")
    places = places_of([(list(range(40)), 5)], 3, len(words))[0]

    text = as_text(places, Vocabulary(ids=word_ids, words=words))

    assert load_tokenizer("cl100k").encode(text) == word_ids[places].tolist()


def test_a_later_turn_carries_the_conversation_as_it_went() -> None:
    own, previous = np.arange(10), np.arange(100, 106)

    assert spliced(own, previous, 6)[0].tolist() == [100, 101, 102, 103, 104, 105, 6, 7, 8, 9]
    assert spliced(own, previous, 6)[1] is True
    assert spliced(own, previous, 7)[1] is False
    assert spliced(own, None, 6)[1] is False
