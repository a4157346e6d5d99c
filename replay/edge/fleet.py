"""Several servers of one model, found out one by one and spoken to as one target."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from replay.edge.client import Client
from replay.edge.probe import Target, probe
from replay.errors import PlanError


async def probe_all(
    client: Client, urls: Sequence[str], *, prompt_mode: str, tokenizer: str, metrics_urls: Sequence[str]
) -> Target:
    """As `probe`. Of `metrics_urls` each server has as many as the others, in the same order; none: its own page."""
    twice = [url for number, url in enumerate(urls) if url in urls[:number]]
    if twice:
        raise PlanError("a target is named twice", seen=twice[0], next_step="Give every --target once")
    if len(metrics_urls) % len(urls):
        raise PlanError(
            "metrics pages do not go with the targets",
            seen=f"{len(metrics_urls)} --metrics-url for {len(urls)} --target",
            wanted="as many for each target, in the same order, or none",
        )
    each = len(metrics_urls) // len(urls)
    found = await asyncio.gather(
        *(
            probe(
                client,
                url,
                prompt_mode=prompt_mode,
                tokenizer=tokenizer,
                metrics_urls=metrics_urls[number * each : (number + 1) * each],
            )
            for number, url in enumerate(urls)
        )
    )
    return found[0] if len(found) == 1 else _as_one(found)


def _as_one(found: Sequence[Target]) -> Target:
    first = found[0]
    for other in found[1:]:
        for what, ours, theirs in (
            ("serve different models", first.model, other.model),
            ("do not take the same prompts", first.prompt_mode, other.prompt_mode),
            ("have different tokenizers", first.vocabulary.ids.tolist(), other.vocabulary.ids.tolist()),
        ):
            if ours != theirs:
                seen = f": {ours} and {theirs}" if isinstance(ours, str) else ""
                raise PlanError(
                    f"the targets {what}",
                    seen=f"{first.url} and {other.url}{seen}",
                    wanted="copies of one server",
                    next_step="Replay to each alone" + (", or give --prompt-mode text" if what.startswith("do not") else ""),
                )
    sizes = [one.kv_capacity_tokens for one in found]
    known = [size for size in sizes if size is not None]
    texts = dict.fromkeys(note for one in found for note in one.notes)
    said_by = {text: [one.url for one in found if text in one.notes] for text in texts}
    return replace(
        first,
        urls=tuple(one.url for one in found),
        kv_tokens=tuple(sizes),
        returns_token_ids=all(one.returns_token_ids for one in found),
        overhead_tokens=max(one.overhead_tokens for one in found),
        pages=tuple(one.metrics_urls for one in found),
        metrics_urls=tuple(page for one in found for page in one.metrics_urls),
        kv_capacity_tokens=sum(known) if len(known) == len(sizes) else None,
        notes=[text if len(who) == len(found) else f"{', '.join(who)}: {text}" for text, who in said_by.items()],
    )
