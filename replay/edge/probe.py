"""What the target is and can do, found out before anything is measured."""

from dataclasses import dataclass, field

import httpx
import msgspec
import numpy as np

from replay.edge.client import Client
from replay.edge.scrape import scrape
from replay.errors import PlanError
from tracer.tokens import safe_words
from tracer.words import Vocabulary

# Ordinary words in every large vocabulary (Llama, Qwen, Mistral, GPT); below lie bytes and control tokens.
_FALLBACK_IDS = (1000, 32000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    model: str
    prompt_mode: str  # ids | text
    returns_token_ids: bool
    vocabulary: Vocabulary
    overhead_tokens: int  # what the server adds to a text prompt (a BOS token)
    metrics_url: str
    has_metrics: bool
    kv_capacity_tokens: int | None
    notes: list[str] = field(default_factory=list)

    @property
    def answers_reused(self) -> bool:
        """Later turns carry the server's own answers, so these are found in its cache."""
        return self.returns_token_ids and self.prompt_mode == "ids"


async def probe(client: Client, url: str, *, prompt_mode: str, tokenizer: str, metrics_url: str | None) -> Target:
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
    if mode == "text":
        overhead = await _text_overhead(client, url, model, vocabulary, notes)
    page = metrics_url or url + "/metrics"
    state = await scrape(client.http, page)
    if state is None:
        notes.append(f"no metrics at {page}: KV usage, preemptions and queue cannot be shown")
    return Target(
        url=url,
        model=model,
        prompt_mode=mode,
        returns_token_ids=returns_ids,
        vocabulary=vocabulary,
        overhead_tokens=overhead,
        metrics_url=page,
        has_metrics=state is not None,
        kv_capacity_tokens=state.kv_capacity_tokens if state else None,
        notes=notes,
    )


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
    body = {"model": model, "prompt": words.tobytes().decode("ascii"), "add_special_tokens": False}
    try:
        response = await client.http.post(url + "/tokenize", content=msgspec.json.encode(body), timeout=30)
        tokens = msgspec.json.decode(response.content)["tokens"] if response.status_code == 200 else None
    except (httpx.HTTPError, msgspec.DecodeError, KeyError, TypeError):
        tokens = None
    if isinstance(tokens, list) and len(tokens) == len(words):
        return Vocabulary(ids=np.array(tokens, dtype=np.int64), words=words)
    if isinstance(tokens, list) and tokens:
        distinct = np.unique(np.array(tokens, dtype=np.int64))
        notes.append(f"the target's tokenizer is not {tokenizer}: give its tokenizer.json with --tokenizer for text prompts")
        return Vocabulary(ids=distinct)
    notes.append(
        f"no /tokenize at the target: token ids {_FALLBACK_IDS[0]}..{_FALLBACK_IDS[1] - 1} are taken to be in its vocabulary"
    )
    return Vocabulary(ids=np.arange(*_FALLBACK_IDS), words=None)


async def _takes_ids(client: Client, url: str, model: str, vocabulary: Vocabulary) -> tuple[bool, bool]:
    """(token-id prompts work and are counted exactly, answers carry their token ids)."""
    prompt = vocabulary.ids[np.arange(33) * 7 % len(vocabulary.ids)].tolist()
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "return_token_ids": True}
    seen = await client.exchange(client.endpoint(url + "/v1/completions"), msgspec.json.encode(body))
    usage = seen.facts.usage
    accepted = seen.error_kind in (None, "no_tokens") and usage is not None and usage.prompt_tokens == len(prompt)
    return accepted, accepted and bool(seen.facts.token_ids)


async def _text_overhead(client: Client, url: str, model: str, vocabulary: Vocabulary, notes: list[str]) -> int:
    """Tokens that the server adds to a text prompt, from two lengths. Raises PlanError if text does not come out exact."""
    if vocabulary.words is None:
        raise PlanError("text prompts need the target's own tokenizer", path=url, next_step="Give --tokenizer tokenizer.json")
    extra = []
    for length in (40, 200):
        text = vocabulary.words[np.arange(length) * 11 % len(vocabulary.words)].tobytes().decode("ascii")
        body = {"model": model, "prompt": text, "max_tokens": 1}
        seen = await client.exchange(client.endpoint(url + "/v1/completions"), msgspec.json.encode(body))
        if seen.error_kind not in (None, "no_tokens"):
            raise PlanError("the target refuses a text prompt", path=url + "/v1/completions", seen=seen.error_text)
        count = seen.facts.usage.prompt_tokens if seen.facts.usage else None
        if count is None:
            notes.append("the target does not count prompt tokens, so exact lengths cannot be checked")
            return 0
        extra.append(count - length)
    if extra[0] != extra[1] or extra[0] < 0:
        notes.append(f"text prompts do not re-tokenize exactly at the target (off by {extra[0]} and {extra[1]} tokens)")
    return max(extra[0], 0)
