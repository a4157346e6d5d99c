"""What the target is and can do, found out before anything is measured."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.edge.bodies import PATHS, api_of, body_of
from replay.edge.client import Client
from replay.edge.engines import ServerState
from replay.edge.scrape import scrape
from replay.errors import PlanError
from tracer.tokens import safe_words
from tracer.words import Vocabulary

# Ordinary words in every large vocabulary (Llama, Qwen, Mistral, GPT); below lie bytes and control tokens.
_FALLBACK_IDS = (1000, 32000)
_WORDS_AT_ONCE = 100
PROBE_TOKENS = 16  # the least that /v1/responses takes at some servers
_METRICS_PATHS = ("/metrics", "/prometheus/metrics")  # the second: trtllm-serve, whose first one is JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    model: str
    prompt_mode: str  # ids | text | chat | responses | messages
    returns_token_ids: bool
    vocabulary: Vocabulary
    overhead_tokens: int  # what the server adds to a text prompt: a BOS token, the template of a chat
    metrics_urls: tuple[str, ...]
    has_metrics: bool  # any of these tells of the server; else of GPUs at most
    kv_capacity_tokens: int | None
    block_tokens: int | None = None
    urls: tuple[str, ...] = ()  # of several servers of the same model, see fleet.py; none: `url` is the only one
    kv_tokens: tuple[int | None, ...] = ()  # of each of them
    pages: tuple[tuple[str, ...], ...] = ()  # of each of them: its part of `metrics_urls`
    notes: list[str] = field(default_factory=list)

    @property
    def all_urls(self) -> tuple[str, ...]:
        return self.urls or (self.url,)

    @property
    def each_kv_tokens(self) -> tuple[int | None, ...]:
        return self.kv_tokens or (self.kv_capacity_tokens,)

    @property
    def answers_reused(self) -> bool:
        """Later turns carry the server's own answers, so these are found in its cache."""
        return self.returns_token_ids and self.prompt_mode == "ids"


async def probe(client: Client, url: str, *, prompt_mode: str, tokenizer: str, metrics_urls: Sequence[str]) -> Target:
    """Raises PlanError if nothing usable answers at `url`."""
    notes: list[str] = []
    model = await _model(client, url)
    vocabulary = await _vocabulary(client, url, model, tokenizer, notes)
    returns_ids = False
    overhead = 0
    mode = prompt_mode
    if mode in ("auto", "ids"):
        accepted, returns_ids = await _takes_ids(client, url, model, vocabulary)
        if not accepted and mode == "ids":
            raise PlanError("the target does not take token ids on /v1/completions", path=url, next_step="Use --prompt-mode text")
        if not accepted:
            notes.append("the target does not take token ids, so prompts are sent as text that re-tokenizes exactly")
        mode = "ids" if accepted else "text"
    if mode != "ids":
        overhead = await _text_overhead(client, url, model, mode, vocabulary, notes)
    pages = await _metrics_pages(client, url, metrics_urls, notes)
    return Target(
        url=url,
        model=model,
        prompt_mode=mode,
        returns_token_ids=returns_ids,
        vocabulary=vocabulary,
        overhead_tokens=overhead,
        metrics_urls=tuple(pages),
        has_metrics=any(not one.is_of_gpus for one in pages.values()),
        kv_capacity_tokens=_joint_capacity(pages, notes),
        block_tokens=next((one.block_tokens for one in pages.values() if one.block_tokens), None),
        notes=notes,
    )


async def _metrics_pages(client: Client, url: str, named: Sequence[str], notes: list[str]) -> dict[str, ServerState]:
    """Raises PlanError if a page that was asked for is not one: hours later its figures would be missing."""
    found = {}
    for page in named:
        state = await scrape(client.http, page)
        if state is None:
            raise PlanError(
                "no metrics here that are known",
                path=page,
                wanted="the metrics page of vLLM, SGLang, TensorRT-LLM, TGI, llama.cpp or Dynamo, or of a DCGM exporter",
                next_step="Check --metrics-url; SGLang wants --enable-metrics, llama.cpp --metrics",
            )
        found[page] = state
    return found if any(not one.is_of_gpus for one in found.values()) else found | await _own_page(client, url, notes)


async def _own_page(client: Client, url: str, notes: list[str]) -> dict[str, ServerState]:
    for path in _METRICS_PATHS:
        state = await scrape(client.http, url + path)
        if state is not None:
            return {url + path: state}
    notes.append(f"no metrics at {url}{_METRICS_PATHS[0]}: KV usage, preemptions and queue cannot be shown")
    return {}


def _joint_capacity(pages: dict[str, ServerState], notes: list[str]) -> int | None:
    engines = [one for one in pages.values() if not one.is_of_gpus]
    sizes = [one.kv_capacity_tokens for one in engines]
    known = [one for one in sizes if one is not None]
    if not known or (None in sizes and not all(one.front for one in engines if one.kv_capacity_tokens is None)):
        return None
    if len(known) > 1:
        notes.append(
            f"{len(known)} KV caches are predicted as one of {sum(known):,} tokens: a prefix-aware router comes near that, "
            "round robin stays below"
        )
    return sum(known)


