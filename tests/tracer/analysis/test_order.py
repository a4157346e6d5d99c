"""A log in the wrong order is found out by its own prompts."""

from pathlib import Path

import numpy as np
import pytest

from tracer.analysis.order import check_order, order_in_words
from tracer.blocks import Blocks
from tracer.importing import import_trace
from tracer.tracefile import blocks, read_table

MOONCAKE = Path(__file__).resolve().parents[4] / "shared/traces/mooncake/conversation_trace.head.jsonl"


def conversations(count: int = 20, turns: int = 5) -> list[list[int]]:
    """Interleaved; each turn's prompt begins with the one before."""
    return [[0, *range(1 + 100 * one, 1 + 100 * one + 3 * (turn + 1))] for turn in range(turns) for one in range(count)]


def test_a_log_in_order_is_said_to_be() -> None:
    found = check_order(Blocks.from_lists(conversations()))

    assert (found.verdict, found.pairs, found.shorter_first) == ("in order", 20 * 4, 1.0)
    assert order_in_words(found) == []


def test_a_reversed_log_is_found() -> None:
    found = check_order(Blocks.from_lists(conversations()[::-1]))

    assert (found.verdict, found.shorter_first) == ("reversed", 0.0)
    assert "seems to be reversed" in order_in_words(found)[0]


def test_a_shuffled_log_is_found() -> None:
    lists = conversations()
    order = np.random.default_rng(0).permutation(len(lists))

    found = check_order(Blocks.from_lists([lists[k] for k in order]))

    assert found.verdict == "shuffled" and found.shorter_first is not None and 0.3 < found.shorter_first < 0.7


def test_prompts_that_nothing_continues_say_nothing() -> None:
    assert check_order(Blocks.from_lists([[0, k] for k in range(1, 50)])).verdict == "cannot tell"
    assert check_order(Blocks.from_lists([[], []])).verdict == "cannot tell"


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the public Mooncake trace is not beside this checkout")
def test_a_real_log_backwards_or_shuffled_is_found(tmp_path: Path) -> None:
    import_trace(MOONCAKE, tmp_path / "m.parquet")
    ids = blocks(read_table(tmp_path / "m.parquet", ["input_blocks"]), "input_blocks")
    lists = [ids[k] for k in range(len(ids))]
    shuffled = [lists[k] for k in np.random.default_rng(0).permutation(len(lists))]

    verdicts = [check_order(Blocks.from_lists(some)).verdict for some in (lists, lists[::-1], shuffled)]

    assert verdicts == ["in order", "reversed", "shuffled"]
