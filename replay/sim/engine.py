"""Continuous batching over a paged KV cache, in virtual time, by the scheduling rules of vLLM V1. Pure.

Nothing here reads a clock: `Engine.step` computes what one step does and how long it lasts, and moves `now_s` there.
"""

from array import array
from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from replay.sim.cache import BlockCache, chained_names
from replay.sim.dense import DenseCache
from replay.sim.eviction import new_cache
from replay.sim.presets import Preset

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Its answer is fixed from the start; the engine decides when each token of it comes. Times are virtual seconds."""

    prompt: Sequence[int]
    answer: Sequence[int]
    arrival_s: float
    ends_with: FinishReason = "length"

    names: Sequence[int] = ()  # of all full blocks of prompt + answer, computed or not
    blocks: MutableSequence[int] = field(default_factory=list)
    named: int = 0  # leading blocks that can be hit by others
    computed: int = 0  # tokens whose KV stands
    known: int = 0  # prompt + answer tokens so far
    cached_tokens: int | None = None  # at first scheduling; None before
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_steps: list[list[int]] = field(default_factory=list)  # runs of steps that gave a token each: [first, last]
    finish_reason: FinishReason | None = None

    @property
    def answered(self) -> int:
        return self.known - len(self.prompt)

    def add_tokens(self, first_step: int, count: int, last_s: float) -> None:
        """`count` steps from `first_step` on have given a token each, the last one at `last_s`."""
        self.known += count
        self.last_token_s = last_s
        if self.token_steps and self.token_steps[-1][1] == first_step - 1:
            self.token_steps[-1][1] += count
        else:
            self.token_steps.append([first_step, first_step + count - 1])


class Token(NamedTuple):
    """`gap_s`: since the token before; None for the first one."""

    request: Request
    token_id: int
    gap_s: float | None


@dataclass(slots=True, kw_only=True)
class Step:
    """What one step did. `tokens` and `finished` are visible at `end_s`, the rest at `start_s`."""

    start_s: float
    end_s: float
    computed_tokens: int
    tokens: list[Token]
    finished: list[Request]
    admitted: list[Request]
    preempted: list[Request]


class Engine:
    """Requests wait first come first served, run together under a token budget, and are preempted last come first.

    `cache`: another than one for any names.
    """

    def __init__(self, preset: Preset, cache: DenseCache | None = None) -> None:
        self.preset = preset
        self.costs = preset.costs
        self.cache: BlockCache | DenseCache = new_cache(preset) if cache is None else cache
        self.max_model_len = min(preset.model.max_model_len, preset.kv_blocks * preset.block_tokens)
        if not preset.chunked_prefill:
            self.max_model_len = min(self.max_model_len, preset.max_num_batched_tokens)
        self.now_s = 0.0
        self.steps = 0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prefix_cache_queries = 0  # tokens, at first scheduling only, as vLLM counts
        self.prefix_cache_hits = 0  # on the GPU
        self.host_hits = 0  # tokens, in host memory beyond them; counted like them
        self.preemptions = 0
        self._load_s = 0.0  # what the next step waits for blocks from host memory

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting)

    @property
    def next_step_s(self) -> float:
        """When the next step starts; not for an idle engine."""
        return self.now_s if self.running else max(self.now_s, self.waiting[0].arrival_s)

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that running requests hold."""
        return 1 - self.cache.free / self.cache.total

    def refusal(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why such a request can never run, or None."""
        if prompt_tokens + max_tokens <= self.max_model_len:
            return None
        return (
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the completion)."
        )

    def submit(self, request: Request) -> None:
        """Queue a request, in order of arrival; it is not admitted before its `arrival_s`.

        Raises ValueError for a request that can never run, or that asks for nothing.
        """
        problem = self.refusal(len(request.prompt), len(request.answer))
        if problem or not request.prompt or not request.answer:
            raise ValueError(problem or "a request needs a prompt token and an answer token")
        if not len(request.names):  # a caller that knows them saves the hashing
            tokens = array("I", request.prompt)
            tokens.extend(request.answer)
            request.names = chained_names(tokens, self.preset.block_tokens)
        request.known = len(request.prompt)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Drop a request that has not finished, wherever it is; finished ones are left alone."""
        if request.finish_reason is not None:
            return
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request, "abort")

    def step(self) -> Step:
        """Run one step. Raises ValueError if the engine is idle."""
        if self.idle:
            raise ValueError("nothing to run")
        start_s = self.next_step_s
        work, preempted, budget = self._continue_running()
        admitted = self._admit(work, budget, start_s)
        self._end_step(start_s, work)
        tokens, finished = self._advance(work)
        return Step(
            start_s=start_s,
            end_s=self.now_s,
            computed_tokens=sum(count for _, count in work),
            tokens=tokens,
            finished=finished,
            admitted=admitted,
            preempted=preempted,
        )

    def _continue_running(self) -> tuple[list[tuple[Request, int]], list[Request], int]:
        """Tokens for the requests in flight, oldest first; the newest are preempted when blocks run out.

        The oldest always gets its blocks, because a request larger than the whole cache is refused.
        """
        work: list[tuple[Request, int]] = []
        preempted: list[Request] = []
        budget = self.preset.max_num_batched_tokens
        running = self.running
        i = 0
        while i < len(running) and budget:
            request = running[i]
            count = min(request.known - request.computed, budget)
            if self._grow(request, count):
                work.append((request, count))
                budget -= count
                i += 1
            else:
                preempted.append(running.pop())
                self._preempt(preempted[-1])
        return work, preempted, budget

    def _admit(self, work: list[tuple[Request, int]], budget: int, start_s: float) -> list[Request]:
        """Start waiting requests while the budget lasts and all their known tokens would fit.

        The whole prompt must fit although only its first chunk takes blocks: vLLM's `scheduler_reserve_full_isl`. So
        whoever was preempted in this step stays out of it: an older request took at least one of its blocks.
        """
        admitted: list[Request] = []
        waiting = self.waiting
        while waiting and budget and len(self.running) < self.preset.max_num_seqs and waiting[0].arrival_s <= start_s:
            request = waiting[0]
            hits = self.hits(request)
            if not self.has_room_for(request, hits):
                break
            host = self._host_run(request, len(hits))
            left = request.known - (len(hits) + host) * self.preset.block_tokens
            if left > budget and not self.preset.chunked_prefill:
                break
            waiting.popleft()
            self._start(request, hits, host, start_s)
            count = min(request.known - request.computed, budget)
            self._grow(request, count)
            work.append((request, count))
            budget -= count
            admitted.append(request)
        return admitted

    def hits(self, request: Request) -> MutableSequence[int]:
        """Cached blocks it would start with. At least the last token is computed, or nothing could be sampled from it."""
        return self.cache.leading_run(request.names, (request.known - 1) // self.preset.block_tokens)

    def has_room_for(self, request: Request, hits: Sequence[int]) -> bool:
        return self.cache.can_hold(hits, self._blocks_for(request.known) - len(hits))

    def _host_run(self, request: Request, hits: int) -> int:
        """Blocks that go on from the hits and are in host memory."""
        if self.cache.host is None:
            return 0
        return self.cache.host.run(request.names[hits : (request.known - 1) // self.preset.block_tokens])

    def _start(self, request: Request, hits: MutableSequence[int], host: int, start_s: float) -> None:
        self.cache.hold(hits)
        request.blocks = hits
        request.named = len(hits)
        gpu_tokens = len(hits) * self.preset.block_tokens
        if host:
            self._load(request, host)
        request.computed = request.named * self.preset.block_tokens
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
            request.scheduled_s = start_s
            self.prefix_cache_queries += len(request.prompt)
            self.prefix_cache_hits += gpu_tokens
            self.host_hits += request.computed - gpu_tokens
        self.running.append(request)

    def _load(self, request: Request, count: int) -> None:
        """Copy blocks from host memory. The step waits for them; writing them there is taken to cost nothing."""
        assert self.cache.host is not None
        names = request.names[request.named : request.named + count]
        for name in names:  # before others are evicted to where they are
            self.cache.host.drop(name)
        loaded = self.cache.take(count)
        self.cache.give_names(loaded, names)
        request.blocks.extend(loaded)
        request.named += count
        self._load_s += count * self.preset.load_block_s

    def _grow(self, request: Request, count: int) -> bool:
        """Take the blocks that `count` more tokens need; full blocks can be hit from now on, as in vLLM."""
        end = request.computed + count
        if count == 1 and end % self.preset.block_tokens > 1:
            return True  # inside a block that it holds
        missing = self._blocks_for(end) - len(request.blocks)
        if missing > self.cache.free:
            return False
        if missing > 0:
            request.blocks.extend(self.cache.take(missing))
        named, full = request.named, end // self.preset.block_tokens
        if named < full:
            self.cache.give_names(request.blocks[named:full], request.names[named:full])
            request.named = full
        return True

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.preset.block_tokens)

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue, to be computed again; what stays cached until then is hit."""
        self._give_up_blocks(request)
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _give_up_blocks(self, request: Request) -> None:
        self.cache.release(request.blocks)
        request.blocks = []
        request.named = 0

    def _end_step(self, start_s: float, work: list[tuple[Request, int]], alike: int = 0, known: int = 0) -> None:
        """`alike`: requests beside them that get their next token each, with so many `known` ones in all."""
        tokens, context, attended = alike, known, known
        for request, count in work:
            tokens += count
            context += request.computed + count
            attended += count * request.computed + count * (count + 1) // 2
        self.now_s = start_s + self.costs.step_s(tokens, context, attended) + self._load_s
        self._load_s = 0.0

    def _advance(self, work: list[tuple[Request, int]]) -> tuple[list[Token], list[Request]]:
        tokens: list[Token] = []
        finished: list[Request] = []
        now_s = self.now_s
        for request, count in work:
            request.computed += count
            if request.computed < request.known:
                continue  # a chunk of a longer prompt
            gap_s = None if request.last_token_s is None else now_s - request.last_token_s
            tokens.append(Token(request, request.answer[request.answered], gap_s))
            if gap_s is None:
                request.first_token_s = now_s
            request.add_tokens(self.steps, 1, now_s)
            if request.answered == len(request.answer):
                finished.append(request)
        self.steps += 1
        self.finish(finished)
        return tokens, finished

    def finish(self, requests: Sequence[Request]) -> None:
        """Running requests have their whole answer."""
        for request in requests:
            self._finish(request, request.ends_with)
        if requests:
            self.running = [request for request in self.running if request.finish_reason is None]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._give_up_blocks(request)
        request.finish_reason = reason
