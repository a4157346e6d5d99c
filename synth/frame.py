"""What a chat template puts around messages, in tokens, measured with the template itself. Edge: it tokenizes.

Every message begins with an anchor word without a leading space, because templates trim the text that they are given.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tracer.errors import TraceError
from tracer.tokens import Tokenizer, encode_chat

ANCHOR = "Begin"
type Message = dict[str, str]
type Render = Callable[[list[Message]], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Tokens around the words of messages; anchors are counted with what stands before them.

    head + words + close: a prompt of one message, up to the opening of the answer. close + anchor + words: then an answer.
    turn + words + close: then the next message.
    """

    head: int
    close: int
    anchor: int  # of the answer, behind what `close` opened
    turn: int
    moves_system: bool = False  # the template puts a system prompt elsewhere once there are more turns
    keeps_history: bool = True  # a prompt begins with the prompt of the turn before, and its answer


PLAIN = Frame(head=0, close=0, anchor=0, turn=0)  # a bare prompt, without template; see `measured_plain`


def render_with(tokenizer: Tokenizer) -> Render:
    return lambda messages: [token for part in encode_chat(tokenizer, messages) for token in part]


def measured_plain(tokenizer: Tokenizer) -> Frame:
    return Frame(head=len(tokenizer.encode(ANCHOR)), close=0, anchor=0, turn=0)


def measured(render: Render, word: str) -> Frame:
    """`word`: a safe word with its leading space. Raises TraceError for a template in which tokens do not add up."""
    one, two = (len(render([_user(word * count)])) for count in (3, 11))
    chat = [[3, 2, 4], [3, 9, 4], [3, 2, 13], [10, 2, 4]]
    sums = [len(render(_conversation(word, *counts))) for counts in chat]
    if two - one != 8 or {after - sums[0] for after in sums[1:]} != {7, 9}:
        raise TraceError(
            "this chat template adds tokens that depend on the text, so that lengths cannot be exact",
            seen=f"{two - one} tokens for 8 words more",
            next_step="Use the completions format (vllm_custom), which has no template",
        )
    first, whole = render([_user(word * 3)]), render(_conversation(word, 3, 2, 4))
    place = _words_at(whole, first, 3)
    head, close, anchor, turn = place
    moved = _common(render(_with_system(word, 1)), render(_with_system(word, 2)))
    return Frame(
        head=head,
        close=close,
        anchor=anchor,
        turn=turn,
        moves_system=moved < 8,
        keeps_history=whole[: len(first)] == first,
    )


def _words_at(whole: list[int], first: list[int], words: int) -> tuple[int, int, int, int]:
    """(head, close, anchor, turn): one word's token is found by its runs."""
    token = _run_token(first, words)
    runs = _runs(whole, token)
    if len(runs) != 3:
        raise TraceError("this chat template changes the words that it is given", next_step="Use the completions format")
    (begin, end), (answer, answer_end), (again, _) = runs
    close = len(first) - end
    return begin, close, answer - end - close, again - answer_end


def _run_token(tokens: list[int], words: int) -> int:
    for at in range(len(tokens) - words + 1):
        if len(set(tokens[at : at + words])) == 1:
            return tokens[at]
    raise TraceError("this tokenizer does not keep safe words apart inside the chat template")


def _runs(tokens: list[int], token: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for at, one in enumerate(tokens):
        if one == token and found and found[-1][1] == at:
            found[-1] = (found[-1][0], at + 1)
        elif one == token:
            found.append((at, at + 1))
    return found


def _common(first: list[int], second: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def _user(text: str) -> Message:
    return {"role": "user", "content": ANCHOR + text}


def _conversation(word: str, first: int, answer: int, second: int) -> list[Message]:
    return [_user(word * first), {"role": "assistant", "content": ANCHOR + word * answer}, _user(word * second)]


def _with_system(word: str, turns: int) -> list[Message]:
    system = {"role": "system", "content": ANCHOR + word * 20}
    try_turns = [_user(word * 3)] if turns == 1 else _conversation(word, 3, 2, 4)
    return [system, *try_turns]
