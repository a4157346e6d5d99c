"""Where conversations stop sharing a prefix although they could go on, why, and what that costs. Pure.

A request is held against its previous turn. Sessions told by equal beginnings end where a prompt breaks, so the first turn of
a session is looked for by its history too: messages that only one earlier conversation had. If there is none, it is held
against the last first turn with the same shape (model, set of tools, length of the system prompt). What a request could share
is the previous prompt and the answer to it; what an endless cache finds less than that is lost. Losses below two blocks are
rounding, not breaks.

Causes are read from `segments` where the trace has them. Without them only the pattern of depths is left, and said so.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tracer.analysis.reuse import HitCurve, engine_paths, hit_curve, prompt_tokens, touches_as_engine
from tracer.blocks import Blocks
from tracer.schema import Footer
from tracer.tracefile import blocks as block_column
from tracer.tracefile import column

Ints = NDArray[np.int64]
COLUMNS = [
    "session_id",
    "parent_request_id",
    "agent_id",
    "model",
    "adapter",
    "input_tokens",
    "output_tokens",
    "reasoning_tokens",
    "tools_count",
    "input_blocks",
    "input_tail_id",
    "output_blocks",
    "segments",
]
MIN_LOST_BLOCKS = 2
COMPACTED = 0.9  # of the previous prompt's length: prompts do not shrink by themselves
VOLATILE_SHARE = 0.5  # of a shape's first turns that have a system prompt of their own
MAX_REPAIRED_CAUSES = 6
MAX_REPAIRED_REFERENCES = 5_000_000  # repairing goes block by block
WHY = {
    "volatile_system_prompt": "the system prompt changes from request to request (a clock, an id): move that part to the end",
    "tools_changed": "other tools than in the previous turn: keep the list, and forbid tools by tool_choice instead",
    "tools_reordered": "the same tools in another order: sort them",
    "history_compacted": "the history was shortened: compact rarely and by much, or cut at its end",
    "history_rewritten": "an earlier message was changed: append, do not edit",
    "reasoning_stripped": "the answer comes back without its reasoning, so its blocks are computed again",
    "answer_rewritten": "the answer comes back other than it was generated",
    "model_switched": "another model or adapter answers the next turn: models share no cache",
    "template_switched": "the same messages, but other tokens from the start: template or tokenizer changed",
}


class BreakCause(msgspec.Struct, frozen=True, kw_only=True):
    cause: str
    requests: int
    lost_tokens: int
    share_of_prompt_tokens: float
    depth_tokens_p50: int  # where sharing ends
    example_request: int
    evidence: str  # segments | block depths | model names
    hit_rate_if_fixed: float  # endless memory
    hit_rate_if_fixed_at: dict[str, float]  # KV tokens -> hit rate; empty for a trace too large to repair


class PrefixBreaks(msgspec.Struct, frozen=True, kw_only=True):
    compared: int  # requests that had something to go on from
    broken: int
    lost_tokens: int
    hit_rate: float  # endless memory, as it is
    hit_rate_at: dict[str, float]
    causes: list[BreakCause]  # most tokens lost first


@dataclass(frozen=True, slots=True)
class _Break:
    request: int
    before: int  # the request that it could go on from
    could: int  # blocks
    shared: int  # blocks, with `before`
    lost: int  # blocks
    cause: str


@dataclass(frozen=True, slots=True)
class _Parts:
    """A prompt's segments, as content ids."""

    system: tuple[int, ...]
    tools: tuple[int, ...]
    messages: tuple[int, ...]
    head_tokens: int  # of system and tools
    sizes: tuple[int, ...]  # tokens of the messages

    @property
    def last_tokens(self) -> int:
        """Of the last message: new, whatever was kept of the rest."""
        return self.sizes[-1] if self.sizes else 0