async def _model(client: Client, url: str) -> str:
    try:
        response = await client.http.get(url + "/v1/models", timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PlanError(
            "the target cannot be reached",
            path=url,
            seen=f"{type(error).__name__}: {error}",
            wanted="an OpenAI-compatible server",
            next_step="Start one (for example `chatreel serve`) or check --target",
        ) from error
    try:
        return str(msgspec.json.decode(response.content)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise PlanError(
            "the target names no model",
            path=url + "/v1/models",
            seen=f"HTTP {response.status_code}: {response.text[:120]!r}",
            wanted="a list of models",
            next_step="Check --target: it is the server's root, without /v1; set --api-key-env if it wants a key",
        ) from error


async def _vocabulary(client: Client, url: str, model: str, tokenizer: str, notes: list[str]) -> Vocabulary:
    """Words that the server itself says are one token each; else ids that every large vocabulary has."""
    words, ids = safe_words(tokenizer)
    tokens = await _tokens_of(client, url, model, words)
    if len(tokens) == len(words):
        return Vocabulary(ids=np.array(tokens, dtype=np.int64), words=words)
    if tokens:
        distinct = np.unique(np.array(tokens, dtype=np.int64))
        notes.append(f"the target's tokenizer is not {tokenizer}: give its tokenizer.json with --tokenizer for text prompts")
        return Vocabulary(ids=distinct)
    notes.append(
        f"no /tokenize at the target: token ids {_FALLBACK_IDS[0]}..{_FALLBACK_IDS[1] - 1} are taken to be in its vocabulary"
    )
    return Vocabulary(ids=np.arange(*_FALLBACK_IDS), words=None)


async def _tokens_of(client: Client, url: str, model: str, words: NDArray[np.bytes_]) -> list[int]:
    """The server's own tokens of these words; none if it does not say. Asked piece by piece: its context may be short."""
    texts = [words[start : start + _WORDS_AT_ONCE].tobytes().decode("ascii") for start in range(0, len(words), _WORDS_AT_ONCE)]
    for name, more in (("prompt", {"model": model, "add_special_tokens": False}), ("content", {"add_special": False})):
        tokens: list[int] = []  # by the first name for vLLM and SGLang, by the second for llama.cpp
        for text in texts:
            found = await _tokenized(client, url, {name: text, **more})
            if not found:
                break
            tokens += found
        else:
            return tokens
    return []


async def _tokenized(client: Client, url: str, body: dict[str, object]) -> list[int]:
    try:
        response = await client.http.post(url + "/tokenize", json=body, timeout=30)
        tokens = msgspec.json.decode(response.content)["tokens"] if response.status_code == 200 else None
    except (httpx.HTTPError, msgspec.DecodeError, KeyError, TypeError):
        return []
    return tokens if isinstance(tokens, list) else []


async def _takes_ids(client: Client, url: str, model: str, vocabulary: Vocabulary) -> tuple[bool, bool]:
    """(token-id prompts work and are counted exactly, answers carry their token ids)."""
    prompt = vocabulary.ids[np.linspace(0, len(vocabulary.ids) - 1, 33).astype(np.int64)].tolist()  # its ends too
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "return_token_ids": True}
    seen = await client.exchange(client.endpoint(url + "/v1/completions"), msgspec.json.encode(body))
    usage = seen.facts.usage
    accepted = seen.error_kind in (None, "no_tokens") and usage is not None and usage.prompt_tokens == len(prompt)
    return accepted, accepted and bool(seen.facts.token_ids)


async def _text_overhead(client: Client, url: str, model: str, mode: str, vocabulary: Vocabulary, notes: list[str]) -> int:
    """Tokens that the server adds to a text prompt, from two lengths. Raises PlanError if text does not come out exact."""
    if vocabulary.words is None:
        raise PlanError("text prompts need the target's own tokenizer", path=url, next_step="Give --tokenizer tokenizer.json")
    extra = []
    for length in (40, 200):
        tokens = np.arange(length) * 11 % len(vocabulary.words)
        body = body_of(mode, model, tokens, vocabulary, PROBE_TOKENS)
        seen = await client.exchange(client.endpoint(url + PATHS[mode]), body, api_of(mode))
        if seen.error_kind not in (None, "no_tokens"):
            raise PlanError("the target refuses a text prompt", path=url + PATHS[mode], seen=seen.error_text)
        count = seen.facts.usage.prompt_tokens if seen.facts.usage else None
        if count is None:
            notes.append("the target does not count prompt tokens, so exact lengths cannot be checked")
            return 0
        extra.append(count - length)
    if extra[0] != extra[1] or extra[0] < 0:
        notes.append(f"text prompts do not re-tokenize exactly at the target (off by {extra[0]} and {extra[1]} tokens)")
    return max(extra[0], 0)
