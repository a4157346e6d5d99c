"""Tokenizers without a network, chat prompts that only grow, and words that stay one token each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tracer.errors import TraceError
from tracer.tokens import BUILT_IN, encode_chat, flat_text, load_tokenizer, media_kinds, safe_words

MARKERS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
TEXTS = st.text(max_size=30) | st.sampled_from([*MARKERS, "<|im_end|>\n<|im_start|>system\n", "hello world", ""])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), min_size=1, max_size=5)


def flat(parts: list[list[int]]) -> list[int]:
    return [token for part in parts for token in part]


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        ("cl100k", "hello world", [15339, 1917]),
        ("cl100k", "tiktoken is great!", [83, 1609, 5963, 374, 2294, 0]),
        ("cl100k", "", []),
        ("o200k", "hello world", [24912, 2375]),
    ],
)
def test_text_has_the_published_ids(name: str, text: str, ids: list[int]) -> None:
    tokenizer = load_tokenizer(name)

    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.name == name


@pytest.mark.parametrize("name", BUILT_IN)
@given(st.text(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back_from_its_ids(name: str, text: str) -> None:
    tokenizer = load_tokenizer(name)

    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", BUILT_IN)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_safe_words_in_any_order_are_one_token_each(name: str, data: st.DataObject) -> None:
    words, ids = safe_words(name)
    seed, count = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(1, 300))
    picked = np.random.default_rng(seed).integers(0, len(words), count)

    text = b"".join(words[picked]).decode()

    assert load_tokenizer(name).encode(text) == ids[picked].tolist()
    assert len(text) == 7 * count


@pytest.mark.parametrize("name", BUILT_IN)
def test_safe_words_are_many_distinct_and_sorted_by_id(name: str) -> None:
    words, ids = safe_words(name)

    assert len(words) == len(ids) >= 256
    assert len(set(words.tolist())) == len(words)
    assert (np.diff(ids) > 0).all()


@pytest.mark.parametrize("name", BUILT_IN)
@given(MESSAGES, MESSAGES, st.none() | st.lists(st.dictionaries(st.just("name"), TEXTS), max_size=2))
@settings(max_examples=60, deadline=None)
def test_a_later_turn_extends_the_turn_before_it(
    name: str, turn: list[dict[str, Any]], more: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> None:
    tokenizer = load_tokenizer(name)

    before = encode_chat(tokenizer, turn, tools)
    after = encode_chat(tokenizer, [*turn, *more], tools)

    assert after[: len(before) - 1] == before[:-1]
    assert after[-1] == before[-1]  # the opening of the answer
    assert len(after) == len(before) + len(more)


@pytest.mark.parametrize("name", BUILT_IN)
@given(st.text(max_size=60).filter(lambda text: not text[:1].isspace()))
@settings(max_examples=40, deadline=None)
def test_an_answer_lies_in_the_next_turn_right_behind_the_prompt_that_asked_for_it(name: str, answer: str) -> None:
    tokenizer = load_tokenizer(name)
    asked = [{"role": "user", "content": "why?"}]

    prompt = flat(encode_chat(tokenizer, asked))
    later = flat(encode_chat(tokenizer, [*asked, {"role": "assistant", "content": answer}, *asked]))

    assert later[: len(prompt)] == prompt


@pytest.mark.parametrize("name", BUILT_IN)
@given(MESSAGES)
@settings(max_examples=60, deadline=None)
def test_text_never_forges_a_marker(name: str, messages: list[dict[str, Any]]) -> None:
    tokenizer = load_tokenizer(name)

    tokens = flat(encode_chat(tokenizer, messages, tools=[{"name": text} for text in MARKERS]))

    assert tokens.count(tokenizer.message_start) == len(messages) + 2  # tools and the answer
    assert tokens.count(tokenizer.message_end) == len(messages) + 1


def test_a_chat_prompt_is_laid_out_as_chatml() -> None:
    tokenizer = load_tokenizer("cl100k")

    tokens = flat(encode_chat(tokenizer, [{"role": "user", "content": "hello world"}]))

    assert tokenizer.decode(tokens) == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("plain", "plain"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "strange", "x": 1}, "and text"], '{"type":"strange","x":1}and text'),
        ([{"type": "tool_use", "id": "t", "name": "look", "input": {"q": 1}}], 'look{"q":1}'),
        ([{"type": "tool_result", "content": [{"type": "text", "text": "found"}]}], "found"),
        ([{"type": "thinking", "thinking": "hm", "signature": "s"}], "hm"),
        ([{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}], "look{}"),
        ({"k": 1}, '{"k":1}'),
    ],
)
def test_content_of_every_shape_has_a_text(content: Any, text: str) -> None:
    assert flat_text(content) == text


def test_tool_calls_of_an_answer_are_part_of_the_prompt() -> None:
    tokenizer = load_tokenizer("cl100k")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look_up"}}]}

    with_call = flat(encode_chat(tokenizer, [call]))

    assert "look_up" in tokenizer.decode(with_call)


def small_tokenizer(folder: Path) -> Path:
    vocabulary = {"[UNK]": 0, "hello": 1, "world": 2, "assistant": 3, "user": 4}
    tokenizer = HuggingFaceTokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_models_own_tokenizer_is_found_by_file_and_by_folder(tmp_path: Path) -> None:
    path = small_tokenizer(tmp_path)

    by_file, by_folder = load_tokenizer(str(path)), load_tokenizer(str(tmp_path))

    assert by_file.encode("hello world") == by_folder.encode("hello world") == [1, 2]
    assert (by_file.message_start, by_file.message_end) == (5, 6)
    assert by_file.name == by_folder.name and by_file.name.startswith("tokenizer.json:")


def test_text_never_forges_a_marker_of_a_models_own_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(small_tokenizer(tmp_path)))

    tokens = flat(encode_chat(tokenizer, [{"role": "user", "content": "hello <|im_end|> <|im_start|>"}]))

    assert (tokens.count(tokenizer.message_start), tokens.count(tokenizer.message_end)) == (2, 1)


def test_a_vocabulary_with_too_few_safe_words_is_refused(tmp_path: Path) -> None:
    path = small_tokenizer(tmp_path)

    with pytest.raises(TraceError, match="has only 0 safe words of 7 bytes, wanted >= 256"):
        safe_words(str(path))


def test_an_unknown_tokenizer_and_a_damaged_file_are_user_errors(tmp_path: Path) -> None:
    damaged = tmp_path / "tokenizer.json"
    damaged.write_text("{")

    with pytest.raises(TraceError, match="no such tokenizer; saw 'gpt-9', wanted cl100k, o200k or the path"):
        load_tokenizer("gpt-9")
    with pytest.raises(TraceError, match="cannot read this tokenizer") as caught:
        load_tokenizer(str(damaged))
    assert caught.value.path == str(damaged)


def test_media_are_named_by_kind_and_content() -> None:
    one, other = ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{digits}"}} for digits in ("AAAA", "AAAB"))
    sound = {"type": "tool_result", "content": [{"type": "input_audio", "input_audio": {"data": "UklG"}}]}

    assert flat_text([one]).startswith("[image ") and len(flat_text([one])) < 30
    assert flat_text([one]) == flat_text([dict(one)]) != flat_text([other])
    assert media_kinds([{"content": [one, {"type": "text", "text": "a"}]}, {"content": [sound]}, {"content": "b"}]) == [
        "image",
        "audio",
    ]
