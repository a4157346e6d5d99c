"""SGLang's request dumps: pickled (GenerateReqInput, answer, created, finished), a list of them or {"requests": [...]}.

A pickle is a program. The reader here knows no global but classes of SGLang, and for those it makes empty stubs: nothing
of the file is ever called. Python's own reader in Python is used, since the one in C can be made to fill the memory.
"""

import pickle
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from tracer.captures import Captured, Reject, Rejected
from tracer.captures.answers import Answer, completion_body, facts_of, usage_of
from tracer.captures.asked import body_of
from tracer.captures.documents import nothing
from tracer.captures.stamps import BadStamp, since, wall_ns
from tracer.errors import TraceError
from tracer.wire import COMPLETIONS

NAME = "sglang"
_PACKAGES = ("sglang", "sglang_router", "sgl_kernel")
_SAFE_CONTAINERS = {("collections", "deque"), ("collections", "OrderedDict"), ("collections", "defaultdict")}


class _Stub:
    """Stands for an object of a class that was not loaded: takes what it is given, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, state: object) -> None:
        slots = state[1] if isinstance(state, tuple) and len(state) == 2 else None
        for values in (state, state[0] if isinstance(state, tuple) and state else None, slots):
            if isinstance(values, dict):
                self.__dict__.update({name: value for name, value in values.items() if isinstance(name, str)})


class _StubList(_Stub, list[Any]):
    """Of a container: keeps its members."""

    def __init__(self, members: object = (), *_: object) -> None:
        list.__init__(self, members if isinstance(members, list | tuple) else ())

    def __setitem__(self, *_: object) -> None: ...


class _Refused(pickle.UnpicklingError):
    """The pickle wants something that no request dump needs."""


class _Reader(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _SAFE_CONTAINERS:
            return _StubList
        if module.partition(".")[0] in _PACKAGES:
            return _Stub
        raise _Refused(f"{module}.{name}"[:80])

    def persistent_load(self, pid: object) -> Any:
        raise _Refused("a persistent id")


def looks_like(head: bytes) -> bool:
    return head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and b"sglang" in head


def read(file: BinaryIO, reject: Reject) -> Iterator[Captured]:
    for number, one in enumerate(_requests(file), 1):
        place = f"entry {number}"
        try:
            yield _captured(*one)
        except BadStamp as error:
            reject(Rejected(place, str(error)))
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, RecursionError, msgspec.MsgspecError):
            reject(Rejected(place, "not a dumped request that can be read"))


def _requests(file: BinaryIO) -> list[Any]:
    try:
        value = _Reader(file).load()
    except _Refused as error:
        raise TraceError(
            "this pickle wants more than a request dump needs, so it was not loaded",
            seen=repr(str(error)),
            wanted="classes of SGLang only",
            next_step="Do not open this file with pickle.load: it may run code",
        ) from None
    except Exception:  # whatever a damaged or hostile pickle makes of its reader
        raise TraceError("this pickle is cut or damaged", wanted="a request dump by SGLang") from None
    if isinstance(value, dict):
        value = value.get("requests")
    if not isinstance(value, list):
        raise nothing("a list of requests as SGLang dumps them")
    return value


def _captured(asked: Any, said: Any, created: Any, finished: Any) -> Captured:
    fields = asked if type(asked) is dict else dict(vars(asked))
    arrival_ns = wall_ns(created)
    prompt = fields.get("input_ids") if fields.get("input_ids") is not None else fields.get("text")
    has_prompt = isinstance(prompt, str | list) and bool(prompt) and _is_flat(prompt)
    return Captured(
        arrival_ns=arrival_ns,
        endpoint=COMPLETIONS,  # what the server got after its own template
        body=body_of(fields.get("model"), _parameters(fields), prompt=prompt if has_prompt else None),
        facts=facts_of(COMPLETIONS, _answer(said, since(arrival_ns, finished))),
        has_prompt=has_prompt,
    )


def _is_flat(prompt: str | list[Any]) -> bool:
    """A text, token ids, or a batch of either; deeper lists may be a bomb of references."""
    if isinstance(prompt, str):
        return True
    members = prompt[0] if len(prompt) == 1 and type(prompt[0]) is list else prompt
    return all(type(one) in (int, str) for one in members)


def _parameters(fields: dict[str, Any]) -> dict[str, Any]:
    sampling = fields.get("sampling_params")
    sampling = sampling if type(sampling) is dict else {}
    has_schema = any(sampling.get(name) for name in ("json_schema", "regex", "ebnf", "structural_tag"))
    return {
        **{name: value for name, value in sampling.items() if type(value) in (int, float, str, bool)},
        "max_tokens": sampling.get("max_new_tokens"),
        "seed": sampling.get("sampling_seed"),
        "stream": fields.get("stream"),
        "response_format": {"type": "json_schema"} if has_schema else None,
    }


def _answer(said: Any, end_ns: int | None) -> Answer:
    """The last state of the answer; the last dump before a crash holds some that never ended."""
    if isinstance(said, list) and said:
        said = said[0]
    if type(said) is not dict:
        return Answer(broken="recorder_stopped")
    meta = said.get("meta_info")
    meta = meta if type(meta) is dict else {}
    reason = meta.get("finish_reason")
    kind = reason.get("type") if type(reason) is dict else reason
    if kind is None:
        return Answer(broken="recorder_stopped")
    if kind == "abort":
        return Answer(broken="client_abort", body=_body(said, meta, None), end_ns=end_ns)
    return Answer(body=_body(said, meta, kind), end_ns=end_ns)


def _body(said: dict[str, Any], meta: dict[str, Any], reason: Any) -> bytes:
    text, ids = said.get("text"), said.get("output_ids")
    usage = usage_of(
        meta.get("prompt_tokens"), meta.get("completion_tokens"), meta.get("cached_tokens"), meta.get("reasoning_tokens")
    )
    has_ids = type(ids) is list and ids and all(type(one) is int for one in ids) and len(ids) == meta.get("completion_tokens")
    more = {"token_ids": ids} if has_ids else {}
    return completion_body(text if isinstance(text, str) else "", reason, usage, **more)
