"""GuideLLM's `mooncake` data: Mooncake's keys with seconds and any block size, and how long each request took. Pure.

    {"timestamp": 0.25, "input_length": 41, "output_length": 132, "hash_ids": [0, 1, 2], "duration": 1.5}

GuideLLM 0.8 reads the four keys as columns, wants ceil(input / block) ids, and replays each row at its time, alone.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from tracer.formats.ids import FirstSeen
from tracer.formats.targets import prompt_ids, sendable
from tracer.schema import Footer, Request

NAME = "guidellm"
HOLDS = frozenset({"input_tokens", "output_tokens", "input_blocks", "end_ns"})
STEP_NS = 1


def write(rows: Iterable[Request], footer: Footer, losses: Counter[str]) -> Iterator[bytes]:
    numbers = FirstSeen()
    for row in sendable(rows, losses):
        end_ns = row.get("end_ns")
        value = {
            "timestamp": row["arrival_ns"] / 10**9,
            "input_length": row["input_tokens"],
            "output_length": row["output_tokens"],
            "hash_ids": prompt_ids(row, footer.block_tokens, numbers),
            "duration": None if end_ns is None else end_ns / 10**9,
        }
        yield msgspec.json.encode(value) + b"\n"


def usage(path: str, footer: Footer, rows: int) -> str:
    del rows
    return (
        f"guidellm benchmark with profile replay and data kind=mooncake, hash_id_block_size={footer.block_tokens}, "
        f"source {path} (JSON lines)"
    )
