"""Text of a trace: exact lengths and exactly the trace's sharing after tokenizing it again, inside chat templates."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, ByteLevelBPETokenizer, SentencePieceBPETokenizer

from synth.frame import Frame, measured, measured_plain, render_with
from synth.layout import Layout, Marks, OpenSessions, Previous, Segment
from synth.text import Batch, messages, prompt_words
from tracer.blocks import Blocks
from tracer.errors import TraceError
from tracer.tokens import encode_chat, load_tokenizer, safe_words
from tracer.words import Vocabulary

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # the system prompt goes into the last user message
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content %}"
    "{% elif m.role == 'user' %}[INST]{% if loop.last and ns.system %}{{ ns.system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
MARKERS = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
MARKERS += ["[INST]", "[/INST]", "<s>", "</s>"]
FAMILIES = {"byte-level": ByteLevelBPETokenizer, "sentencepiece": SentencePieceBPETokenizer}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """(family, template) -> model folder. Trained here on made-up words of six letters: nothing is downloaded."""
    letters = np.random.default_rng(5).integers(97, 123, (700, 6), dtype=np.uint8)
    words = [bytes(row).decode() for row in letters]
    corpus = [" ".join(words)] * 12 + ["Begin user assistant system\n"] * 20
    made = {}
    for family, kind in FAMILIES.items():
        tokenizer = kind()
        tokenizer.train_from_iterator(corpus, vocab_size=6000, min_frequency=2)
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
        for name, source in {**TEMPLATES, "mistral": MISTRAL}.items():
            folder = tmp_path_factory.mktemp(f"{family}-{name}")
            tokenizer.save(str(folder / "tokenizer.json"))
            bos = "<|begin_of_text|>" if name == "llama3" else "<s>"
            (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "chat_template": source}))
            made[family, name] = str(folder)
    return made


class Case:
    """A tokenizer with its frame and words."""

    def __init__(self, name: str) -> None:
        self.tokenizer = load_tokenizer(name)
        words, ids = safe_words(name)
        self.vocabulary = Vocabulary(words=words, ids=ids)
        self.width = words.itemsize
        self.render = render_with(self.tokenizer)
        self.frame = measured(self.render, words[0].decode())

    def prompts(self, rows: list[dict[str, Any]], size: int = 16) -> tuple[list[list[int]], list[bool]]:
        """Tokens of each row's prompt, as a server would count them; and which the layout calls exact and whole."""
        layout, found, fine = Layout(frame=self.frame, block_tokens=size), [], []
        batch = batch_of(rows, size)
        words = prompt_words(batch, 3, self.vocabulary)
        for number, row in enumerate(rows):
            one = layout.prompt(batch.blocks[number], batch.answers[number], row["input"], row.get("previous"))
            chat = messages(one.segments, words[number], self.width)
            found.append([token for part in encode_chat(self.tokenizer, chat) for token in part])
            fine.append(one.is_exact and not one.loses_block)
        return found, fine


def batch_of(rows: list[dict[str, Any]], size: int) -> Batch:
    return Batch(
        first=0,
        block_tokens=size,
        input_tokens=np.array([row["input"] for row in rows]),
        output_tokens=np.array([row.get("output", 1) for row in rows]),
        blocks=Blocks.from_lists([row["blocks"] for row in rows]),
        answers=Blocks.from_lists([row.get("answer", []) for row in rows]),
        tail_id=np.array([row.get("tail", -1) for row in rows]),
        in_session=np.array(["previous" in row or "answer" in row for row in rows]),
    )


