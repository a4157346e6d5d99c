"""Block ids to tokens: exact lengths, equal for equal ids, fresh under a new salt."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replay.plan.plan import Planned
from replay.plan.prompts import Vocabulary, as_text, prompt_places, spliced
from tracer.tokens import load_tokenizer, safe_words

NONE = np.empty(0, dtype=np.int32)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=30)


def planned(blocks: list[int], tail_tokens: int = 0, tail_id: int | None = None) -> Planned:
    return Planned(
        request_id=0,
        source_request_id=0,
        session_id=0,
        turn=0,
        planned_ns=0,
        think_ns=None,
        parent=None,
        parent_tokens=0,
        blocks=np.array(blocks, dtype=np.int32),
        tail_id=tail_id,
        tail_tokens=tail_tokens,
        input_tokens=len(blocks) * 16 + tail_tokens,
        output_tokens=1,
        answer_blocks=NONE,
    )


@given(ids, st.integers(0, 15), st.integers(0, 2**32 - 1))
def test_length_is_exact_and_places_are_in_the_vocabulary(blocks: list[int], tail: int, salt: int) -> None:
    places = prompt_places(planned(blocks, tail, 7 if tail else None), 16, salt, 3601)

    assert len(places) == len(blocks) * 16 + tail
    assert ((places >= 0) & (places < 3601)).all()


@given(ids.filter(bool), ids)
def test_a_shared_prefix_of_ids_is_a_shared_prefix_of_tokens(shared: list[int], rest: list[int]) -> None:
    a, b = (prompt_places(planned(one), 16, 1, 3601) for one in (shared, shared + rest))

    assert (b[: len(a)] == a).all()


@given(st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=200, unique=True))
def test_different_ids_give_different_tokens(blocks: list[int]) -> None:
    rows = prompt_places(planned(blocks), 16, 1, 3601).reshape(-1, 16)

    assert len(np.unique(rows, axis=0)) == len(blocks)


def test_a_new_salt_makes_everything_new() -> None:
    one, other = (prompt_places(planned([0, 1, 2]), 16, salt, 3601).reshape(-1, 16) for salt in (1, 2))

    assert not (one == other).all(axis=1).any()


def test_text_re_tokenizes_to_exactly_these_tokens() -> None:
    words, word_ids = safe_words("cl100k")
    places = prompt_places(planned(list(range(40)), 5, 99), 16, 3, len(words))

    text = as_text(places, Vocabulary(ids=word_ids, words=words))

    assert load_tokenizer("cl100k").encode(text) == word_ids[places].tolist()


def test_a_later_turn_carries_the_conversation_as_it_went() -> None:
    own, previous = np.arange(10), np.arange(100, 106)

    assert spliced(own, previous, 6)[0].tolist() == [100, 101, 102, 103, 104, 105, 6, 7, 8, 9]
    assert spliced(own, previous, 6)[1] is True
    assert spliced(own, previous, 7)[1] is False
    assert spliced(own, None, 6)[1] is False
