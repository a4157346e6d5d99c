"""`--keep-text`: prompts and answers in clear, in segments of their own, at last as JSON lines beside the trace (0600).

An allow-list here too: what was said, by whom, and what tools are for. No header, no key, no id of a user, no picture, and of
a tool nothing but name, description and parameters, since others of its fields can hold credentials.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tracer.record.messages import Ended, Started
from tracer.record.writer import SegmentReader, SegmentWriter, open_new, read_record, segment_paths
from tracer.tokens import flat_text
from tracer.wire.openai import RequestBody

TEXT_WARNING = "THIS RECORDING KEEPS TEXT"
FOLDER = "texts"  # of the segments, beside those of the rows
NOTE = "text"  # in the trace's footer: the name of the file
_TOOL_FIELDS = ("name", "description", "parameters", "input_schema")


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag="asked"):
    flow: int
    arrival_ns: int  # as in the trace
    line: dict[str, Any]


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answered"):
    flow: int
    arrival_ns: int
    line: dict[str, Any]


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Asked | Answered).decode


def warning(out: Path) -> str:
    return (
        f"{TEXT_WARNING}: every prompt and every answer is written in clear to {texts_path(out)}. Whoever can read that file "
        f"reads what users said; it is nobody's but yours (0600), so keep it so, and delete it when it has served. "
        f"Headers, keys and user ids are not in it"
    )


def texts_path(out: Path) -> Path:
    return out.with_suffix(".text.jsonl")


class TextWriter:
    """As the writer of rows: never raises, and a disk that fails costs texts, nothing else."""

    def __init__(self, folder: Path, now_ns: int) -> None:
        (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
        self.segments = SegmentWriter(folder / FOLDER, b"", now_ns)
        self.failures = 0

    def asked(self, started: Started, body: RequestBody) -> None:
        try:
            line = {"endpoint": started.endpoint, **asked_text(body)}
            self.segments.add(_pack(Asked(flow=started.flow, arrival_ns=started.arrival_ns, line=line)))
        except Exception:  # whatever a client can send
            self.failures += 1

    def answered(self, ended: Ended) -> None:
        facts = ended.facts
        said = {"text": facts.text, "reasoning": facts.reasoning, "tool_calls": facts.tool_text}
        line: dict[str, Any] = {name: text for name, text in said.items() if text}
        if facts.is_truncated:
            line["is_truncated"] = True
        self.segments.add(_pack(Answered(flow=ended.flow, arrival_ns=ended.arrival_ns, line=line)))


def asked_text(body: RequestBody) -> dict[str, Any]:
    found: dict[str, Any] = {"model": body.model}
    if body.messages is not None:
        found["messages"] = [_said(message) for message in body.messages]
    if body.prompt is not None:
        found["prompt"] = body.prompt
    if body.tools:
        found["tools"] = [_tool(tool) for tool in body.tools]
    return found


def _said(message: Mapping[str, Any]) -> dict[str, str]:
    said = {"role": str(message.get("role", "")), "content": flat_text(message.get("content"))}
    if message.get("tool_calls"):
        said["tool_calls"] = flat_text(message["tool_calls"])
    return said


def _tool(tool: Any) -> dict[str, Any]:
    fields = tool.get("function", tool) if isinstance(tool, dict) else {}
    return {name: fields[name] for name in _TOOL_FIELDS if name in fields} if isinstance(fields, dict) else {}


def join_texts(folders: Sequence[Path], out: Path) -> int:
    """Write the lines of a recording's texts in order of arrival, question and answer in one. Returns their number."""
    paths = [(series, path) for series, folder in enumerate(folders) for path in _segments(folder)]
    places: dict[tuple[int, int, int], list[tuple[int, int]]] = {}  # (arrival, series, flow): (file, offset) of its records
    with ExitStack() as files:
        opened = [files.enter_context(open(path, "rb")) for _, path in paths]
        for number, (series, _) in enumerate(paths):
            for offset, record in _records(opened[number]):
                places.setdefault((record.arrival_ns, series, record.flow), []).append((number, offset))
        file = files.enter_context(open_new(texts_path(out)))
        for key in sorted(places):
            file.write(_line(key[0], [(opened[number], offset) for number, offset in places[key]]))
    return len(places)


def _segments(folder: Path) -> list[Path]:
    return segment_paths(folder / FOLDER) if (folder / FOLDER).is_dir() else []


def _records(file: BinaryIO) -> Iterator[tuple[int, Asked | Answered]]:
    for number, (offset, payload) in enumerate(SegmentReader(file)):
        if number:  # after the header
            yield offset, _unpack(payload)


def _line(arrival_ns: int, records: list[tuple[BinaryIO, int]]) -> bytes:
    line: dict[str, Any] = {"arrival_ns": arrival_ns}
    for file, offset in records:
        file.seek(offset)
        payload = read_record(file)
        if payload is None:
            continue
        match _unpack(payload):
            case Asked(line=asked):
                line |= asked
            case Answered(line=answered):
                line["answer"] = answered
    return msgspec.json.encode(line) + b"\n"
