"""The workload: what to generate, as one value. Read from a small TOML file, a preset, keyword overrides, or all three.

    preset = "chat"                  # start from a preset; every key below is optional
    requests = 20000                 # and / or duration_s = 600; whichever ends first
    prefix_share = 0.6               # share of prompt tokens that an endless cache could serve; sets system prompt lengths
    # or: hit_rate = 0.6 and hit_rate_at_tokens = 400000, the share that an LRU prefix cache of that size serves

    [arrivals]
    process = "gamma"                # poisson | gamma | recorded
    sessions_per_s = 2.0             # or requests_per_s
    cv = 2.5                         # gamma: standard deviation of the gaps / their mean

    [system_prompts]
    count = 8
    tokens = 900                     # a distribution over the pool
    zipf = 1.1                       # popularity of the r-th is r ** -zipf

    [input_tokens]                   # new tokens of a turn
    p50 = 120
    p99 = 3000

A distribution is a number (constant), a list (drawn from it), or a table; see `Distribution`.
"""

import difflib
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from tracer.errors import TraceError
from tracer.schema import BASE_BLOCK_TOKENS

MAX_SYSTEM_TOKENS = 131_072  # longest system prompt that a target prefix share may ask for
Table = dict[str, Any]


class Distribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Lengths, counts or seconds. The keys that are present choose the family:

    `constant`; `min` and `max` alone: uniform; `p50` and `p99`, or `mean` and `cv`: lognormal; `mean` alone: exponential
    (for counts: geometric); `values`, with or without `weights`: empirical. Beside another family `min` and `max` clip.
    """

    constant: float | None = None
    p50: float | None = None
    p99: float | None = None
    mean: float | None = None
    cv: float | None = None
    values: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    min: float | None = None
    max: float | None = None


class Arrivals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """When sessions start. Later turns follow the previous answer and the think time.

    `users` is how many sessions are under way on average (Little's law): session starts per second times the mean time from
    a session's first arrival to its last answer. `requests_per_s` is the long-run rate: session starts per second times the
    mean number of turns. The trace begins with first turns only, so its first minutes carry less of either. Where requests
    pack several messages, both count messages.
    """

    process: Literal["poisson", "gamma", "recorded"] = "poisson"
    sessions_per_s: float | None = None
    requests_per_s: float | None = None
    users: float | None = None
    diurnal_amplitude: float | None = None  # the rate swings as 1 + amplitude * sin(2 pi t / period); the mean stays
    diurnal_period_s: float = 86_400.0
    cv: float | None = None  # gamma only
    trace: str | None = None  # recorded only: the session starts of this trace, its rate unless one is given


class SystemPrompts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A pool of system prompts; each session has one of them, the r-th with probability ~ r ** -zipf."""

    count: int = 1
    tokens: Distribution = Distribution(constant=512)
    zipf: float = 1.0


class Documents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A library; each session puts `per_session` of its documents, in drawn order, between system prompt and question."""

    count: int = 1
    tokens: Distribution = Distribution(constant=512)
    zipf: float = 1.0
    per_session: int = 0


class Service(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Estimated service time: ttft_s + tpot_s * output tokens. It only places later turns in the generated trace."""

    ttft_s: float = 0.3
    tpot_s: float = 0.02


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str = "custom"
    requests: int | None = None
    duration_s: float | None = None  # arrivals before this time only
    prefix_share: float | None = None  # met by scaling the lengths of all system prompts
    hit_rate: float | None = None  # token-weighted, of an LRU prefix cache of hit_rate_at_tokens; met in the same way
    hit_rate_at_tokens: int | None = None
    arrivals: Arrivals = Arrivals(sessions_per_s=1.0)
    system_prompts: SystemPrompts = SystemPrompts()
    documents: Documents = Documents()
    turns: Distribution = Distribution(constant=1)
    think_s: Distribution = Distribution(constant=0)  # previous end -> next arrival
    input_tokens: Distribution = Distribution(constant=256)  # new tokens of a turn, template markers included
    output_tokens: Distribution = Distribution(constant=128)
    input_output_correlation: float = 0.0  # Spearman's, between new tokens and output of a turn
    messages_per_request: Distribution = Distribution(constant=1)  # above 1: conversations of many users in one prompt
    max_conversation_tokens: int = 131_072  # a session ends before it grows beyond this, shared prefix not counted
    service: Service = Service()
    model: str = "chatreel"
    endpoint: str = "/v1/chat/completions"
    stream: bool = True


DISTRIBUTIONS = {name for name, kind in Workload.__annotations__.items() if kind is Distribution} | {"tokens"}
REPLACES = (
    ("requests", "duration_s"),
    ("prefix_share", "hit_rate", "hit_rate_at_tokens"),
    ("sessions_per_s", "requests_per_s", "users"),
)  # setting one drops the inherited others


def presets() -> dict[str, Table]:
    """Preset name -> its table, in the file's order."""
    return tomllib.loads(resources.files("synth").joinpath("presets.toml").read_text())


def load_workload(
    path: str | Path | None = None, *, preset: str | None = None, overrides: Mapping[str, Any] | None = None
) -> Workload:
    """A preset, then the TOML file, then overrides, each on top of the one before.

    Overrides have dotted keys, e.g. {"requests": 500, "arrivals.sessions_per_s": 3, "output_tokens": 64}; None is
    skipped. A `preset` key in the file counts unless the argument names one. Unknown keys and wrong values: `TraceError`.
    """
    file = _read_toml(Path(path)) if path is not None else {}
    in_file = file.pop("preset", None)
    name = preset if preset is not None else in_file
    table: Table = {"name": name, **_preset(name)} if name is not None else {}
    place = str(path) if path is not None else None
    for layer, origin in ((file, place), (_nested(overrides or {}), None)):
        layer = _distributions_as_tables(layer)
        _reject_unknown_keys(layer, Workload, origin, "")
        table = _merged(table, layer)
    return workload_from_table(table, path=place)


def workload_from_table(table: Table, path: str | None = None) -> Workload:
    """A nested table as a checked workload."""
    table = _distributions_as_tables(table)
    _reject_unknown_keys(table, Workload, path, "")
    try:
        workload = msgspec.convert(table, Workload)
    except msgspec.ValidationError as error:
        problem, _, key = str(error).partition(" - at ")
        key = key.strip("`").removeprefix("$.") or "workload"
        raise TraceError(f"wrong value for `{key}`", path=path, seen=repr(_at(table, key)), wanted=problem) from error
    _check(workload, path)
    return workload


def checked_distribution(key: str, table: Table, least: float) -> Distribution:
    """A distribution from its keys, none of its values below `least`; `TraceError` names `key`."""
    one = msgspec.convert(table, Distribution)

    def wrong(name: str, seen: object, wanted: str) -> None:
        raise TraceError(f"wrong value for `{name}`", seen=repr(seen), wanted=wanted)

    _check_distribution(key, one, least, wrong)
    return one


def workload_json(workload: Workload) -> str:
    """The workload as JSON that `workload_from_table` takes back."""
    return msgspec.json.encode(workload).decode()


def _read_toml(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        names = ", ".join(presets())
        raise TraceError("no such file", path=str(path), next_step=f"Presets need no file: {names}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TraceError(
            "not a TOML file",
            path=str(path),
            seen=str(error),
            next_step="A trace is given as --from TRACE; to learn a model of it, `chatreel fit TRACE -o model.json`",
        ) from error
    except OSError as error:
        raise TraceError("cannot be read", path=str(path), seen=str(error.strerror)) from error


def _preset(name: Any) -> Table:
    known = presets()
    if name in known:
        return _distributions_as_tables(known[name])
    raise TraceError("no such preset", seen=repr(name), wanted=", ".join(known), next_step=_nearest(str(name), known))


def _nested(flat: Mapping[str, Any]) -> Table:
    """{"a.b": 1} -> {"a": {"b": 1}}, without None."""
    table: Table = {}
    for key, value in flat.items():
        if value is None:
            continue
        *parents, last = key.split(".")
        inner = table
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return table


def _distributions_as_tables(table: Table) -> Table:
    """Numbers and lists where a distribution belongs, spelled out."""
    spelled: Table = {}
    for key, value in table.items():
        if key in DISTRIBUTIONS and isinstance(value, int | float) and not isinstance(value, bool):
            value = {"constant": value}
        elif key in DISTRIBUTIONS and isinstance(value, list | tuple):
            value = {"values": list(value)}
        elif key not in DISTRIBUTIONS and isinstance(value, dict):
            value = _distributions_as_tables(value)
        spelled[key] = value
    return spelled


def _merged(below: Table, above: Table) -> Table:
    """`above` wins; tables are merged, distributions replaced whole."""
    merged = dict(below)
    for group in REPLACES:
        if any(key in above for key in group):
            merged = {key: value for key, value in merged.items() if key not in group}
    if "process" in above:  # what belonged to the inherited process goes with it
        merged = {key: value for key, value in merged.items() if key not in ("cv", "trace")}
    for key, value in above.items():
        inner = merged.get(key)
        both = isinstance(value, dict) and isinstance(inner, dict) and key not in DISTRIBUTIONS
        merged[key] = _merged(cast(Table, inner), value) if both else value
    return merged


def _reject_unknown_keys(table: Table, kind: type[msgspec.Struct], path: str | None, prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            raise TraceError(
                f"unknown key `{prefix}{key}`",
                path=path,
                seen=f"{key} = {value!r}",
                wanted=f"one of {', '.join(fields)}",
                next_step=_nearest(key, fields),
            )
        inner = fields[key]
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            _reject_unknown_keys(value, inner, path, f"{prefix}{key}.")


def _nearest(word: str, known: Mapping[str, Any]) -> str | None:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"Did you mean `{close[0]}`?" if close else None


def _at(table: Any, key: str) -> Any:
    for part in key.split("."):
        table = table.get(part) if isinstance(table, dict) else None
    return table


def _check(workload: Workload, path: str | None) -> None:
    """Values that have the right type but make no sense."""

    def wrong(key: str, seen: object, wanted: str, next_step: str | None = None) -> None:
        raise TraceError(f"wrong value for `{key}`", path=path, seen=repr(seen), wanted=wanted, next_step=next_step)

    w, pool, library, arrivals = workload, workload.system_prompts, workload.documents, workload.arrivals
    ranges: list[tuple[str, float | None, float, float]] = [
        ("requests", w.requests, 1, 2**31 - 1),
        ("duration_s", w.duration_s, 1e-9, 1e8),
        ("prefix_share", w.prefix_share, 0, 1),
        ("hit_rate", w.hit_rate, 0, 1),
        ("hit_rate_at_tokens", w.hit_rate_at_tokens, BASE_BLOCK_TOKENS, 2**50),
        ("input_output_correlation", w.input_output_correlation, -1, 1),
        ("max_conversation_tokens", w.max_conversation_tokens, 1, 2**31 - 1),
        ("system_prompts.count", pool.count, 1, 1e6),
        ("system_prompts.zipf", pool.zipf, 0, 20),
        ("documents.count", library.count, 1, 1e7),
        ("documents.zipf", library.zipf, 0, 20),
        ("documents.per_session", library.per_session, 0, 100),
        ("service.ttft_s", w.service.ttft_s, 0, 1e6),
        ("service.tpot_s", w.service.tpot_s, 0, 1e6),
        ("arrivals.sessions_per_s", arrivals.sessions_per_s, 1e-9, 1e9),
        ("arrivals.requests_per_s", arrivals.requests_per_s, 1e-9, 1e9),
        ("arrivals.users", arrivals.users, 1e-9, 1e9),
        ("arrivals.diurnal_amplitude", arrivals.diurnal_amplitude, 0, 1),
        ("arrivals.diurnal_period_s", arrivals.diurnal_period_s, 1, 1e8),
        ("arrivals.cv", arrivals.cv, 0.01, 100),
    ]
    for key, seen, low, high in ranges:
        if seen is not None and not low <= seen <= high:
            wrong(key, seen, f"{low:g} to {high:g}")
    if w.requests is None and w.duration_s is None:
        wrong("requests", None, "a number of requests, or duration_s", "Set requests or duration_s")
    if (w.hit_rate is None) != (w.hit_rate_at_tokens is None):
        wrong("hit_rate", (w.hit_rate, w.hit_rate_at_tokens), "hit_rate and hit_rate_at_tokens together")
    if w.hit_rate is not None and w.prefix_share is not None:
        wrong("hit_rate", (w.hit_rate, w.prefix_share), "one of hit_rate and prefix_share: both scale the system prompts")
    if w.messages_per_request != Distribution(constant=1) and (pool.count > 1 or library.per_session):
        wrong(
            "messages_per_request",
            f"{pool.count} system prompts, {library.per_session} documents a session",
            "one system prompt and no documents, as all messages of a request share them",
        )
    _check_arrivals(arrivals, wrong)
    for key, one, least in _all_distributions(w):
        _check_distribution(key, one, least, wrong)


def _all_distributions(w: Workload) -> list[tuple[str, Distribution, float]]:
    """Every distribution with its key and the smallest value that makes sense."""
    return [
        ("system_prompts.tokens", w.system_prompts.tokens, 0),
        ("documents.tokens", w.documents.tokens, 0),
        ("turns", w.turns, 1),
        ("think_s", w.think_s, 0),
        ("input_tokens", w.input_tokens, 1),
        ("output_tokens", w.output_tokens, 1),
        ("messages_per_request", w.messages_per_request, 1),
    ]


def _check_arrivals(arrivals: Arrivals, wrong: Any) -> None:
    rates = [one for one in (arrivals.sessions_per_s, arrivals.requests_per_s, arrivals.users) if one is not None]
    if len(rates) > 1:
        wrong("arrivals", rates, "one of sessions_per_s, requests_per_s and users")
    if arrivals.process != "recorded" and not rates:
        wrong("arrivals", None, "sessions_per_s, requests_per_s or users")
    if arrivals.process != "gamma" and arrivals.cv is not None:
        wrong("arrivals.cv", arrivals.cv, f"no cv with process {arrivals.process!r}", 'Set process = "gamma"')
    if arrivals.process == "gamma" and arrivals.cv is None:
        wrong("arrivals.cv", None, "the cv of the gaps: 1 is Poisson, more is bursty")
    if (arrivals.process == "recorded") != (arrivals.trace is not None):
        wrong("arrivals.trace", arrivals.trace, 'a trace file with process = "recorded", and none otherwise')


FAMILIES: tuple[frozenset[str], ...] = tuple(
    frozenset(keys) for keys in (("constant",), ("p50", "p99"), ("mean", "cv"), ("mean",), ("values",), ("values", "weights"), ())
)


def _check_distribution(key: str, one: Distribution, least: float, wrong: Any) -> None:
    given = {name: getattr(one, name) for name in Distribution.__struct_fields__ if getattr(one, name) is not None}
    family = frozenset(given) - {"min", "max"}
    if family not in FAMILIES or (not family and not {"min", "max"} <= given.keys()):
        wanted = "constant; min and max; p50 and p99; mean and cv; mean; or values (and weights)"
        wrong(key, given, wanted)
    for name, value in given.items():
        numbers = value if isinstance(value, tuple) else (value,)
        lowest = 0 if name in ("cv", "weights", "mean") else least
        if not numbers or not all(lowest <= number < 2**31 for number in numbers):
            wrong(f"{key}.{name}", value, f"{lowest:g} to {2**31 - 1}")
    _check_shape(key, one, least, wrong)


def _check_shape(key: str, one: Distribution, least: float, wrong: Any) -> None:
    if one.p50 is not None and one.p99 is not None and not 0 < one.p50 <= one.p99:
        wrong(key, (one.p50, one.p99), "0 < p50 <= p99")
    if one.mean is not None and one.mean < max(least, 1e-9):
        wrong(f"{key}.mean", one.mean, f">= {least:g}" if least else "above 0")
    if one.min is not None and one.max is not None and one.min > one.max:
        wrong(key, (one.min, one.max), "min <= max")
    if one.weights is not None and (len(one.weights) != len(one.values or ()) or not sum(one.weights) > 0):
        wrong(f"{key}.weights", one.weights, "as many as values, not all 0")
