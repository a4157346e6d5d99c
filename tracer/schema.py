"""What a trace is: one row per request attempt, and a footer that says where the rows came from.

Rules: units are in names; absent is null, never 0 or -1; ids are file-local, dense, counted from 0 in first-seen order.
`arrival_ns` counts from the start of the trace; the other `*_ns` columns count from the row's own arrival.
"""

from dataclasses import dataclass, field
from typing import Literal, TypedDict

import msgspec
import pyarrow as pa

SCHEMA_VERSION = 1
BASE_BLOCK_TOKENS = 16  # what vLLM pages by default; coarser blocks are every k-th id, because ids are chained

CountSource = Literal["usage", "tokenizer", "import", "generated"]


class Segment(TypedDict):
    """A part of the prompt with one origin. Not chained: equal content has an equal id wherever it stands."""

    role: str
    kind: str  # system, tools, history, user, passage, ...
    tokens: int
    content_id: int


class ItlSummary(TypedDict):
    """Gaps between tokens where each chunk's token count is known, else between chunks (`unit` says which)."""

    unit: str  # token | chunk
    count: int
    mean_us: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float


class Request(TypedDict, total=False):
    """A trace row. Only `request_id` and `arrival_ns` are always present; a key left out is null in the file."""

    # identity
    request_id: int
    client_id: int | None
    session_id: int | None
    group_id: int | None
    parent_request_id: int | None
    turn: int | None
    wait_for: list[int] | None
    agent_id: str | None
    kind: str | None
    # time, nanoseconds
    arrival_ns: int
    dispatch_ns: int | None
    ttft_ns: int | None
    end_ns: int | None
    think_ns: int | None
    tool_wait_ns: int | None
    # what was asked
    model: str | None
    endpoint: str | None
    adapter: str | None
    stream: bool | None
    max_tokens: int | None
    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed_set: bool | None
    tools_count: int | None
    tool_choice: str | None
    response_format: str | None
    # size, tokens
    input_tokens: int | None
    input_tokens_count_source: CountSource | None
    output_tokens: int | None
    output_tokens_count_source: CountSource | None
    reasoning_tokens: int | None
    cached_tokens: int | None
    cache_write_tokens: int | None
    # sharing
    input_blocks: list[int] | None
    input_tail_id: int | None
    output_blocks: list[int] | None
    segments: list[Segment] | None
    media: list[str] | None
    # result
    finish_reason: str | None
    http_status: int | None
    error_kind: str | None
    client_abort_ns: int | None
    retry_of: int | None
    tool_calls_out: int | None
    itl_summary: ItlSummary | None
    chunk_delta_us: list[int] | None
    chunk_tokens: list[int] | None
    # rest
    upstream: str | None
    bytes_in: int | None
    bytes_out: int | None
    source_extra: str | None


_SEGMENT = pa.struct([("role", pa.string()), ("kind", pa.string()), ("tokens", pa.int32()), ("content_id", pa.int32())])
_ITL = pa.struct(
    [("unit", pa.string()), ("count", pa.int32())]
    + [(name, pa.float64()) for name in ("mean_us", "p50_us", "p90_us", "p99_us", "max_us")]
)

