"""Arguments and options that several commands take."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer


class By(StrEnum):
    users = "users"
    time = "time"


class PromptMode(StrEnum):
    auto = "auto"
    ids = "ids"
    text = "text"
    chat = "chat"
    responses = "responses"
    messages = "messages"


TRACE = Annotated[Path, typer.Argument(help="A trace file (Parquet) made by chatreel.", show_default=False)]
OUT = Annotated[Path, typer.Option("--out", "-o", help="Where to write.")]
SEED = Annotated[int, typer.Option(help="Same seed, same bytes.")]
SLO = Annotated[list[str] | None, typer.Option(help="METRIC:MS with ttft, tpot or e2e; may be repeated.")]
TARGETS = Annotated[
    list[str], typer.Option(help="Root URL of the server, without /v1; repeat it for copies of it.", show_default=False)
]
TARGET_OR_ENGINE = Annotated[
    list[str] | None,
    typer.Option("--target", help="Root URL of the server, without /v1; repeat it for copies of it; or else --engine."),
]
ROUTE = Annotated[
    Literal["prefix", "sticky", "rr"],
    typer.Option(help="Several targets. prefix: where most is cached by the plan; sticky: by session; rr: in turn."),
]
PROMPT_MODE = Annotated[
    PromptMode, typer.Option(help="Token ids; text that re-tokenizes exactly: plain, or a message by one of three APIs.")
]
TOKENIZER = Annotated[str, typer.Option(help="For text prompts: cl100k, o200k or the server's tokenizer.json.")]
API_KEY_ENV = Annotated[str | None, typer.Option(help="Environment variable with the API key.")]
API_KEY_FILE = Annotated[Path | None, typer.Option(help="File with the API key.")]
WORKERS = Annotated[int, typer.Option(help="Sending processes; each uses up to one core.")]
METRICS_URL = Annotated[
    list[str] | None,
    typer.Option(
        help="Metrics page, if not TARGET/metrics; repeat it for servers behind a router, for each target, or a DCGM exporter."
    ),
]
METRICS_HZ = Annotated[float, typer.Option(help="Readings of metrics per second, up to 10; a slow page has some skipped.")]
GPU = Annotated[
    str | None,
    typer.Option(help="nvml, or nvml:0,1: also read the GPUs of this machine; others by a DCGM exporter's --metrics-url."),
]
SERVE_METRICS = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port of a page with the client's own series, on loopback.")
]
ATTAIN = Annotated[float, typer.Option(help="Share of requests that must meet every SLO.")]
HANG_UP = Annotated[bool, typer.Option(help="On the server, where and when the recorded client did.")]
BY = Annotated[By, typer.Option(help="users: more sharing groups. time: shorter gaps.")]


def counts(text: str, option: str) -> list[int]:
    """`100k,200k,1.5m` or `1,2,4`."""
    factors = {"k": 1_000, "m": 1_000_000}
    try:
        return [round(float(part.rstrip("kKmM")) * factors.get(part[-1:].lower(), 1)) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of counts like 100k,200k or 1,2,4", param_hint=option) from error


class Eviction(StrEnum):
    lru = "lru"
    fifo = "fifo"
    priority = "priority"


BLOCK_TOKENS = Annotated[int | None, typer.Option(help="Tokens of a KV block.")]
EVICTION = Annotated[Eviction, typer.Option(help="Of cached blocks: least recently used, first in, or by --protected-tokens.")]
PROTECTED_TOKENS = Annotated[int, typer.Option(help="priority: the first so many tokens of a request outlive all others.")]
OFFLOAD_TOKENS = Annotated[int, typer.Option(help="KV in host memory, of each replica: evicted blocks go there.")]
OFFLOAD_GB_PER_S = Annotated[float, typer.Option(help="From there to one GPU; a step waits for what it loads.")]
CHUNKED_PREFILL = Annotated[bool, typer.Option(help="Off: a prompt is computed in one step or waits.")]


def numbers[Number: (int, float)](text: str, kind: type[Number], option: str) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 1,2,5", param_hint=option) from error


def cache_settings(
    block_tokens: int | None,
    eviction: Eviction,
    protected_tokens: int,
    offload_tokens: int,
    offload_gb_per_s: float,
    *,
    chunked_prefill: bool,
) -> dict[str, Any]:
    """Fields of `Preset`."""
    return {
        "block_tokens": block_tokens,
        "eviction": eviction.value,
        "protected_tokens": protected_tokens,
        "offload_tokens": offload_tokens,
        "offload_bytes_per_s": offload_gb_per_s * 1e9,
        "chunked_prefill": chunked_prefill,
    }
