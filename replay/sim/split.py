"""Prefill and decode on engines of their own, in virtual time. Pure.

A prefill engine computes the prompt, with its prefix cache, and gives the first token (so TTFT knows no transfer); then the
KV of the whole prompt goes over its link, one request at a time; then the request waits for blocks on the decode engine with
the fewest requests, which gives the other tokens. An engine that preempts computes again where it is. Zhong and others,
"DistServe" (OSDI 2024), arXiv 2401.09670; Patel and others, "Splitwise" (ISCA 2024), arXiv 2311.18677.
"""

import heapq
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from replay.errors import PlanError
from replay.outcome import Outcome, Sample
from replay.plan.plan import Plan
from replay.plan.route import Router
from replay.sim.coasting import Coaster
from replay.sim.dense import DenseCache
from replay.sim.engine import Engine, Request
from replay.sim.presets import Preset
from replay.sim.virtual import NS, Fleet, InFlight, token_times_s

# One ConnectX-7 of 400 Gb/s for each GPU: NVIDIA DGX H100 data sheet (8 of them). NVLink of an H100 is 900 GB/s in both
# directions together, so 3,600 Gb/s in one (H100 data sheet).
LINK_GBPS = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How many engines do what. `link_gbps`: out of each GPU of a prefill engine, every GPU sends its own part."""

    prefill: int
    decode: int
    link_gbps: float = LINK_GBPS
    link_latency_s: float = 0.0

    def transfer_s(self, prompt_tokens: int, preset: Preset) -> float:
        """latency + prompt tokens * KV bytes per token / (link * GPUs)"""
        bytes_per_s = self.link_gbps * 1e9 / 8 * preset.gpus
        return self.link_latency_s + prompt_tokens * preset.model.kv_bytes_per_token / bytes_per_s


def check_split(split: Split, preset: Preset) -> None:
    wrong = "prefill and decode cannot be split so"
    if min(split.prefill, split.decode) < 1:
        raise PlanError(wrong, seen=f"{split.prefill} for prefill, {split.decode} for decode", wanted="1 or more of each")
    if split.link_gbps <= 0 or split.link_latency_s < 0:
        raise PlanError(wrong, seen=f"a link of {split.link_gbps:g} Gb/s", wanted="more than 0, and a latency of 0 or more")
    if not preset.model.kv_bytes_per_token:
        raise PlanError(wrong, seen="an engine whose bytes of KV are not known", wanted="a preset or GPU:MODEL")
    if preset.offload_tokens:
        raise PlanError(wrong, seen=f"offload_tokens = {preset.offload_tokens}", wanted="no host memory")


class DecodeEngine(Engine):
    """Requests come with the KV of their prompt, which takes blocks and no step."""

    def _start(self, request: Request, hits: MutableSequence[int], host: int, start_s: float) -> None:
        super()._start(request, hits, host, start_s)
        if not request.preemptions:
            self._grow(request, request.known - 1 - request.computed)
            request.computed = request.known - 1


class SplitFleet(Fleet):
    """Prefill engines first. A transfer that ends is due like an arrival, as row -1 - row."""

    def __init__(
        self, plan: Plan, preset: Preset, split: Split, router: Router, stepwise: bool = False, *, hang_up: bool = False
    ) -> None:
        check_split(split, preset)
        super().__init__(plan, preset, split.prefill + split.decode, router, stepwise, hang_up=hang_up)
        self.split = split
        self.preset = preset
        whole = replace(preset, chunked_prefill=True)  # decode engines get whole prompts, whatever their budget
        for number in range(split.prefill, len(self.engines)):
            cache = self.engines[number].cache
            self.engines[number] = DecodeEngine(whole, cache if isinstance(cache, DenseCache) else None)
        self.coasters = [Coaster(engine) for engine in self.engines] if self.coasters else []
        self.prefill = self.engines[: split.prefill]
        self.sent: dict[int, InFlight] = {}  # by row: what is on its way
        self.link_free_s = [0.0] * split.prefill
        self.first_s: dict[int, tuple[float, int | None]] = {}  # by row: first token, cached tokens

    def _arrive(self, planned_ns: int, row: int) -> Iterator[Outcome]:
        if row < 0:
            if -1 - row in self.sent:  # its client has not gone meanwhile
                self._to_decode(self.sent.pop(-1 - row), (planned_ns + self.before_ns) / NS)
            return
        names = self.names.of(row)
        if (outcome := self._unheard(self.prefill[0], row, planned_ns)) is not None:
            yield outcome
            return
        read = cast("Sequence[int]", names if isinstance(self.engines[0].cache, DenseCache) else names.tolist())
        self._submit(self.prefill, row, planned_ns, range(1), read)

    def _leave(self, one: InFlight) -> Outcome:
        left = super()._leave(one)
        self.sent.pop(one.row, None)
        self.first_s.pop(one.row, None)
        return left

    def _finished(self, one: InFlight) -> Iterator[Outcome]:
        if one.engine >= self.split.prefill or int(self.asked_tokens[one.row]) == 1:
            yield self._ended(one)
            return
        request = one.request
        assert request.first_token_s is not None
        self.first_s[one.row] = request.first_token_s, request.cached_tokens
        free_s = max(request.first_token_s, self.link_free_s[one.engine])
        free_s += self.split.transfer_s(len(request.prompt), self.preset)
        self.link_free_s[one.engine] = free_s
        self.sent[one.row] = one
        heapq.heappush(self.due, (round(free_s * NS), -1 - one.row))

    def _to_decode(self, one: InFlight, at_s: float) -> None:
        load = [len(engine.running) + len(engine.waiting) for engine in self.engines[self.split.prefill :]]
        one.engine = self.split.prefill + load.index(min(load))
        first_s, cached = self.first_s[one.row]
        request = Request(
            prompt=one.request.prompt,
            answer=range(int(self.asked_tokens[one.row])),
            arrival_s=at_s,
            names=one.request.names,
            first_token_s=first_s,
            last_token_s=first_s,
        )
        one.request = request
        self.in_flight[id(request)] = one
        self.engines[one.engine].submit(request)
        request.known += 1

    def _ended(self, one: InFlight) -> Outcome:
        ended = super()._ended(one)
        _, cached = self.first_s.pop(one.row, (0.0, one.request.cached_tokens))
        return msgspec.structs.replace(ended, cached_tokens=cached)

    def _times_s(self, one: InFlight) -> NDArray[np.float64]:
        times_s = token_times_s(one.request, self.ends_s[one.engine])
        if one.engine < self.split.prefill:
            return times_s
        return np.concatenate([[self.first_s[one.row][0]], times_s])

    def sample(self, at_s: float) -> Sample:
        """Queries and hits are those of prefill; what is on its way is in flight."""
        seen = super().sample(at_s)
        queries = float(sum(engine.prefix_cache_queries for engine in self.prefill))
        return msgspec.structs.replace(
            seen,
            prefix_queries_tokens=queries,
            prefix_hits_tokens=float(sum(engine.prefix_cache_hits for engine in self.prefill)),
            prompt_tokens=queries,
            client_in_flight=len(self.in_flight) + len(self.sent),
        )
