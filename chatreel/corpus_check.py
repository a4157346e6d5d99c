"""Whether prompts made of a user's text tokenize to what the trace says: every one of them, lengths and blocks."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from synth.corpus import UNIT_TOKENS, Corpus, block_keys, corpus_of
from synth.frame import ANCHOR, Frame, Message, Render
from synth.layout import Prompt
from synth.text import Batch
from tracer.errors import TraceError

MAX_BYTES = 50_000_000  # of a text that are read


def read_corpus(path: Path, render: Render, frame: Frame, mark: str, block_tokens: int) -> Corpus:
    def inside(words: str) -> list[int]:
        tokens = render([{"role": "user", "content": ANCHOR + words}])
        return tokens[frame.head : len(tokens) - frame.close]

    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES).decode("utf-8", errors="ignore")
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror}", path=str(path), next_step="Check the path") from error
    try:
        return corpus_of(text, inside, mark, UNIT_TOKENS if block_tokens % UNIT_TOKENS == 0 else block_tokens)
    except TraceError as error:
        error.path = str(path)
        raise


@dataclass(frozen=True, slots=True)
class Tokenized:
    """[rows] lengths; keys of their blocks, one list a row."""

    lengths: list[int]
    keys: list[NDArray[np.uint64]]


def tokenized(batch: Batch, rows: list[list[Message]], render: Render) -> Tokenized:
    found = Tokenized([], [])
    for number, chat in enumerate(rows):
        tokens = render(chat)
        found.lengths.append(len(tokens))
        found.keys.append(block_keys(tokens, batch.blocks[number].astype(np.int64), batch.block_tokens))
    return found


@dataclass(slots=True)
class CorpusCheck:
    """Equal blocks have equal keys, others have others. Memory: 8 bytes for each block."""

    path: Path
    checked: int = 0
    left_out: int = 0  # too short for the template, or ending inside a block of others: told apart
    wrong: int = 0
    first: str = ""
    _keys: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(1 << 16, dtype=np.uint64))  # by block id, 0: none yet

    def take(self, batch: Batch, prompts: list[Prompt], found: Tokenized) -> None:
        for number, one in enumerate(prompts):
            if not one.is_exact or one.loses_block:
                self.left_out += 1
                continue
            self.checked += 1
            wanted, length = int(batch.input_tokens[number]), found.lengths[number]
            if length != wanted:
                self._wrong(f"row {batch.first + number}: {length} tokens, wanted {wanted}")
            elif not self._shares(batch.blocks[number], found.keys[number]):
                self._wrong(f"row {batch.first + number}: a block differs from that of an earlier prompt")

    def finish(self) -> None:
        """`TraceError` unless all prompts are what the trace says."""
        keys = self._keys[self._keys > 0]
        alike = len(keys) - len(np.unique(keys))
        if alike:
            self._wrong(f"{alike} blocks are like others, wanted all of their own")
        if self.wrong:
            raise TraceError(
                "prompts made of this text are not what the trace says",
                path=str(self.path),
                seen=f"{self.wrong:,} of {self.checked:,} prompts; {self.first}",
                wanted="exact lengths and sharing after tokenizing again",
                next_step="Nothing was written. Give a longer or plainer text, or leave out --corpus",
            )

    def _shares(self, names: NDArray[np.int32], keys: NDArray[np.uint64]) -> bool:
        if len(names) and int(names.max()) >= len(self._keys):
            more = np.zeros(int(names.max()) + len(self._keys), dtype=np.uint64)
            self._keys = np.concatenate([self._keys, more])
        before = self._keys[names]
        self._keys[names] = np.where(before > 0, before, keys)
        return bool((self._keys[names] == keys).all())

    def _wrong(self, problem: str) -> None:
        self.wrong += 1
        self.first = self.first or problem