# name, Parquet type, meaning. docs/trace-format.md is generated from this table; a test pins it to `Request`.
COLUMNS: tuple[tuple[str, pa.DataType, str], ...] = (
    ("request_id", pa.int64(), "row number in arrival order, unique in the file"),
    ("client_id", pa.int32(), "who sent it (keyed identity of the credential or user field)"),
    ("session_id", pa.int32(), "conversation"),
    ("group_id", pa.int32(), "sharing group: all requests below one rarely visited prefix-tree node"),
    ("parent_request_id", pa.int64(), "the request whose conversation this one continues"),
    ("turn", pa.int32(), "0 for the first request of a session"),
    ("wait_for", pa.list_(pa.int64()), "requests that had to end before this one could be sent"),
    ("agent_id", pa.string(), "sub-agent inside a session"),
    ("kind", pa.string(), "chat, completion, subagent, or what the source calls it"),
    ("arrival_ns", pa.int64(), "when it arrived, since the start of the trace; never null"),
    ("dispatch_ns", pa.int64(), "when the recorder handed it to the server, since arrival"),
    ("ttft_ns", pa.int64(), "first token (reasoning or answer, not an empty or role-only chunk), since arrival"),
    ("end_ns", pa.int64(), "last byte, since arrival"),
    ("think_ns", pa.int64(), "from the end of the previous turn to this arrival"),
    ("tool_wait_ns", pa.int64(), "part of think_ns spent in tools"),
    ("model", pa.string(), "model name as asked for"),
    ("endpoint", pa.string(), "API path"),
    ("adapter", pa.string(), "LoRA or other adapter; never shares cache with another"),
    ("stream", pa.bool_(), "server-sent events asked for"),
    ("max_tokens", pa.int32(), "output limit asked for"),
    ("n", pa.int32(), "choices asked for"),
    ("temperature", pa.float64(), ""),
    ("top_p", pa.float64(), ""),
    ("top_k", pa.int32(), ""),
    ("presence_penalty", pa.float64(), ""),
    ("frequency_penalty", pa.float64(), ""),
    ("repetition_penalty", pa.float64(), ""),
    ("seed_set", pa.bool_(), "a sampling seed was given (its value is not kept)"),
    ("tools_count", pa.int32(), "tool definitions sent"),
    ("tool_choice", pa.string(), "auto, none, required or named"),
    ("response_format", pa.string(), "type only, never the schema"),
    ("input_tokens", pa.int32(), "prompt length"),
    ("input_tokens_count_source", pa.string(), "usage, tokenizer, import or generated"),
    ("output_tokens", pa.int32(), "answer length, reasoning included"),
    ("output_tokens_count_source", pa.string(), "as for input"),
    ("reasoning_tokens", pa.int32(), "part of output_tokens"),
    ("cached_tokens", pa.int32(), "prompt tokens the server says it took from its cache"),
    ("cache_write_tokens", pa.int32(), "prompt tokens the server says it wrote to its cache"),
    ("input_blocks", pa.list_(pa.int32()), "chained prefix-block ids of the prompt, full blocks only"),
    ("input_tail_id", pa.int32(), "id of the partial last block, in the same id space"),
    ("output_blocks", pa.list_(pa.int32()), "full blocks over prompt + output beyond input_blocks"),
    ("segments", pa.list_(_SEGMENT), "parts of the prompt by origin, not chained"),
    ("media", pa.list_(pa.string()), "kinds of attached media"),
    ("finish_reason", pa.string(), "stop, length, tool_calls, ..."),
    ("http_status", pa.int32(), ""),
    ("error_kind", pa.string(), "null when all went well"),
    ("client_abort_ns", pa.int64(), "when the client hung up, since arrival"),
    ("retry_of", pa.int64(), "request that this one repeats"),
    ("tool_calls_out", pa.int32(), "tool calls in the answer"),
    ("itl_summary", _ITL, "gaps between tokens (or chunks, by unit)"),
    ("chunk_delta_us", pa.list_(pa.int32()), "opt-in: gap before each chunk; the first counts from arrival"),
    ("chunk_tokens", pa.list_(pa.int32()), "opt-in: tokens in each chunk"),
    ("upstream", pa.string(), "which server answered"),
    ("bytes_in", pa.int64(), "request body"),
    ("bytes_out", pa.int64(), "response body"),
    ("source_extra", pa.string(), "JSON: what an import has no column for, so that round trips lose nothing"),
)

SCHEMA = pa.schema([pa.field(name, kind, nullable=name not in ("request_id", "arrival_ns")) for name, kind, _ in COLUMNS])


@dataclass(frozen=True, slots=True, kw_only=True)
class HashScheme:
    """How block ids came about, so that two traces are compared only where that means something."""

    tokenizer: str | None = None
    template: str | None = None
    chained: bool = True
    key_id: str | None = None  # names the key, never holds it
    scope: Literal["global", "local"] = "global"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """Footer metadata of a trace file, stored as one JSON value under the Parquet key `chatreel`."""

    schema_version: int = SCHEMA_VERSION
    producer: str = ""  # program and version
    source_format: str = "chatreel"
    source_sha256: str | None = None
    epoch_ns: int | None = None  # wall clock at arrival_ns == 0, since 1970 (local time if the source has no zone)
    time_unit_ns: int = 1  # finest digit that the source's time stamps carry
    time_grid_ns: int | None = None  # coarser grid on which all stamps lie (Mooncake conversation: 3 s)
    block_tokens: int = BASE_BLOCK_TOKENS
    tail_rule: Literal["ceil", "floor"] | None = None  # does the source give a partial last block an id?
    hashes: HashScheme = field(default_factory=HashScheme)
    losses: dict[str, int] = field(default_factory=dict)  # counted: rows dropped, records torn, bytes unread, ...
    notes: dict[str, str] = field(default_factory=dict)  # what an exporter needs: line ends, zone, ...
    seed: int | None = None

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> "Footer":
        return msgspec.json.decode(raw, type=cls)
