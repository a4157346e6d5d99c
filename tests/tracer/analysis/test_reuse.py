"""The hit curve equals a plain LRU cache, unit by unit, and the published figures of a real trace."""

import json
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.analysis import distances
from tracer.analysis.reuse import Touches, engine_paths, hit_curve, require_chained
from tracer.blocks import Blocks, DenseIds
from tracer.errors import TraceError

TRACES = Path(__file__).resolve().parents[4] / "shared/traces"
MOONCAKE = TRACES / "mooncake/conversation_trace.head.jsonl"
WEKA = TRACES / "weka-cc/trace_0164.json"


def lru_hits(touches: Touches, capacity: int) -> int:
    """The obvious cache: an ordered dict of (id, unit) pairs, oldest first."""
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits, at = 0, 0
    for path, limit in zip(touches.blocks, touches.lookup_units.tolist(), strict=True):
        units = [(block, unit) for k, block in enumerate(path.tolist()) for unit in range(int(touches.units[at + k]))]
        at += len(path)
        for unit in units[:limit]:
            if unit not in cache:
                break
            hits += 1
        for unit in reversed(units):
            cache[unit] = None
            cache.move_to_end(unit)
            while len(cache) > capacity:
                cache.popitem(last=False)
    return hits


@st.composite
def paths(draw: st.DrawFn) -> list[list[int]]:
    """Requests that extend, cut or branch off earlier ones, as chained ids."""
    ids: DenseIds[tuple[int, ...]] = DenseIds()
    words: list[list[int]] = []
    for _ in range(draw(st.integers(1, 25))):
        base = draw(st.sampled_from(words)) if words and draw(st.booleans()) else []
        kept = base[: draw(st.integers(0, len(base)))]
        words.append(kept + draw(st.lists(st.integers(0, 2), max_size=5)))
    return [[ids[tuple(word[: k + 1])] for k in range(len(word))] for word in words]


@st.composite
def touches(draw: st.DrawFn) -> Touches:
    lists = draw(paths())
    blocks = Blocks.from_lists(lists)
    widths = draw(st.lists(st.integers(0, 4), min_size=200, max_size=200))
    units = np.array([widths[block % 200] for block in blocks.ids], dtype=np.int64)
    totals = [sum(widths[block % 200] for block in path) for path in lists]
    looked_up = [draw(st.integers(0, total)) for total in totals]
    return Touches(
        blocks=blocks,
        units=units,
        lookup_units=np.array(looked_up, dtype=np.int64),
        prompt_tokens=np.array(looked_up, dtype=np.int64) * 16 + 3,
        unit_tokens=16,
    )


@given(touches())
@settings(max_examples=150, deadline=None)
def test_the_curve_equals_a_direct_lru_simulation_at_every_size(seen: Touches) -> None:
    curve = hit_curve(seen)

    sizes = range(0, curve.unique + 2)

    assert [curve.hits_at(size) for size in sizes] == [lru_hits(seen, size) for size in sizes]
    assert curve.hits_infinite == int(curve.request_hits.sum()) == lru_hits(seen, 10**9)


@given(touches(), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_the_curve_is_the_same_however_the_references_are_cut_into_pieces(seen: Touches, references: int) -> None:
    whole = hit_curve(seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distances, "PIECE_REFERENCES", references)
        cut = hit_curve(seen)

    assert cut.request_hits.tolist() == whole.request_hits.tolist()
    assert [cut.hits_at(size) for size in range(whole.unique + 2)] == [whole.hits_at(size) for size in range(whole.unique + 2)]
    assert cut.unique == whole.unique


def test_ids_with_two_predecessors_in_different_pieces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "PIECE_REFERENCES", 1)

    with pytest.raises(TraceError, match="block 1 after 0 and after 2"):
        require_chained(Blocks.from_lists([[0, 1], [], [2, 1]]))


def test_paths_put_together_piece_by_piece_are_those_put_together_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {
        "blocks": Blocks.from_lists([[0], [0, 1], [], [2], [0]]),
        "block_tokens": 64,
        "tail_id": np.array([5, -1, 6, 5, 5]),
        "tail_tokens": np.array([40, 0, 63, 20, 16]),  # one id, three lengths: a damaged source
        "input_tokens": np.array([104, 128, 63, 84, 80]),
        "output_tokens": np.array([60, 10, 100, 300, 1]),
        "answer_blocks": Blocks.from_lists([[], [3, 4], [], [], []]),
    }
    whole = engine_paths(**columns).whole()
    monkeypatch.setattr(distances, "PIECE_REFERENCES", 2)

    pieces = list(engine_paths(**columns).pieces())

    assert len(pieces) > 2
    assert [path.tolist() for blocks, _ in pieces for path in blocks] == [path.tolist() for path in whole.blocks]
    assert np.concatenate([units for _, units in pieces]).tolist() == whole.units.tolist()
    assert whole.units[whole.blocks.ids == 5].tolist() == [2, 2, 2]


