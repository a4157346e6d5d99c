"""Requests to prompt tokens. Messages seen before are not tokenized again: in a chat only the last ones are new."""

from collections import OrderedDict

import msgspec
import numpy as np

from tracer.record.privacy import Hasher, Tokens, as_tokens
from tracer.tokens import Tokenizer, encode_chat
from tracer.wire.openai import RequestBody, text_prompt, token_prompt

MAX_CACHED_BYTES = 64 << 20
ENTRY_BYTES = 256  # what an entry costs beside its tokens


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer, hasher: Hasher) -> None:
        self.tokenizer = tokenizer
        self._hasher = hasher
        self._opening = as_tokens(encode_chat(tokenizer, [])[-1]) if tokenizer.template is None else as_tokens([])
        self._cache: OrderedDict[bytes, Tokens] = OrderedDict()
        self._cached_bytes = 0

    def chat(self, body: RequestBody) -> tuple[Tokens, list[bytes]]:
        """(tokens of the rendered prompt, a digest per message)."""
        messages = body.messages or []
        digests = [self._hasher.message(msgspec.msgpack.encode(message)) for message in messages]
        if self.tokenizer.template is not None:  # a message's tokens may depend on its neighbours
            return as_tokens(encode_chat(self.tokenizer, messages, body.tools)[0]), digests
        parts = [self._message(digest, message) for digest, message in zip(digests, messages, strict=True)]
        if body.tools:
            parts.insert(0, self._tools(body.tools))
        return np.concatenate([*parts, self._opening]), digests

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
