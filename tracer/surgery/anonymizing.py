"""A trace that says less about who sent it, and the same about the cache: for giving it away.

A recording holds no text and no names of people, but exact times and lengths can be matched with what an observer saw, and
a client or a fine-tuned model that few requests name is somebody. Blocks stay: hit rates are the same to the token of KV.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from tracer.errors import TraceError
from tracer.schema import Footer, Request
from tracer.surgery.slicing import refuse_same
from tracer.tracefile import TraceWriter, iter_requests, read_footer, read_table

LENGTH_GRID_TOKENS = 16
_SINCE_ARRIVAL = ("dispatch_ns", "ttft_ns", "end_ns", "think_ns", "tool_wait_ns", "client_abort_ns")
_DROPPED = ("source_extra", "upstream", "bytes_in", "bytes_out", "chunk_delta_us", "chunk_tokens", "agent_id")
_NAMES = ("model", "adapter")


class Anonymized(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    rare_clients: int  # now one, or none where even together they are too few
    rare_models: list[str]  # whose requests name none now


def anonymize_trace(path: Path, out_path: Path, *, round_ns: int = 10**9, at_least: int = 10, seed: int = 0) -> Anonymized:
    """Times down to multiples of `round_ns`; lengths drawn anew inside their 16 tokens, so that as many full blocks remain.

    Clients, models and adapters that fewer than `at_least` requests name lose their names, rare clients together as one. The
    wall clock, the source's name and digest, upstreams, exact bytes, chunk times and all that an import kept besides are left
    out. Raises TraceError.
    """
    if round_ns < 1 or at_least < 1:
        raise TraceError("nothing to round or group by", seen=f"{round_ns} ns, {at_least}", wanted="1 or more of each")
    refuse_same(path, out_path)
    footer = read_footer(path)
    table = read_table(path, ["client_id", *_NAMES])
    clients = Counter(table["client_id"].drop_null().to_pylist())
    rare_clients = {client for client, count in clients.items() if count < at_least}
    are_together = sum(clients[one] for one in rare_clients) >= at_least
    rare = {
        name: {one for one, count in Counter(table[name].drop_null().to_pylist()).items() if count < at_least} for name in _NAMES
    }
    new_client: dict[int | None, int] = {}
    lengths = _Lengths(np.random.default_rng(seed), footer.block_tokens)
    with TraceWriter(out_path, _footer(footer, round_ns)) as writer:
        for row in iter_requests(path):
            client = row.get("client_id")
            known = None if client in rare_clients else client
            if client is not None:
                is_named = known is not None or are_together
                row["client_id"] = new_client.setdefault(known, len(new_client)) if is_named else None
            for name in _NAMES:
                if row.get(name) in rare[name]:
                    row[name] = None  # type: ignore[literal-required]
            for name in _DROPPED:
                row.pop(name, None)  # type: ignore[misc]
            _round_times(row, round_ns)
            lengths.change(row)
            writer.write(row)
    return Anonymized(requests=writer.rows_written, rare_clients=len(rare_clients), rare_models=sorted(rare["model"]))


def _footer(footer: Footer, round_ns: int) -> Footer:
    return replace(
        footer,
        source_format="anonymized",
        source_sha256=None,
        epoch_ns=None,
        time_unit_ns=max(round_ns, footer.time_unit_ns),
        time_grid_ns=max(round_ns, footer.time_grid_ns or 0),
        hashes=replace(footer.hashes, key_id=None),
        notes={},
    )


def _round_times(row: Request, round_ns: int) -> None:
    row["arrival_ns"] -= row["arrival_ns"] % round_ns
    for name in _SINCE_ARRIVAL:
        if (since := row.get(name)) is not None:
            row[name] = since - since % round_ns  # type: ignore[literal-required, operator]
    row["itl_summary"] = None


class _Lengths:
    """Draws lengths anew where neither the number of full blocks nor the last token to be looked up changes."""

    def __init__(self, random: np.random.Generator, block_tokens: int) -> None:
        self._random = random
        self._block_tokens = block_tokens
        self._tails: dict[int, int] = {}  # id of a partial last block -> its tokens now: equal tails stay equally long

    def change(self, row: Request) -> None:
        given, answered = row.get("input_tokens"), row.get("output_tokens")
        if given is not None:
            row["input_tokens"] = now = self._prompt(given, row.get("input_tail_id"))
            if answered is not None:
                row["output_tokens"] = self._whole(given + answered, now) - now if answered else 0
        elif answered:
            row["output_tokens"] = self._whole(answered, 0)
        if (reasoning := row.get("reasoning_tokens")) is not None:
            row["reasoning_tokens"] = min(reasoning - reasoning % LENGTH_GRID_TOKENS, row.get("output_tokens") or 0)
        for segment in row.get("segments") or []:
            segment["tokens"] = max(round(segment["tokens"] / LENGTH_GRID_TOKENS) * LENGTH_GRID_TOKENS, 1)

    def _prompt(self, tokens: int, tail_id: int | None) -> int:
        full = tokens - tokens % self._block_tokens
        if tail_id is not None and tail_id in self._tails:
            return full + self._tails[tail_id]
        grid = tokens - tokens % LENGTH_GRID_TOKENS
        now = tokens if tokens == grid else grid + int(self._random.integers(1, LENGTH_GRID_TOKENS - 1))  # room for an answer
        if tail_id is not None:
            self._tails[tail_id] = now - full
        return now

    def _whole(self, tokens: int, prompt_now: int) -> int:
        """Prompt and answer in the same 16 tokens as before, the answer at least one token."""
        grid = tokens - tokens % LENGTH_GRID_TOKENS
        first = max(grid, prompt_now + 1)
        return int(self._random.integers(first, grid + LENGTH_GRID_TOKENS))