@given(touches(), st.floats(0.01, 1.0))
@settings(max_examples=60, deadline=None)
def test_the_smallest_cache_for_a_share_of_hits_is_enough_and_one_unit_less_is_not(seen: Touches, share: float) -> None:
    curve = hit_curve(seen)

    size = curve.capacity_for(share)

    assert curve.hits_at(size) >= share * curve.hits_infinite - 1e-6
    assert size == 0 or curve.hits_at(size - 1) < share * curve.hits_infinite


def test_ids_with_two_predecessors_are_refused() -> None:
    blocks = Blocks.from_lists([[0, 1], [2, 1]])
    ones = np.ones(4, dtype=np.int64)

    with pytest.raises(TraceError, match="not chained"):
        hit_curve(Touches(blocks=blocks, units=ones, lookup_units=blocks.lengths, prompt_tokens=ones[:2], unit_tokens=16))


def test_an_engine_sees_full_pages_the_last_prompt_token_recomputed_and_answers_in_the_cache() -> None:
    prompts = Blocks.from_lists([[0], [0, 1]])
    seen = engine_paths(
        blocks=prompts,
        block_tokens=64,
        tail_id=np.array([5, -1]),
        tail_tokens=np.array([40, 0]),
        input_tokens=np.array([104, 128]),
        output_tokens=np.array([60, 10]),
        answer_blocks=Blocks.from_lists([[], []]),
    ).whole()

    assert seen.blocks[0].tolist() == [0, 5, 6]  # block, tail, an answer under a fresh id
    assert seen.blocks[1].tolist() == [0, 1]  # 138 tokens are the same 8 pages as the prompt
    assert seen.units.tolist() == [4, 2, 4, 4, 4]  # (104 + 60) // 16 = 10 in all
    assert seen.lookup_units.tolist() == [6, 7]


def test_recorded_answers_are_reused_by_the_next_turn() -> None:
    seen = engine_paths(
        blocks=Blocks.from_lists([[0], [0, 1, 2]]),
        block_tokens=16,
        tail_id=np.array([-1, -1]),
        tail_tokens=np.array([0, 0]),
        input_tokens=np.array([20, 50]),
        output_tokens=np.array([15, 0]),
        answer_blocks=Blocks.from_lists([[1], []]),
    ).whole()

    assert hit_curve(seen).request_hits.tolist() == [0, 2]


def test_larger_engine_pages_take_every_second_id_of_prompt_and_answer() -> None:
    seen = engine_paths(
        blocks=Blocks.from_lists([[0, 1, 2]]),
        block_tokens=16,
        tail_id=np.array([9]),
        tail_tokens=np.array([4]),
        input_tokens=np.array([52]),
        output_tokens=np.array([30]),
        answer_blocks=Blocks.from_lists([[3, 4]]),
        unit_tokens=32,
    ).whole()

    assert seen.blocks[0].tolist() == [1, 3]
    assert seen.units.tolist() == [1, 1]
    assert seen.lookup_units.tolist() == [1]


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the public Mooncake trace is not beside this checkout")
def test_mooncake_head_has_the_published_figures() -> None:
    rows = [json.loads(line) for line in MOONCAKE.read_text().splitlines()]
    blocks = Blocks.from_lists([row["hash_ids"] for row in rows])
    curve = hit_curve(
        Touches(
            blocks=blocks,
            units=np.ones(len(blocks.ids), dtype=np.int64),
            lookup_units=blocks.lengths,
            prompt_tokens=np.array([row["input_length"] for row in rows]),
            unit_tokens=512,
        )
    )

    assert (curve.references, curve.unique, curve.hits_infinite) == (197_084, 128_076, 69_008)
    sizes = (1_000, 2_000, 5_000, 10_000, 20_000)
    assert [curve.hits_at(size) for size in sizes] == [8_704, 10_643, 21_987, 40_584, 55_457]


def weka_lists(path: Path) -> list[list[int]]:
    """Requests in file order, a sub-agent's where it was started."""
    requests: list[list[int]] = []
    for one in json.loads(path.read_text())["requests"]:
        requests += [inner["hash_ids"] for inner in one["requests"]] if one["type"] == "subagent" else [one["hash_ids"]]
    return requests


@pytest.mark.parametrize("path", [MOONCAKE, WEKA], ids=["mooncake", "weka"])
def test_the_curve_of_a_real_trace_equals_a_direct_lru_simulation_at_twelve_sizes(path: Path) -> None:
    if not path.exists():
        pytest.skip("the public traces are not beside this checkout")
    is_mooncake = path == MOONCAKE
    lists = [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()] if is_mooncake else weka_lists(path)
    blocks = Blocks.from_lists(lists)
    ones = np.ones(len(blocks.ids), dtype=np.int64)
    seen = Touches(blocks=blocks, units=ones, lookup_units=blocks.lengths, prompt_tokens=blocks.lengths, unit_tokens=1)
    curve = hit_curve(seen)

    sizes = np.geomspace(20, curve.unique, 12).astype(int).tolist()

    assert [curve.hits_at(size) for size in sizes] == [lru_hits(seen, size) for size in sizes]
