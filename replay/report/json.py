"""The summary as JSON: the same figures and notes that the other reports show."""

from pathlib import Path

import msgspec

from replay.judge.summary import Summary


def to_json(summary: Summary) -> bytes:
    return msgspec.json.format(msgspec.json.encode(summary), indent=2)


def write_json(summary: Summary, path: Path) -> None:
    path.write_bytes(to_json(summary) + b"\n")
