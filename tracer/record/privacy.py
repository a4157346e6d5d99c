"""The recording's secret key and all that is made with it. What leaves here confirms no guess without the key.

BLAKE2b in its keyed mode is a MAC (RFC 7693). An unkeyed chained hash would be worse than none: who knows the template
extends it block by block and searches a 16-token tail alone.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.schema import BASE_BLOCK_TOKENS

KEY_BYTES = 32
DIGEST_BYTES = 8  # 2^64: at 10^8 distinct blocks some collision has a chance of 1 in 3 700
_BLOCK_BYTES = 4 * BASE_BLOCK_TOKENS

Tokens = NDArray[np.uint32]


def create_key(path: Path) -> bytes:
    """New key in a new file (0600). Deleting the file makes the traces made with it unlinkable."""
    secret = os.urandom(KEY_BYTES)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise TraceError(
            "a key stands here already", path=str(path), next_step="Choose another -o path, or remove the old key"
        ) from error
    except OSError as error:
        raise TraceError(f"cannot write the key: {error.strerror}", path=str(path)) from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(secret.hex().encode() + b"\n")
    return secret


def load_key(path: Path) -> bytes:
    try:
        secret = bytes.fromhex(path.read_text("ascii").strip())
    except FileNotFoundError as error:
        raise TraceError("no such key", path=str(path)) from error
    except (ValueError, OSError) as error:
        raise TraceError("not a recording key", path=str(path), wanted=f"{KEY_BYTES} bytes in hex") from error
    if len(secret) != KEY_BYTES:
        raise TraceError("not a recording key", path=str(path), wanted=f"{KEY_BYTES} bytes in hex")
    return secret


class Hasher:
    """Keyed digests of 8 bytes. Each purpose has its own derived key, so equal content links within a purpose only."""

    def __init__(self, secret: bytes) -> None:
        self.key_id = hashlib.blake2b(key=secret, person=b"chatreel-key-id", digest_size=8).hexdigest()
        self._blocks, self._sessions, self._clients, self._messages = (
            hashlib.blake2b(key=_derived(secret, person), digest_size=DIGEST_BYTES)
            for person in (b"chatreel-blocks", b"chatreel-session", b"chatreel-clients", b"chatreel-message")
        )

    def session(self, *parts: bytes) -> bytes:
        return _digest(self._sessions, *parts)

    def client(self, *parts: bytes) -> bytes:
        return _digest(self._clients, *parts)

    def message(self, *parts: bytes) -> bytes:
        return _digest(self._messages, *parts)

    def root(self, model: str | None, cache_salt: str | None) -> bytes:
        """Where chains begin. Models share no cache, and neither do salts (vLLM RFC 16016)."""
        return _digest(self._blocks, b"root", (model or "").encode(), (cache_salt or "").encode())

    def chain(self, previous: bytes, tokens: Tokens) -> list[bytes]:
        """One digest per full block of 16 tokens; each commits to all before it. `previous`: a root or the last digest."""
        data = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
        base, digests = self._blocks, []
        for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            one = base.copy()
            one.update(previous + data[start : start + _BLOCK_BYTES])
            previous = one.digest()
            digests.append(previous)
        return digests

    def tail(self, previous: bytes, tokens: Tokens) -> bytes | None:
        """Digest of the partial last block; None where there is none. Its length keeps it apart from full blocks."""
        rest = len(tokens) % BASE_BLOCK_TOKENS
        if not rest:
            return None
        one = self._blocks.copy()
        one.update(previous + np.ascontiguousarray(tokens[len(tokens) - rest :], dtype="<u4").tobytes())
        return one.digest()


def _derived(secret: bytes, person: bytes) -> bytes:
    return hashlib.blake2b(key=secret, person=person, digest_size=32).digest()


def _digest(base: "hashlib.blake2b", *parts: bytes) -> bytes:
    """Lengths go in too, so that no two lists of parts give the same input."""
    one = base.copy()
    for part in parts:
        one.update(len(part).to_bytes(8, "little"))
        one.update(part)
    return one.digest()


def as_tokens(ids: Sequence[int]) -> Tokens:
    """Ids as uint32; raises OverflowError or ValueError for what is no token id."""
    return np.array(ids, dtype=np.uint32)