def conversation(lengths: list[tuple[int, int]], size: int = 16, *, with_answers: bool = True) -> list[dict[str, Any]]:
    """Turns of (new tokens, answer tokens), each going on from all before; ids dense in order of first use."""
    rows: list[dict[str, Any]] = []
    path: list[int] = []
    total, next_id = 0, 0
    for new, output in lengths:
        previous = Previous(total - rows[-1]["output"] if rows else 0, total) if rows else None
        total += new
        while len(path) < total // size:
            path.append(next_id)
            next_id += 1
        row: dict[str, Any] = {"input": total, "output": output, "blocks": list(path)}
        if total % size:
            row["tail"], next_id = next_id, next_id + 1
        if with_answers:
            row["answer"] = list(range(next_id, next_id + (total + output) // size - len(path)))
            path += row["answer"]
            next_id += len(row["answer"])
        if previous is not None:
            row["previous"] = previous
        row.setdefault("answer", [])
        total += output
        rows.append(row)
    return rows


def assert_shares_as_named(rows: list[dict[str, Any]], prompts: list[list[int]], size: int = 16) -> None:
    """Equal leading ids, equal leading tokens; and not one whole block more."""
    for row, tokens in zip(rows, prompts, strict=True):
        assert len(tokens) == row["input"]
        for other, others in zip(rows, prompts, strict=True):
            named = next((n for n, (a, b) in enumerate(zip(row["blocks"], other["blocks"], strict=False)) if a != b), None)
            named = min(len(row["blocks"]), len(other["blocks"])) if named is None else named
            differs = next((n for n, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)
            common = min(len(tokens), len(others)) if differs is None else differs
            limit = min(len(row["blocks"]), len(other["blocks"]))
            assert min(common // size, limit) == named


def case(name: str, folders: dict[tuple[str, str], str]) -> Case:
    family, _, template = name.partition("/")
    return Case(folders[family, template] if template else family)


ALL = ["cl100k", "o200k", *(f"{family}/{template}" for family in FAMILIES for template in TEMPLATES)]


@pytest.mark.parametrize("name", ALL)
def test_lengths_and_sharing_are_exact_in_every_template(name: str, folders: dict[tuple[str, str], str]) -> None:
    one = case(name, folders)
    rows = conversation([(200, 40), (60, 25), (37, 90), (300, 12)])
    branch = {"input": 16 * 14 + 150, "blocks": [*rows[1]["blocks"][:14], *range(900, 909)], "tail": 950}
    other = {"input": 120, "blocks": list(range(1000, 1007)), "tail": 1010}
    rows += [branch, other, dict(rows[1])]

    prompts, fine = one.prompts(rows)

    assert all(fine)
    assert_shares_as_named(rows, prompts)


@pytest.mark.parametrize("name", ["cl100k", "byte-level/llama3"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_conversation_with_room_for_its_template_is_exact(
    name: str, folders: dict[tuple[str, str], str], data: st.DataObject
) -> None:
    one = case(name, folders)
    least = one.frame.close + one.frame.turn + one.frame.anchor + one.frame.head + 16
    turn = st.tuples(st.integers(least, least + 200), st.integers(one.frame.anchor + 1, 150))
    rows = conversation(data.draw(st.lists(turn, min_size=1, max_size=6)), with_answers=data.draw(st.booleans()))

    prompts, fine = one.prompts(rows)

    assert [len(tokens) for tokens in prompts] == [row["input"] for row in rows]
    for row, tokens, ok in zip(rows, prompts, fine, strict=True):
        assert ok or row["input"] % 16 < one.frame.close  # its end falls into a full block, which is first its own
        assert len(tokens) == row["input"]


def test_a_later_turn_is_the_conversation_before_word_for_word() -> None:
    one = Case("cl100k")
    rows = conversation([(205, 43), (61, 30)])
    batch = batch_of(rows, 16)
    words = prompt_words(batch, 3, one.vocabulary)
    layout = Layout(frame=one.frame, block_tokens=16)

    first, second = (
        messages(
            layout.prompt(batch.blocks[number], batch.answers[number], row["input"], row.get("previous")).segments,
            words[number],
            one.width,
        )
        for number, row in enumerate(rows)
    )

    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[0] == first[0]
    answer = one.tokenizer.encode(second[1]["content"])
    assert len(answer) == 43


def test_a_prompt_shorter_than_its_template_is_told() -> None:
    one = Case("cl100k")
    layout = Layout(frame=one.frame, block_tokens=16)

    found = layout.prompt(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32), 3, None)

    assert not found.is_exact and found.segments[-1].end == found.segments[-1].begin


def test_an_end_inside_a_block_of_others_is_told() -> None:
    one = Case("cl100k")
    layout = Layout(frame=one.frame, block_tokens=16)
    nothing = np.empty(0, dtype=np.int32)

    longer = layout.prompt(np.arange(5, dtype=np.int32), nothing, 85, None)
    shorter = layout.prompt(np.arange(3, dtype=np.int32), nothing, 48, None)

    assert not longer.loses_block and shorter.loses_block
    assert longer.segments == [Segment("user", one.frame.head, 85 - one.frame.close)]


@pytest.mark.parametrize(("template", "moves"), [("chatml", False), ("llama3", False), ("mistral", True)])
def test_a_template_that_moves_the_system_prompt_is_found_out(
    folders: dict[tuple[str, str], str], template: str, moves: bool
) -> None:
    frame = Case(folders["byte-level", template]).frame

    assert frame.moves_system is moves
    assert frame.keeps_history


def test_a_template_whose_tokens_do_not_add_up_is_refused() -> None:
    def doubled(chat: list[dict[str, str]]) -> list[int]:
        return [7] * sum(2 * message["content"].count(" ") for message in chat)

    with pytest.raises(TraceError, match="cannot be exact"):
        measured(doubled, " castle")


def test_a_bare_prompt_has_an_anchor_and_nothing_else() -> None:
    assert measured_plain(load_tokenizer("cl100k")) == Frame(head=1, close=0, anchor=0, turn=0)


def test_a_moved_system_prompt_is_seen_behind_a_long_head_of_the_template():
    def render(chat: list[dict[str, str]]) -> list[int]:
        system, turns = [one for one in chat if one["role"] == "system"], [one for one in chat if one["role"] != "system"]
        tokens = list(range(1000, 1012))
        for one in turns:
            said = [*system, one] if one is turns[-1] else [one]
            tokens += [1, *(token for part in said for token in [5, *[7] * part["content"].count(" w")]), 3]
        return tokens

    assert measured(render, " w").moves_system


def test_marks_come_back_by_block_however_old_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synth.layout.RECENT", 4)
    marks, plain = Marks(), dict[int, list[tuple[int, int]]]()
    rng = np.random.default_rng(0)
    for block in rng.permutation(50).tolist():
        for start in sorted(rng.integers(0, 1 << 31, rng.integers(1, 4)).tolist()):
            marks.add(block, start, start % 2)
            plain.setdefault(block, []).append((start, start % 2))
        asked = rng.permutation(list(plain))[:7].tolist()

        assert marks.of(asked) == [mark for one in asked for mark in plain[one]]


def test_a_session_is_forgotten_with_its_last_turn() -> None:
    turns = [session for start in range(0, 3000, 3) for session in (start, start + 1, start, -1, start + 2, start)]
    last_row = np.zeros(3000, dtype=np.int64)
    last_row[turns] = np.arange(len(turns))
    last_row[-1] = len(turns) - 2
    sessions = OpenSessions(last_row=last_row)
    plain: dict[int, Previous] = {}

    for row, session in enumerate(turns):
        now = Previous(row, row + 1)

        assert sessions.turn(session, row, now) == plain.get(session if session >= 0 else -2)
        plain[session] = now
        assert len(sessions) <= 1

    assert not len(sessions)
