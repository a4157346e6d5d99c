"""Names of conversation states, made where the content still is. tracer/sessions.py links requests by them.

Chat: the chain of message digests. Raw prompts: a chained block digest, or the digest of the partial block after it.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from tracer.record.privacy import Hasher, Tokens
from tracer.schema import BASE_BLOCK_TOKENS
from tracer.tokens import flat_text

MAX_POSITIONS = 200_000


def chat_extends(hasher: Hasher, messages: Sequence[Mapping[str, Any]], digests: Sequence[bytes]) -> tuple[bytes, list[bytes]]:
    """(name of this prompt, names of the states it extends: before each assistant message, deepest first).

    A state with the very answer comes before the one without: some clients edit answers before they send them back.
    """
    chain, extends = b"", []
    for message, digest in zip(messages, digests, strict=True):
        if chain and message.get("role") == "assistant":
            extends += [chain, _answered(hasher, chain, flat_text(message.get("content")))]
        chain = hasher.message(b"chain", chain, digest)
    return chain, extends[::-1]


def chat_states(hasher: Hasher, chain: bytes, answer: str) -> list[bytes]:
    """Names of the states that a chat leaves: with its answer, and without."""
    return [_answered(hasher, chain, answer), chain]


def _answered(hasher: Hasher, chain: bytes, answer: str) -> bytes:
    return hasher.message(b"answered", chain, answer.strip().encode())


class TailIndex:
    """Where earlier raw requests ended: after which block, and how many tokens on. Bounded; the oldest are forgotten.

    A partial block's digest can only be compared with ours at the same length, so lengths must be remembered.
    """

    def __init__(self, max_positions: int = MAX_POSITIONS) -> None:
        self._max = max_positions
        self._rests: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def add(self, last_block: bytes, rest: int) -> None:
        known = self._rests.get(last_block, ())
        if rest not in known:
            self._rests[last_block] = tuple(sorted((*known, rest), reverse=True))
        self._rests.move_to_end(last_block)
        if len(self._rests) > self._max:
            self._rests.popitem(last=False)

    def extended(self, hasher: Hasher, root: bytes, blocks: Sequence[bytes], tokens: Tokens) -> list[bytes]:
        """Names of known ends inside this prompt (before its own end), deepest first."""
        found = []
        for full in range(len(blocks), -1, -1):
            block = blocks[full - 1] if full else root
            for rest in self._rests.get(block, ()):
                end = full * BASE_BLOCK_TOKENS + rest
                if 0 < end < len(tokens):
                    found.append(hasher.tail(block, tokens[end - rest : end]) or block)
        return found
