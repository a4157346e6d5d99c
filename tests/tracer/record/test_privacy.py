"""Keys stay apart from recordings, and digests mean nothing without them."""

import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.errors import TraceError
from tracer.record.privacy import KEY_BYTES, Hasher, as_tokens, create_key, load_key

HASHER = Hasher(bytes(range(KEY_BYTES)))
ROOT = HASHER.root("m", None)
TOKENS = st.lists(st.integers(0, 200_000), max_size=80).map(as_tokens)


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.key"

    secret = create_key(path)

    assert load_key(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(TraceError, match="a key stands here already"):
        create_key(path)
    assert create_key(tmp_path / "b.key") != secret


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "00" * 33, "\u00e9"])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.key"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(TraceError, match="not a recording key"):
        load_key(path)


@given(tokens=TOKENS, more=TOKENS)
@settings(deadline=None, max_examples=80)
def test_a_longer_prompt_begins_with_the_digests_of_the_shorter_one(tokens: np.ndarray, more: np.ndarray) -> None:
    short = HASHER.chain(ROOT, tokens)
    long = HASHER.chain(ROOT, np.concatenate([tokens, more]))

    assert len(short) == len(tokens) // 16
    assert long[: len(short)] == short


@given(tokens=TOKENS, cut=st.integers(0, 5))
@settings(deadline=None, max_examples=80)
def test_a_chain_can_be_continued_from_any_block(tokens: np.ndarray, cut: int) -> None:
    whole = HASHER.chain(ROOT, tokens)
    cut = min(cut, len(whole))
    last = whole[cut - 1] if cut else ROOT

    assert HASHER.chain(last, tokens[cut * 16 :]) == whole[cut:]
    end = whole[-1] if whole else ROOT
    assert HASHER.tail(end, tokens) == HASHER.tail(end, tokens[len(whole) * 16 :])


def test_one_other_token_changes_all_digests_after_it() -> None:
    tokens = as_tokens(range(64))
    other = tokens.copy()
    other[20] += 1

    a, b = HASHER.chain(ROOT, tokens), HASHER.chain(ROOT, other)

    assert a[0] == b[0]
    assert not set(a[1:]) & set(b)


def test_models_salts_keys_and_purposes_share_no_digests() -> None:
    tokens = as_tokens(range(16))
    roots = {HASHER.root("m", None), HASHER.root("n", None), HASHER.root("m", "salt"), HASHER.root("ms", "alt")}
    other_key = Hasher(bytes(KEY_BYTES))

    assert len(roots) == 4
    assert HASHER.chain(ROOT, tokens) != other_key.chain(other_key.root("m", None), tokens)
    assert HASHER.key_id != other_key.key_id
    assert len({HASHER.session(b"x"), HASHER.client(b"x"), HASHER.message(b"x")}) == 3
    assert HASHER.client(b"ab", b"c") != HASHER.client(b"a", b"bc")


def test_tails_of_whole_blocks_are_absent() -> None:
    assert HASHER.tail(ROOT, as_tokens([])) is None
    assert HASHER.tail(ROOT, as_tokens(range(32))) is None
    assert HASHER.tail(ROOT, as_tokens(range(33))) is not None


def test_what_is_no_token_id_is_refused() -> None:
    with pytest.raises(OverflowError):
        as_tokens([-1])
