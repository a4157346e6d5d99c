"""Requests to prompt tokens. Messages seen before are not tokenized again: in a chat only the last ones are new."""

from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np

from tracer.record.privacy import Hasher, Tokens, as_tokens
from tracer.tokens import Tokenizer, encode_chat
from tracer.wire.openai import RequestBody, text_prompt, token_prompt

MAX_CACHED_BYTES = 64 << 20
ENTRY_BYTES = 256  # what an entry costs beside its tokens
MAX_TOOL_LISTS = 64
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}  # others are a client's own words

Part = tuple[str, str, int, bytes]  # role, kind, tokens, digest of the content; tokens of tools, and of a template's
# messages, are shares of a known sum by their bytes


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer, hasher: Hasher) -> None:
        self.tokenizer = tokenizer
        self._hasher = hasher
        self._opening = as_tokens(encode_chat(tokenizer, [])[-1]) if tokenizer.template is None else as_tokens([])
        self._cache: OrderedDict[bytes, Tokens] = OrderedDict()
        self._cached_bytes = 0
        self._outlines = ChatOutlines(hasher)

    def chat(self, body: RequestBody) -> tuple[Tokens, list[bytes], list[Part]]:
        """(tokens of the rendered prompt, a digest per message, the prompt's parts: tools first, then messages)."""
        messages = body.messages or []
        if self.tokenizer.template is not None:  # a message's tokens may depend on its neighbours
            digests, outline = self._outlines.of(body)
            tokens = as_tokens(encode_chat(self.tokenizer, messages, body.tools)[0])
            return tokens, digests, sized(outline, len(tokens))
        digests = [self._hasher.message(msgspec.msgpack.encode(message)) for message in messages]
        tools = self._outlines.tools(body.tools)
        parts = [self._message(digest, message) for digest, message in zip(digests, messages, strict=True)]
        sizes = [len(one) for one in parts]
        if body.tools:
            parts.insert(0, self._tools(body.tools))
            sizes = _shared_out(len(parts[0]), [size for _, size in tools]) + sizes
        return np.concatenate([*parts, self._opening]), digests, _parts(messages, digests, tools, sizes)

    def raw(self, body: RequestBody) -> Tokens | None:
        """None where one request holds several prompts."""
        ids = token_prompt(body.prompt)
        if ids is not None:
            return as_tokens(ids)
        text = text_prompt(body.prompt)
        return as_tokens(self.tokenizer.encode(text)) if text is not None else None

    def _message(self, digest: bytes, message: dict[str, object]) -> Tokens:
        found = self._cache.get(digest)
        if found is None:
            found = as_tokens(encode_chat(self.tokenizer, [message])[0])
            self._keep(digest, found)
        else:
            self._cache.move_to_end(digest)
        return found

    def _tools(self, tools: list[object]) -> Tokens:
        digest = self._hasher.message(b"tools", msgspec.msgpack.encode(tools))
        found = self._cache.get(digest)
        if found is None:
            found = as_tokens(encode_chat(self.tokenizer, [], tools)[0])
            self._keep(digest, found)
        return found

    def _keep(self, digest: bytes, tokens: Tokens) -> None:
        self._cache[digest] = tokens
        self._cached_bytes += tokens.nbytes + ENTRY_BYTES
        while self._cached_bytes > MAX_CACHED_BYTES:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.nbytes + ENTRY_BYTES


class ChatOutlines:
    """Of a chat what needs no tokens."""

    def __init__(self, hasher: Hasher) -> None:
        self._hasher = hasher
        self._tools: dict[bytes, list[tuple[bytes, int]]] = {}

    def of(self, body: RequestBody) -> tuple[list[bytes], list[Part]]:
        """(a digest per message, the prompt's parts with bytes for tokens)."""
        messages = body.messages or []
        packed = [msgspec.msgpack.encode(message) for message in messages]
        digests = [self._hasher.message(one) for one in packed]
        tools = self.tools(body.tools)
        return digests, _parts(messages, digests, tools, [size for _, size in tools] + [len(one) for one in packed])

    def tools(self, tools: list[Any] | None) -> list[tuple[bytes, int]]:
        """(digest, bytes) of each. Clients send the same ones with every request."""
        if not tools:
            return []
        whole = msgspec.msgpack.encode(tools)
        found = self._tools.get(whole)
        if found is None:
            packed = [msgspec.msgpack.encode(tool) for tool in tools]
            found = [(self._hasher.message(b"tool", one), len(one)) for one in packed]
            if len(self._tools) >= MAX_TOOL_LISTS:
                self._tools.pop(next(iter(self._tools)))
            self._tools[whole] = found
        return found


def _parts(messages: list[dict[str, Any]], digests: list[bytes], tools: list[tuple[bytes, int]], sizes: list[int]) -> list[Part]:
    """What comes after the last answer is new; a system prompt is one wherever it stands."""
    found: list[Part] = [("system", "tools", size, digest) for (digest, _), size in zip(tools, sizes, strict=False)]
    roles = [message.get("role") for message in messages]
    answered = max((k for k, role in enumerate(roles) if role == "assistant"), default=-1)
    for k, (role, digest, size) in enumerate(zip(roles, digests, sizes[len(tools) :], strict=True)):
        name = role if isinstance(role, str) and role in ROLES else "other"
        kind = "system" if name in ("system", "developer") else "user" if k > answered else "history"
        found.append((name, kind, size, digest))
    return found


def sized(outline: list[Part], total: int) -> list[Part]:
    """Its bytes as shares of `total` tokens."""
    sizes = _shared_out(total, [size for _, _, size, _ in outline])
    return [(role, kind, size, digest) for (role, kind, _, digest), size in zip(outline, sizes, strict=True)]


def _shared_out(total: int, weights: list[int]) -> list[int]:
    """Whole numbers in proportion to the weights, `total` in all."""
    if not weights:
        return []
    ends = np.round(np.cumsum(weights) * (total / max(sum(weights), 1))).astype(int)
    return [int(one) for one in np.diff(ends, prepend=0)]