class _View:
    """Columns of a trace, by request."""

    def __init__(self, table: pa.Table, footer: Footer) -> None:
        self.block_tokens = footer.block_tokens
        self.prompts = block_column(table, "input_blocks")
        self.answers = block_column(table, "output_blocks")
        self.tokens = prompt_tokens(table, footer)
        self.outputs = np.maximum(column(table, "output_tokens"), 0)
        self.reasoning = np.maximum(column(table, "reasoning_tokens"), 0)
        self.tools_count = column(table, "tools_count")
        self.session = column(table, "session_id")
        self.parent = column(table, "parent_request_id")
        self.agents = table["agent_id"].to_pylist()
        self.models = list(zip(table["model"].to_pylist(), table["adapter"].to_pylist(), strict=True))
        segments = table["segments"].combine_chunks()
        lengths = pc.list_value_length(segments).fill_null(0).to_numpy(zero_copy_only=False)
        self._offsets = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        flat = segments.flatten()
        self._content = flat.field("content_id").to_pylist()
        self._kinds = flat.field("kind").to_pylist()
        self._tokens = flat.field("tokens").fill_null(0).to_pylist()

    def parts(self, request: int) -> _Parts | None:
        start, end = self._offsets[request], self._offsets[request + 1]
        if start == end:
            return None
        found: dict[str, list[int]] = {"system": [], "tools": [], "messages": []}
        head, sizes = 0, []
        for at in range(start, end):
            kind = self._kinds[at] if self._kinds[at] in found else "messages"
            found[kind].append(self._content[at])
            if kind == "messages":
                sizes.append(self._tokens[at])
            else:
                head += self._tokens[at]
        return _Parts(tuple(found["system"]), tuple(found["tools"]), tuple(found["messages"]), head, tuple(sizes))

    def path(self, request: int) -> NDArray[np.int32]:
        return np.concatenate([self.prompts[request], self.answers[request]])


def find_breaks(table: pa.Table, footer: Footer, sizes_tokens: Iterable[int] = ()) -> PrefixBreaks:
    """From the columns `COLUMNS` in order of arrival; `sizes_tokens`: KV sizes at which a repair is priced too."""
    view = _View(table, footer)
    curve = hit_curve(touches_as_engine(table, footer, footer.block_tokens))
    sizes = list(sizes_tokens)
    before = _by_history(view, _before(view))
    breaks = []
    for request in np.flatnonzero(before >= 0).tolist():
        one = _held_against(view, request, int(before[request]), int(curve.request_hits[request]))
        if one is not None:
            breaks.append(one)
    first = _first_turns(view, before, curve.request_hits)
    breaks += first.breaks
    by_cause: dict[str, list[_Break]] = defaultdict(list)
    for one in breaks:
        by_cause[one.cause].append(one)
    by_loss = sorted(by_cause.items(), key=lambda one: -sum(each.lost for each in one[1]))
    causes = [
        _priced(view, table, cause, found, curve, sizes if place < MAX_REPAIRED_CAUSES else [], before)
        for place, (cause, found) in enumerate(by_loss)
    ]
    return PrefixBreaks(
        compared=int((before >= 0).sum()) + first.compared,
        broken=len(breaks),
        lost_tokens=sum(one.lost for one in breaks) * footer.block_tokens,
        hit_rate=curve.hit_rate_infinite,
        hit_rate_at=_rates(curve, sizes),
        causes=causes,
    )


