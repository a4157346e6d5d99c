"""What travels between proxy and worker, and from worker to segment, as tagged msgpack. Wire only; no behaviour."""

import msgspec

from tracer.record.exchange import ExchangeFacts

LIVE = "chatreel"
SERVER_TOKENIZER = "server"  # token ids come from the upstream


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """First message to the worker."""

    folder: str
    key_path: str
    tokenizer: str
    model_tokenizers: dict[str, str] = {}  # of models that have one of their own
    chunk_times: bool
    epoch_ns: int  # wall clock at arrival_ns == 0
    producer: str
    counts: dict[str, int] = {}  # of workers before this one
    source_format: str = LIVE
    tokenize_urls: dict[str, str] = {}  # of upstreams that are asked for token ids, by name
    upstream_ca: str | None = None
    keep_text: bool = False


class Started(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="started"):
    """A request's body is in. `body` None: shed, because the worker lags."""

    flow: int
    arrival_ns: int
    endpoint: str
    body: bytes | None
    encoding: str = ""
    credential: bytes = b""
    session_header: bytes = b""
    upstream: str = ""


class Answered(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="answered"):
    """The head of a response is in."""

    flow: int
    status: int
    content_type: str
    encoding: str


class Piece(msgspec.Struct, frozen=True, array_like=True, tag="piece", gc=False):
    """Bytes of a response's body, as they went by. Nothing is read in them before the worker does."""

    flow: int
    at_ns: int
    data: bytes


class Finished(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="finished"):
    """All that can be known of an exchange without its bodies, so that it makes a row even where those were shed."""

    flow: int
    arrival_ns: int
    endpoint: str
    upstream: str
    dispatch_ns: int | None  # since arrival
    bytes_in: int | None
    status: int | None
    bytes_out: int  # of all its pieces
    at_ns: int
    broken: str | None  # why there will be no more; None: it is complete


class Ended(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="ended"):
    """An exchange of which all facts are known already, as in a capture."""

    flow: int
    arrival_ns: int
    endpoint: str
    facts: ExchangeFacts
    upstream: str | None = None


class Counted(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="counted"):
    """Running totals of the proxy process."""

    counts: dict[str, int]


class Stop(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag="stop"):
    """No more will come: write all, report, exit."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What a live view shows beside counts; see figures.py."""

    prompt_blocks: int = 0  # of all requests so far
    reused_blocks: int = 0  # of those, seen earlier in this recording in a prompt or an answer, with all before them
    forgets: bool = False  # more blocks went by than are remembered: reuse is at least this
    ttft_us: dict[int, int] = {}  # sketches of recent requests
    input_tokens: dict[int, int] = {}
    output_tokens: dict[int, int] = {}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """From the worker, twice a second and at its end."""

    recorded: int = 0  # rows on disk
    waiting: int = 0  # rows not yet there
    counts: dict[str, int] = {}
    figures: Figures = Figures()
    disk_error: str | None = None
    trouble: str | None = None  # what else a user must know
    failed: str | None = None  # the worker could not start
    is_final: bool = False


ToWorker = Started | Answered | Piece | Finished | Ended | Counted | Stop


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First payload of each segment."""

    version: int = 1
    producer: str
    epoch_ns: int
    key_id: str
    tokenizer: str
    template: str
    block_tokens: int
    source_format: str = LIVE  # else a capture's: arrivals are wall clock, and the trace begins at the first
    keeps_text: bool = False  # in segments of their own


class Row(msgspec.Struct, kw_only=True, tag="row"):
    """A finished request. `row` holds trace columns by name; digests are 8 bytes each, joined."""

    flow: int
    arrival_ns: int
    row: dict[str, object]
    input_hashes: bytes = b""
    input_tail: bytes = b""
    output_hashes: bytes = b""
    client: bytes | None = None
    session: bytes | None = None
    leaves: list[bytes] = []
    extends: list[bytes] = []
    parts: list[tuple[str, str, int, bytes]] = []  # role, kind, tokens, digest
    body: bytes | None = None  # digest of the request as sent, client included


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """A request is under way; without its Row, a crash came first."""

    flow: int
    arrival_ns: int


class Totals(msgspec.Struct, frozen=True, kw_only=True, tag="totals"):
    """Running totals so far; the highest of each name counts."""

    counts: dict[str, int]
