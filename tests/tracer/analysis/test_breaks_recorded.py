"""Planted prefix breaks in traffic as clients send it, with nothing that names a conversation, are found all the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tracer.analysis.breaks import find_breaks
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.record.capturing import import_capture
from tracer.tracefile import read_footer, read_table

CONVERSATIONS, TURNS, EPOCH_S = 10, 5, 1_760_000_000
WORDS = "the a of red blue stone river house tree under over walks sings cold warm bright old new seven twelve".split()
Entry = dict[str, Any]


def text(source: np.random.Generator, words: int) -> str:
    return " ".join(source.choice(WORDS, words).tolist())


def log(path: Path, kind: str) -> Path:
    """Conversations side by side, one request a second, answered within the second."""
    source = np.random.default_rng(5)
    system = text(source, 300)
    tools = [
        {"type": "function", "function": {"name": f"tool{k}", "description": text(source, 120), "parameters": {"type": "object"}}}
        for k in range(3)
    ]
    histories: list[list[dict[str, str]]] = [[] for _ in range(CONVERSATIONS)]
    lines = []
    for turn in range(TURNS):
        for history in histories:
            at = len(lines)
            clock = f"{at // 60:02}:{at % 60:02}:{at * 7 % 60:02}" if kind == "clock" else "00:00:00"
            if kind == "compacted" and turn == 3:
                kept = history[-2:]
                history[:] = [{"role": "user", "content": text(source, 150)}, *kept]
            history.append({"role": "user", "content": text(source, 60)})
            shown = tools[turn % 3 :] + tools[: turn % 3] if kind == "reordered" else tools
            request: Entry = {
                "model": "m",
                "messages": [{"role": "system", "content": f"Time: {clock}. {system}"}, *history],
                "tools": shown,
            }
            answer = text(source, 120)
            message: Entry = {"role": "assistant", "content": answer}
            if kind == "stripped":
                message["reasoning_content"] = text(source, 300)
            response = {
                "id": "x",
                "object": "chat.completion",
                "created": EPOCH_S + at,
                "model": "m",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            }
            lines.append({"timestamp": EPOCH_S + at, "request": request, "response": response, "status": 200, "duration_ms": 500})
            history.append({"role": "assistant", "content": answer})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def recorded(folder: Path, kind: str) -> Path:
    import_capture(log(folder / f"{kind}.jsonl", kind), folder / f"{kind}.parquet")
    return folder / f"{kind}.parquet"


def cached_tokens(path: Path) -> int:
    footer = read_footer(path)
    return hit_curve(touches_as_engine(read_table(path), footer, footer.block_tokens)).hits_infinite * footer.block_tokens


@pytest.mark.parametrize(("kind", "cause"), [("clock", "volatile_system_prompt"), ("reordered", "tools_reordered")])
def test_a_break_that_ends_the_linked_conversation_is_priced_as_the_clean_twin_says(
    tmp_path: Path, kind: str, cause: str
) -> None:
    clean, broken = recorded(tmp_path, "clean"), recorded(tmp_path, kind)

    found = find_breaks(read_table(broken), read_footer(broken))

    lost = cached_tokens(clean) - cached_tokens(broken)
    assert lost > 10_000
    assert found.causes[0].cause == cause
    assert found.causes[0].lost_tokens == pytest.approx(lost, rel=0.05)
    assert sum(one.lost_tokens for one in found.causes[1:]) <= 0.05 * lost


def test_a_compaction_is_found_by_the_messages_that_it_kept(tmp_path: Path) -> None:
    broken = recorded(tmp_path, "compacted")
    table = read_table(broken)

    found = find_breaks(table, read_footer(broken))

    # What was kept (summary, one turn and its answer) could have been the beginning of the earlier prompt.
    kept = [
        sum(part["tokens"] for part in parts if part["kind"] not in ("system", "tools")) - parts[-1]["tokens"]
        for parts in table["segments"].to_pylist()[3 * CONVERSATIONS : 4 * CONVERSATIONS]
    ]
    assert [one.cause for one in found.causes] == ["history_compacted"]
    assert found.causes[0].requests == CONVERSATIONS
    assert found.causes[0].lost_tokens == pytest.approx(sum(kept), rel=0.05)


def test_a_clean_log_has_no_breaks(tmp_path: Path) -> None:
    clean = recorded(tmp_path, "clean")

    found = find_breaks(read_table(clean), read_footer(clean))

    assert (found.broken, found.compared) == (0, CONVERSATIONS * TURNS - 1)


def test_stripped_reasoning_is_told_from_the_count_of_tokens_where_the_server_does_not_say(tmp_path: Path) -> None:
    clean, broken = recorded(tmp_path, "clean"), recorded(tmp_path, "stripped")

    found = find_breaks(read_table(broken), read_footer(broken))

    assert [one.cause for one in found.causes] == ["reasoning_stripped"]
    assert found.causes[0].requests == CONVERSATIONS * (TURNS - 1)
    assert found.causes[0].lost_tokens == pytest.approx(cached_tokens(clean) - cached_tokens(broken), rel=0.05)