def _rates(curve: HitCurve, sizes_tokens: list[int]) -> dict[str, float]:
    return {str(size): curve.hit_rate_at(size // curve.unit_tokens) for size in sizes_tokens}


def _before(view: _View) -> Ints:
    """The previous turn of each request, [requests]; -1: none. A sub-agent has turns of its own."""
    found = np.full(len(view.prompts), -1, dtype=np.int64)
    last: dict[tuple[int, str | None], int] = {}
    for request, (session, parent) in enumerate(zip(view.session.tolist(), view.parent.tolist(), strict=True)):
        agent = view.agents[request]
        if 0 <= parent < request and view.agents[parent] == agent:
            found[request] = parent
        elif session >= 0 and parent < 0:
            found[request] = last.get((session, agent), -1)
        if session >= 0:
            last[session, agent] = request
    return found


def _by_history(view: _View, before: Ints) -> Ints:
    """`before`, and for first turns the request whose messages they go on from, whatever stands above the messages.

    The longest list of messages that a prompt begins with and that nothing has continued yet; else, as after a compaction, the
    last request of the conversation that alone had one of the older messages.
    """
    found = before.copy()
    names: dict[tuple[int, int], int] = {}  # (name of the messages above, message) -> name
    ended: dict[int, list[int]] = defaultdict(list)  # name of all messages of a request -> requests, not continued
    name_of: dict[int, int] = {}
    conversation = np.arange(len(before))  # named by its first request
    latest: dict[int, int] = {}  # conversation -> its last request
    owner: dict[int, int] = {}  # message -> the only conversation that had it, or -1
    for request in range(len(before)):
        parts = view.parts(request)
        if parts is None:
            continue
        path, above = [], -1
        for content in parts.messages:
            above = names.setdefault((above, content), len(names))
            path.append(above)
        if found[request] < 0 and view.agents[request] is None:
            going_on = next((ended[name][-1] for name in path[-2::-1] if ended.get(name)), -1)
            found[request] = going_on if going_on >= 0 else _owner_of(view, parts, owner, latest)
        last = int(found[request])
        if last >= 0:
            conversation[request] = conversation[last]
            if last in ended.get(name_of.get(last, -1), ()):
                ended[name_of[last]].remove(last)
        own = int(conversation[request])
        latest[own] = request
        if path:
            name_of[request] = path[-1]
            ended[path[-1]].append(request)
        for content in parts.messages:
            if owner.setdefault(content, own) != own:
                owner[content] = -1
    return found


def _owner_of(view: _View, parts: _Parts, owner: dict[int, int], latest: dict[int, int]) -> int:
    """The last request of the conversation that most of the older messages are from; -1: of none, or too little."""
    tokens: Counter[int] = Counter()
    for content, size in zip(parts.messages[:-1], parts.sizes[:-1], strict=True):
        if (own := owner.get(content, -1)) >= 0:
            tokens[own] += size
    if not tokens:
        return -1
    own, size = tokens.most_common(1)[0]
    return latest[own] if size >= MIN_LOST_BLOCKS * view.block_tokens else -1


def _shared(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the common beginning; chained ids differ for good once they differ."""
    size = min(len(a), len(b))
    if not size or a[size - 1] == b[size - 1]:
        return size
    return int(np.argmax(a[:size] != b[:size]))


def _held_against(view: _View, request: int, before: int, hits: int) -> _Break | None:
    prompt, path = view.prompts[request], view.path(before)
    shared = _shared(prompt, path)
    could = min(len(path), len(prompt))
    parts, earlier = view.parts(request), view.parts(before)
    if parts is not None:
        could = min(could, (int(view.tokens[request]) - parts.last_tokens) // view.block_tokens)
    cause = _cause(view, request, before, shared, parts, earlier)
    if cause in ("reasoning_stripped", "answer_rewritten"):
        kept = min(int(view.outputs[before]), _grown(view, request, before, parts, earlier))
        if view.reasoning[before] > 0:
            kept = int(view.outputs[before]) - int(view.reasoning[before])
        could = min(could, (int(view.tokens[before]) + max(kept, 0)) // view.block_tokens)
    lost = could - max(shared, hits)
    return _Break(request, before, could, shared, lost, cause) if lost >= MIN_LOST_BLOCKS else None


def _cause(view: _View, request: int, before: int, shared: int, parts: _Parts | None, earlier: _Parts | None) -> str:
    if view.models[request] != view.models[before]:
        return "model_switched"
    was, now = int(view.tokens[before]), int(view.tokens[request])
    if shared >= len(view.prompts[before]) - 1:  # the block in which the prompt ended takes tokens of the answer
        missing = int(view.outputs[before]) - _grown(view, request, before, parts, earlier)
        is_shorter = missing >= MIN_LOST_BLOCKS * view.block_tokens
        return "reasoning_stripped" if view.reasoning[before] > 0 or is_shorter else "answer_rewritten"
    if parts is not None and earlier is not None:
        if parts.tools != earlier.tools:
            return "tools_reordered" if sorted(parts.tools) == sorted(earlier.tools) else "tools_changed"
        if parts.system != earlier.system:
            return "volatile_system_prompt"
        if parts.messages[: len(earlier.messages)] == earlier.messages:
            return "template_switched"
        return (
            "history_compacted" if now < COMPACTED * was or len(parts.messages) < len(earlier.messages) else "history_rewritten"
        )
    if view.tools_count[request] != view.tools_count[before]:
        return "tools_changed"
    if now < COMPACTED * was:
        return "history_compacted"
    return "history_rewritten"


def _grown(view: _View, request: int, before: int, parts: _Parts | None, earlier: _Parts | None) -> int:
    """Tokens that the prompt has more than the one before, less the messages after the answer where they are known."""
    new = sum(parts.sizes[len(earlier.messages) + 1 :]) if parts is not None and earlier is not None else 0
    return int(view.tokens[request]) - int(view.tokens[before]) - new


@dataclass(frozen=True, slots=True)
class _FirstTurns:
    compared: int
    breaks: list[_Break]


def _first_turns(view: _View, before: Ints, hits: Ints) -> _FirstTurns:
    """First turns of one shape could all begin alike; needs segments, since nothing else tells where the head ends."""
    shapes: dict[object, list[int]] = defaultdict(list)
    parts_of: dict[int, _Parts] = {}
    for request in np.flatnonzero(before < 0).tolist():
        parts = view.parts(request)
        if parts is not None and parts.head_tokens >= MIN_LOST_BLOCKS * view.block_tokens:
            parts_of[request] = parts
            shape = (view.models[request], tuple(sorted(parts.tools)), len(parts.system), parts.head_tokens // view.block_tokens)
            shapes[shape].append(request)
    found, compared = [], 0
    for requests in shapes.values():
        own_systems = Counter(parts_of[one].system for one in requests)
        is_volatile = len(own_systems) > max(2, VOLATILE_SHARE * len(requests))
        for earlier, request in zip(requests, requests[1:], strict=False):
            parts, last = parts_of[request], parts_of[earlier]
            could = min(parts.head_tokens // view.block_tokens, len(view.prompts[request]))
            lost = could - int(hits[request])
            compared += 1
            if lost < MIN_LOST_BLOCKS or (parts.system != last.system and not is_volatile):
                continue
            cause = "template_switched"
            if parts.tools != last.tools:
                cause = "tools_reordered"
            elif parts.system != last.system:
                cause = "volatile_system_prompt"
            shared = _shared(view.prompts[request], view.prompts[earlier])
            found.append(_Break(request, earlier, could, shared, lost, cause))
    return _FirstTurns(compared, found)


def _priced(
    view: _View, table: pa.Table, cause: str, breaks: list[_Break], curve: HitCurve, sizes: list[int], before: Ints
) -> BreakCause:
    lost = sum(one.lost for one in breaks) * view.block_tokens
    prompts = max(curve.prompt_tokens, 1)
    has_parts = all(view.parts(one.request) is not None for one in breaks[:10])
    at: dict[str, float] = {}
    fixed = curve.hit_rate_infinite + lost / prompts
    if sizes and len(view.prompts.ids) + len(view.answers.ids) <= MAX_REPAIRED_REFERENCES:
        repaired = _repaired(view, table, breaks, before)
        at, fixed = _rates(repaired, sizes), repaired.hit_rate_infinite
    return BreakCause(
        cause=cause,
        requests=len(breaks),
        lost_tokens=lost,
        share_of_prompt_tokens=lost / prompts,
        depth_tokens_p50=int(np.median([one.shared for one in breaks])) * view.block_tokens,
        example_request=max(breaks, key=lambda one: one.lost).request,
        evidence="segments" if has_parts else "model names" if cause == "model_switched" else "block depths",
        hit_rate_if_fixed=fixed,
        hit_rate_if_fixed_at=at,
    )


def _repaired(view: _View, table: pa.Table, breaks: list[_Break], before: Ints) -> HitCurve:
    """The curve as if these requests had gone on from the ones before: they get those ones' ids as far as they could share.

    All below takes new names, so that ids stay chained; later turns follow, because names depend on the name above.
    """
    repair = {one.request: one for one in breaks}
    names: dict[tuple[int, int], int] = {}
    paths: list[list[int]] = []
    for request in range(len(view.prompts)):
        original = view.path(request).tolist()
        if request in repair:
            one = repair[request]
            begin = paths[one.before][: one.could]
        else:
            last = int(before[request])
            kept = _shared(view.path(request), view.path(last)) if last >= 0 else 0
            begin = paths[last][:kept] if last >= 0 else []
        above = begin[-1] if begin else -1
        path = list(begin)
        for block in original[len(begin) :]:
            above = names.setdefault((above, block), len(names))
            path.append(above)
        paths.append(path)
    lengths = view.prompts.lengths.tolist()
    tails = column(table, "input_tail_id")
    return hit_curve(
        engine_paths(
            blocks=Blocks.from_lists([path[:size] for path, size in zip(paths, lengths, strict=True)]),
            block_tokens=view.block_tokens,
            tail_id=np.full(len(tails), -1, dtype=np.int64),
            tail_tokens=np.zeros(len(tails), dtype=np.int64),
            input_tokens=view.tokens,
            output_tokens=view.outputs,
            answer_blocks=Blocks.from_lists([path[size:] for path, size in zip(paths, lengths, strict=True)]),
            unit_tokens=view.block_tokens,
        )
    )


def breaks_in_words(found: PrefixBreaks) -> list[str]:
    """Most costly first."""
    if not found.causes:
        if not found.compared:
            return ["Prefix breaks: cannot be told, since no request of this trace is known to go on from another."]
        return [f"No prefix breaks in {found.compared:,} requests that had a turn to go on from."]
    lines = [
        f"Prefix breaks: {found.broken:,} of {found.compared:,} requests stop sharing where they could go on; "
        f"{found.lost_tokens:,} prompt tokens are computed again."
    ]
    for one in found.causes:
        lines.append(
            f"- {one.cause.replace('_', ' ')}: {one.requests:,} requests, {one.lost_tokens:,} tokens "
            f"({one.share_of_prompt_tokens:.1%} of all prompts), at token {one.depth_tokens_p50:,}; fixed, the hit rate would be "
            f"{one.hit_rate_if_fixed:.1%} instead of {found.hit_rate:.1%}. {WHY[one.cause].capitalize()}. "
            f"(e.g. request {one.example_request}; by {one.evidence})"
        )
    return lines
