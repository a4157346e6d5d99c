"""`chatreel materialize`: a trace in, a dataset of real prompts out, checked with the tokenizer itself."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from chatreel.comparing import GATE_MISSED
from chatreel.corpus_check import CorpusCheck, Tokenized, read_corpus, tokenized
from synth.corpus import Corpus, corpus_answer, corpus_messages
from synth.frame import Frame, Message, Render, measured, measured_plain, render_with
from synth.layout import Layout, OpenSessions, Previous, Prompt, Segment
from synth.text import Batch, answer_text, messages, prompt_words
from tracer.blocks import Blocks
from tracer.errors import TraceError
from tracer.tokens import load_tokenizer, safe_words
from tracer.tracefile import blocks, column, iter_tables, read_footer
from tracer.words import Vocabulary

BATCH_TOKENS = 1_000_000
READ_ROWS = 2048
COLUMNS = [
    *("arrival_ns", "session_id", "think_ns", "input_tokens", "output_tokens"),
    *("input_blocks", "input_tail_id", "output_blocks"),
]
FORMATS = {
    "openai": "a request a line: messages, max_tokens, timestamp in ms, session",
    "vllm_custom": "vllm bench serve --dataset-name custom --custom-output-len -1 --skip-chat-template",
    "aiperf": "aiperf profile --custom-dataset-type mooncake_trace --fixed-schedule: messages, with timestamps",
    "aiperf_multi": "aiperf profile --custom-dataset-type multi_turn: a session a line, answers are the server's",
    "sharegpt": "vllm bench serve --dataset-name sharegpt, and all that read ShareGPT: a session a line, a JSON list",
}
WITHOUT_TEMPLATE = {"vllm_custom"}
A_SESSION_A_LINE = {"aiperf_multi", "sharegpt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    format: str = "openai"
    tokenizer: str = "cl100k"
    seed: int = 0
    limit: int | None = None
    check: int = 200
    workers: int = 0  # 0: one per core
    corpus: Path | None = None


@dataclass(slots=True)
class _Tally:
    requests: int = 0
    tokens: int = 0
    lines: int = 0
    too_short: int = 0
    lost_blocks: int = 0
    unusable: int = 0
    checked: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Session:
    think_ms: list[float] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)


def run_materialize(trace: Path, out_path: Path, options: Options, say: Callable[[str], None]) -> int:
    """Exit code: 0, or 4 where a prompt that was checked is not what the trace says."""
    if options.format not in FORMATS:
        raise TraceError("no such format", seen=options.format, wanted=", ".join(FORMATS))
    say(f"seed {options.seed}")
    words, ids = safe_words(options.tokenizer)
    vocabulary: Vocabulary | Corpus = Vocabulary(ids=ids, words=words)
    tokenizer = load_tokenizer(options.tokenizer)
    render = render_with(tokenizer)
    is_plain = options.format in WITHOUT_TEMPLATE
    frame = measured_plain(tokenizer) if is_plain else measured(render, words[0].decode())
    if not is_plain:
        say(f"template: {frame.head} tokens before the first words, {frame.close} up to the answer, {frame.turn} between turns")
        for line in _template_warnings(frame):
            say(line)
    tally = _Tally()
    block_tokens = read_footer(trace).block_tokens
    whole = _whole_prompt(options)
    check: CorpusCheck | None = None
    if options.corpus is not None:
        vocabulary = read_corpus(options.corpus, whole, frame, words[0].decode(), block_tokens)
        check = CorpusCheck(options.corpus)
        say(f"{options.corpus.name}: {len(vocabulary.pieces):,} words are used, as {len(vocabulary.pages):,} pages")
        if vocabulary.left_out:
            say(f"{vocabulary.left_out:,} words left out: too long, or with other tokens beside other words")
    checker = _Checker(whole, block_tokens, check)
    _write(out_path, _lines(trace, frame, vocabulary, options, tally, checker))
    for line in _told(tally, options, out_path):
        say(line)
    if check is not None:
        say(f"checked with the tokenizer: all of {check.checked:,} prompts exact in length and sharing")
        if check.left_out:
            say(f"{check.left_out:,} are not exact, for the reasons above")
            return GATE_MISSED
    return GATE_MISSED if tally.wrong else 0


def _write(out_path: Path, chunks: Iterator[bytes]) -> None:
    """The file appears under its name when it is whole."""
    partial = out_path.with_name(f".{out_path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as out:
            for chunk in chunks:
                out.write(chunk)
        partial.replace(out_path)
    except OSError as error:
        raise TraceError(
            f"cannot write here: {error.strerror}", path=str(out_path), next_step="Choose another -o path"
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _template_warnings(frame: Frame) -> Iterator[str]:
    if frame.moves_system:
        yield "warning: this template moves the system prompt behind earlier turns; so that prefixes hold, all text is the users'"
    if not frame.keeps_history:
        yield "warning: this template changes earlier turns: a turn does not go on from the prompt before, and shares less"


def _told(tally: _Tally, options: Options, out_path: Path) -> Iterator[str]:
    yield f"{tally.requests:,} prompts, {tally.tokens:,} tokens, {tally.lines:,} lines -> {out_path}"
    if tally.unusable:
        yield f"{tally.unusable:,} rows left out: no prompt or answer length (failed requests)"
    if tally.too_short:
        yield f"warning: {tally.too_short:,} prompts are shorter than the template around them, and are longer than recorded"
    if tally.lost_blocks:
        yield f"warning: {tally.lost_blocks:,} prompts end inside a block that others go on from; these share one block less"
    if tally.checked:
        wrong = len(tally.wrong)
        yield f"checked with the tokenizer: {tally.checked - wrong:,} of {tally.checked:,} prompts exact in length and sharing"
        yield from tally.wrong[:3]
    yield f"read by: {FORMATS[options.format]}"


def _lines(
    trace: Path, frame: Frame, vocabulary: Vocabulary | Corpus, options: Options, tally: _Tally, checker: "_Checker"
) -> Iterator[bytes]:
    """Encoded lines, in order. Layout needs one order and is cheap; words are made side by side."""
    last_row = _last_rows(trace, options.limit)
    batches = _laid_out(trace, frame, options, tally, OpenSessions(last_row=last_row))
    if options.format in A_SESSION_A_LINE:
        yield from _by_session(last_row, batches, vocabulary, options, tally, checker)
        return
    workers = options.workers or min(os.cpu_count() or 1, 8)
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(options, vocabulary)) as pool:
        pending: list[tuple[Future[tuple[bytes, Tokenized | None]], _Laid]] = []
        for laid in batches:
            if checker.wanted(options.check, tally):
                checker.check(laid, _messages(laid, options, vocabulary), options.check, tally)
            pending.append((pool.submit(_encoded, laid), laid))
            if len(pending) > 2 * workers:
                yield _received(pending.pop(0), checker)
            tally.lines += len(laid.prompts)
        for one in pending:
            yield _received(one, checker)
    checker.finish()


def _received(one: "tuple[Future[tuple[bytes, Tokenized | None]], _Laid]", checker: "_Checker") -> bytes:
    lines, found = one[0].result()
    if found is not None and checker.whole is not None:
        checker.whole.take(one[1].batch, one[1].prompts, found)
    return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Laid:
    batch: Batch
    prompts: list[Prompt]
    session: NDArray[np.int64]
    arrival_ns: NDArray[np.int64]
    think_ns: NDArray[np.int64]


def _laid_out(trace: Path, frame: Frame, options: Options, tally: _Tally, sessions: OpenSessions) -> Iterator[_Laid]:
    footer = read_footer(trace)
    layout = Layout(frame=frame, block_tokens=footer.block_tokens)
    for table in _portions(trace, options, tally):
        batch, session = _batch(table, tally.requests, footer.block_tokens)
        prompts = []
        for row in range(table.num_rows):
            tokens = int(batch.input_tokens[row])
            now = Previous(tokens, tokens + int(batch.output_tokens[row]))
            before = sessions.turn(int(session[row]), batch.first + row, now)
            one = (
                Prompt([Segment("user", frame.head, tokens)], is_exact=True, loses_block=False)
                if options.format in WITHOUT_TEMPLATE
                else layout.prompt(batch.blocks[row], batch.answers[row], tokens, before)
            )
            prompts.append(one)
            tally.too_short += not one.is_exact
            tally.lost_blocks += one.loses_block
        tally.requests += table.num_rows
        tally.tokens += int(batch.input_tokens.sum())
        yield _Laid(
            batch=batch,
            prompts=prompts,
            session=session,
            arrival_ns=column(table, "arrival_ns"),
            think_ns=column(table, "think_ns"),
        )


def _batch(table: pa.Table, first: int, block_tokens: int) -> tuple[Batch, NDArray[np.int64]]:
    session = column(table, "session_id")
    inputs = column(table, "input_tokens")
    named = blocks(table, "input_blocks")
    room = np.minimum(named.lengths, inputs // block_tokens)  # a tokenizer unlike the server's can name too many
    if (room < named.lengths).any():
        named = Blocks.from_lists([named[row][: room[row]] for row in range(len(named))])
    batch = Batch(
        first=first,
        block_tokens=block_tokens,
        input_tokens=inputs,
        output_tokens=column(table, "output_tokens"),
        blocks=named,
        answers=blocks(table, "output_blocks"),
        tail_id=column(table, "input_tail_id"),
        in_session=session >= 0,
    )
    return batch, session


def _portions(trace: Path, options: Options, tally: _Tally) -> Iterator[pa.Table]:
    """Usable rows, about `BATCH_TOKENS` tokens at a time."""
    for table, unusable in _usable(trace, COLUMNS, options.limit):
        tally.unusable += unusable
        number = np.cumsum(column(table, "input_tokens")) // BATCH_TOKENS
        edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), table.num_rows]
        for begin, end in zip(edges[:-1], edges[1:], strict=True):
            if end > begin:
                yield table.slice(begin, end - begin)


def _usable(trace: Path, columns: list[str], limit: int | None) -> Iterator[tuple[pa.Table, int]]:
    """Rows with lengths, and how many have none, until there are enough."""
    left = limit
    for table in iter_tables(trace, columns, READ_ROWS):
        usable = (column(table, "input_tokens") > 0) & (column(table, "output_tokens") > 0)
        kept = table.filter(pa.array(usable)).slice(0, left)
        yield kept, int((~usable).sum())
        left = None if left is None else left - kept.num_rows
        if left == 0:
            return


def _last_rows(trace: Path, limit: int | None) -> NDArray[np.int64]:
    """By session id: its last row, of the usable ones. 8 bytes a session."""
    last = np.empty(0, dtype=np.int64)
    first = 0
    for table, _ in _usable(trace, ["session_id", "input_tokens", "output_tokens"], limit):
        session = column(table, "session_id")
        if int(session.max(initial=-1)) >= len(last):
            more = np.zeros(int(session.max()) + 1, dtype=np.int64)
            last = np.concatenate([last, more])
        rows = np.arange(first, first + len(session))
        last[session[session >= 0]] = rows[session >= 0]  # of several, the last stays
        first += len(session)
    return last


_worker: dict[str, Any] = {}  # one process, one dataset


def _start_worker(options: Options, vocabulary: Vocabulary | Corpus) -> None:
    _worker.update(options=options, vocabulary=vocabulary)


def _encoded(laid: _Laid) -> tuple[bytes, Tokenized | None]:
    options: Options = _worker["options"]
    encoder = msgspec.json.Encoder()
    rows = _messages(laid, options, _worker["vocabulary"])
    found = tokenized(laid.batch, rows, _whole_prompt(options)) if options.corpus is not None else None
    return encoder.encode_lines(_row(laid, number, one, options.format) for number, one in enumerate(rows)), found


def _whole_prompt(options: Options) -> Render:
    """Tokens of a prompt as the server would count them."""
    tokenizer = load_tokenizer(options.tokenizer)
    return (lambda one: tokenizer.encode(one[0]["content"])) if options.format in WITHOUT_TEMPLATE else render_with(tokenizer)


def _messages(laid: _Laid, options: Options, vocabulary: Vocabulary | Corpus) -> list[list[Message]]:
    if isinstance(vocabulary, Corpus):
        return corpus_messages(laid.batch, [one.segments for one in laid.prompts], options.seed, vocabulary)
    assert vocabulary.words is not None
    width = vocabulary.words.itemsize
    words = prompt_words(laid.batch, options.seed, vocabulary)
    return [messages(one.segments, text, width) for one, text in zip(laid.prompts, words, strict=True)]


def _row(laid: _Laid, number: int, chat: list[Message], name: str) -> dict[str, Any]:
    output, milliseconds = int(laid.batch.output_tokens[number]), int(laid.arrival_ns[number]) / 1e6
    match name:
        case "vllm_custom":
            return {"prompt": chat[0]["content"], "output_tokens": output}
        case "aiperf":
            return {"timestamp": milliseconds, "messages": chat, "output_length": output}
    row: dict[str, Any] = {"messages": chat, "max_tokens": output, "timestamp_ms": milliseconds}
    return {**row, "session": int(laid.session[number])} if laid.session[number] >= 0 else row


def _by_session(
    last_row: NDArray[np.int64],
    batches: Iterator[_Laid],
    vocabulary: Vocabulary | Corpus,
    options: Options,
    tally: _Tally,
    checker: "_Checker",
) -> Iterator[bytes]:
    """A conversation when its last turn has come."""
    alive: dict[int, _Session] = {}
    is_list = options.format == "sharegpt"
    for laid in batches:
        rows = _messages(laid, options, vocabulary)
        if checker.wanted(options.check, tally):
            checker.check(laid, rows, options.check, tally)
        if checker.whole is not None:
            checker.whole.take(laid.batch, laid.prompts, tokenized(laid.batch, rows, checker.render))
        for number, chat in enumerate(rows):
            row, name = laid.batch.first + number, int(laid.session[number])
            one = alive.setdefault(name if name >= 0 else -1 - row, _Session())
            one.turns.append(chat[-1]["content"])
            one.think_ms.append(max(int(laid.think_ns[number]), 0) / 1e6)
            if name >= 0 and last_row[name] > row:
                continue
            del alive[name if name >= 0 else -1 - row]
            line = msgspec.json.encode(_conversation(laid, number, chat, one, row, vocabulary, options))
            yield (b"[\n" if tally.lines == 0 else b",\n") + line if is_list else line + b"\n"
            tally.lines += 1
    checker.finish()
    if is_list and tally.lines:
        yield b"\n]\n"


def _conversation(
    laid: _Laid, number: int, chat: list[Message], session: _Session, row: int, vocabulary: Vocabulary | Corpus, options: Options
) -> dict[str, Any]:
    if options.format == "aiperf_multi":
        turns: list[dict[str, Any]] = [{"text": text} for text in session.turns]
        for turn, think_ms in zip(turns[1:], session.think_ms[1:], strict=True):
            turn["delay"] = think_ms
        return {"session_id": f"session-{row}", "turns": turns}
    who = {"user": "human", "assistant": "gpt"}
    said = [{"from": who[one["role"]], "value": one["content"]} for one in chat]
    tokens = int(laid.batch.output_tokens[number])
    make = corpus_answer if isinstance(vocabulary, Corpus) else answer_text
    text = make(row, tokens, options.seed, vocabulary)  # type: ignore[arg-type]
    return {"id": f"chatreel-{row}", "conversations": [*said, {"from": "gpt", "value": text}]}


class _Checker:
    """Tokenizes the first prompts as a server would: lengths, and that blocks are equal where, and only where, ids are."""

    def __init__(self, render: Render, block_tokens: int, whole: CorpusCheck | None = None) -> None:
        self.render = render
        self.whole = whole  # of a user's text all prompts are checked, by this
        self.block_tokens = block_tokens
        self._tokens_of: dict[int, tuple[int, ...]] = {}
        self._ids_of: dict[tuple[int, ...], int] = {}

    def wanted(self, check: int, tally: _Tally) -> bool:
        return self.whole is None and tally.checked < check

    def finish(self) -> None:
        if self.whole is not None:
            self.whole.finish()

    def check(self, laid: _Laid, rows: list[list[Message]], check: int, tally: _Tally) -> None:
        for number, chat in enumerate(rows[: check - tally.checked]):
            tally.checked += 1
            tokens, row = self.render(chat), laid.batch.first + number
            wanted = int(laid.batch.input_tokens[number])
            problem = f"{len(tokens)} tokens, wanted {wanted}" if len(tokens) != wanted else self._sharing(laid, number, tokens)
            if problem:
                tally.wrong.append(f"row {row}: {problem}")

    def _sharing(self, laid: _Laid, number: int, tokens: list[int]) -> str | None:
        size = self.block_tokens
        parent = -1  # the same tokens behind another prefix are another block
        for place, block in enumerate(laid.batch.blocks[number].tolist()):
            here = tuple(tokens[place * size : (place + 1) * size])
            if self._tokens_of.setdefault(block, here) != here:
                return f"block {place} differs from an earlier prompt with the same block"
            if self._ids_of.setdefault((parent, *here), block) != block:
                return f"block {place} is that of another prompt, wanted one of its own"
            parent = block
        return None
