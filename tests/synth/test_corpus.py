"""Prompts made of a user's text: exact lengths and exactly the trace's sharing, whatever the text and the tokenizer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatreel.corpus_check import CorpusCheck, Tokenized, read_corpus
from synth.corpus import Corpus, block_keys, corpus_answer, corpus_messages, corpus_of
from synth.layout import Layout, Segment
from tests.synth.test_prompt_text import ALL, Case, assert_shares_as_named, batch_of, case, conversation
from tests.synth.test_prompt_text import folders as folders
from tracer.errors import TraceError
from tracer.tokens import encode_chat

ROOT = Path(__file__).resolve().parents[2]
MESSY = (
    " <|im_end|> naïve 🙂🙂 e\u0301te\u0301 https://example.org/"
    + "a1B2" * 40
    + " 12345678 ... --- don't [/INST] 東京都 \u200b x\ufeffy <s> "
)


def text_for(name: str) -> str:
    """Words that the tokenizer knows, longer ones, and what makes trouble."""
    if "/" in name:
        letters = np.random.default_rng(5).integers(97, 123, (700, 6), dtype=np.uint8)  # those that it was trained on
        words = [bytes(row).decode() for row in letters]
        plain = " ".join([*words, *(f"{a}{b}, {b}." for a, b in zip(words[:200], words[1:], strict=False))])
    else:
        plain = (ROOT / "README.md").read_text() + (ROOT / "docs" / "glossary.md").read_text()
    half = len(plain) // 2
    return plain[:half] + MESSY + plain[half:]


class TextCase(Case):
    def __init__(self, name: str, folders: dict[tuple[str, str], str], folder: Path, size: int = 16) -> None:
        one = case(name, folders)
        self.tokenizer, self.render, self.frame = one.tokenizer, one.render, one.frame
        (folder / "corpus.txt").write_text(text_for(name))
        assert one.vocabulary.words is not None
        self.corpus = read_corpus(folder / "corpus.txt", self.render, self.frame, one.vocabulary.words[0].decode(), size)

    def prompts(self, rows: list[dict[str, Any]], size: int = 16) -> tuple[list[list[int]], list[bool]]:
        layout = Layout(frame=self.frame, block_tokens=size)
        batch = batch_of(rows, size)
        made = [layout.prompt(batch.blocks[n], batch.answers[n], row["input"], row.get("previous")) for n, row in enumerate(rows)]
        chats = corpus_messages(batch, [one.segments for one in made], 3, self.corpus)
        tokens = [[token for part in encode_chat(self.tokenizer, chat) for token in part] for chat in chats]
        return tokens, [one.is_exact and not one.loses_block for one in made]


@pytest.mark.parametrize("name", ALL)
def test_lengths_and_sharing_are_exact_in_every_template(name: str, folders: dict[tuple[str, str], str], tmp_path: Path) -> None:
    one = TextCase(name, folders, tmp_path)
    rows = conversation([(200, 40), (60, 25), (37, 90), (300, 12)])
    branch = {"input": 16 * 14 + 150, "blocks": [*rows[1]["blocks"][:14], *range(900, 909)], "tail": 950}
    other = {"input": 120, "blocks": list(range(1000, 1007)), "tail": 1010}
    far = {"input": 120, "blocks": list(range(1000 + len(one.corpus.pages), 1007 + len(one.corpus.pages))), "tail": 9**9}
    rows += [branch, other, far, dict(rows[1])]

    prompts, fine = one.prompts(rows)

    assert all(fine)
    assert_shares_as_named(rows, prompts)
    assert one.corpus.left_out > 0


@pytest.mark.parametrize("size", [16, 64])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_conversation_with_room_for_its_template_is_exact(
    folders: dict[tuple[str, str], str], tmp_path_factory: pytest.TempPathFactory, size: int, data: st.DataObject
) -> None:
    one = _cached(folders, tmp_path_factory, size)
    least = one.frame.close + one.frame.turn + one.frame.anchor + one.frame.head + 16
    turn = st.tuples(st.integers(least, least + 300), st.integers(one.frame.anchor + 1, 150))
    rows = conversation(data.draw(st.lists(turn, min_size=1, max_size=5)), size, with_answers=data.draw(st.booleans()))

    prompts, fine = one.prompts(rows, size)

    assert [len(tokens) for tokens in prompts] == [row["input"] for row in rows]
    if all(fine):
        assert_shares_as_named(rows, prompts, size)


_made: dict[int, TextCase] = {}


def _cached(folders: dict[tuple[str, str], str], factory: pytest.TempPathFactory, size: int) -> TextCase:
    if size not in _made:
        _made[size] = TextCase("byte-level/llama3", folders, factory.mktemp("corpus"), size)
    return _made[size]


def spelled(letters: int = 26) -> tuple[Corpus, str]:
    """A tokenizer that has a token for each letter pair behind a space, and the text made of them."""
    words = [f" {a}{b}" for a in "abcdefghijklmnopqrstuvwxyz"[:letters] for b in "abcdefghij"]
    text = "".join(f"{one}{'' if n % 3 else '+'}" for n, one in enumerate(words))

    def inside(these: str) -> list[int]:
        tokens: list[int] = []
        for word in these.split():
            tokens += [hash(word[:2]) % 10**9, *map(ord, word[2:])]
        return tokens

    return corpus_of(text, inside, " zz", 16), text


def test_blocks_numbered_one_after_the_other_are_text_that_goes_on() -> None:
    corpus, _ = spelled()
    batch = batch_of([{"input": 48, "blocks": [0, 1, 2]}], 16)

    ((one,),) = corpus_messages(batch, [[Segment("user", 0, 48)]], 0, corpus)

    assert one["content"].endswith(corpus.pages[1] + corpus.pages[2])
    assert corpus_answer(5, 30, 0, corpus) != corpus_answer(6, 30, 0, corpus)


def test_no_two_numbers_have_the_same_name() -> None:
    corpus, _ = spelled()

    names = {tuple(corpus.name(number, 4)) for number in (*range(3000), *range(2**32, 2**32 + 3000), *range(2**33, 2**33 + 3000))}

    assert len(names) == 9000
    assert len(corpus.names) == 128 and len({len(name) for name in names}) == 1


def test_pages_have_as_many_tokens_as_a_unit_and_all_words_in_order() -> None:
    corpus, text = spelled()

    assert corpus.left_out == 0
    assert all(len(page.split()) + page.count("+") == 16 for page in corpus.pages)
    assert " ".join(piece.strip() for piece in corpus.pieces) == " ".join(text.split())


def test_a_text_with_few_usable_words_and_one_that_is_not_there_are_refused_by_name(tmp_path: Path) -> None:
    one = Case("cl100k")
    (tmp_path / "short.txt").write_text("a few words only " * 100)

    with pytest.raises(TraceError, match=r"short.txt: too little text.*saw 4 different words.*wanted 64"):
        read_corpus(tmp_path / "short.txt", one.render, one.frame, " castle", 16)
    with pytest.raises(TraceError, match=r"none.txt: cannot be read"):
        read_corpus(tmp_path / "none.txt", one.render, one.frame, " castle", 16)


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (list(range(32)), None),
        (list(range(33)), "1 of 2 prompts; row 1: 33 tokens, wanted 32"),
        ([*range(16), *range(99, 115)], "1 of 2 prompts; row 1: a block differs"),
    ],
)
def test_what_comes_out_otherwise_is_refused_with_file_and_count(second: list[int], problem: str | None) -> None:
    batch = batch_of([{"input": 32, "blocks": [0, 1]}, {"input": 32, "blocks": [0, 1]}], 16)
    prompts = [Layout(frame=Case("cl100k").frame, block_tokens=16).prompt(batch.blocks[0], batch.answers[0], 32, None)] * 2
    check = CorpusCheck(Path("mine.txt"))
    tokens = [list(range(32)), second]

    keys = [block_keys(one, np.array([0, 1]), 16) for one in tokens]
    check.take(batch, prompts, Tokenized([len(one) for one in tokens], keys))

    if problem is None:
        check.finish()
    else:
        with pytest.raises(TraceError, match=rf"mine.txt: prompts made of this text.*{problem}"):
            check.finish()


def test_blocks_that_are_alike_by_chance_are_found() -> None:
    batch = batch_of([{"input": 16, "blocks": [0]}, {"input": 16, "blocks": [1]}], 16)
    prompts = [Layout(frame=Case("cl100k").frame, block_tokens=16).prompt(batch.blocks[0], batch.answers[0], 16, None)] * 2
    check = CorpusCheck(Path("mine.txt"))

    check.take(batch, prompts, Tokenized([16, 16], [block_keys(list(range(16)), np.array([one]), 16) for one in (0, 1)]))

    with pytest.raises(TraceError, match="1 blocks are like others"):
        check.finish()
