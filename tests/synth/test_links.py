"""From which earlier request each request goes on."""

from pathlib import Path
from typing import Any

import pytest

from synth.fit import COLUMNS
from synth.links import SHARE, START, TURN, Links, find_links
from tracer.schema import Footer
from tracer.tracefile import read_footer, read_table, write_trace


def links_of(tmp_path: Path, rows: list[dict[str, Any]]) -> Links:
    whole = [
        {"request_id": number, "arrival_ns": number * 10**9, "input_tokens": 16 * len(row["input_blocks"]), **row}
        for number, row in enumerate(rows)
    ]
    write_trace(tmp_path / "t.parquet", whole, Footer())  # type: ignore[arg-type]
    return find_links(read_table(tmp_path / "t.parquet", COLUMNS), read_footer(tmp_path / "t.parquet"))


def test_without_sessions_a_request_goes_on_from_who_touched_its_deepest_known_block_last(tmp_path: Path) -> None:
    prompts = [[0, 1], [2, 3], [0, 1, 4], [0, 1, 4, 5], [0, 6], [7]]
    others = [[number] for number in range(8, 120)]  # so that no prefix is one of 5 % of the requests

    links = links_of(tmp_path, [{"input_blocks": ids} for ids in prompts + others])

    assert links.kind.tolist()[:6] == [START, START, SHARE, SHARE, SHARE, START]
    assert links.parent.tolist()[:6] == [-1, -1, 0, 2, 3, -1]
    assert links.kept.tolist()[:6] == [0, 0, 2, 3, 1, 0]
    assert links.depth.tolist()[:6] == [0, 0, 1, 2, 3, 0]
    assert set(links.kind.tolist()[6:]) == {START}


def test_a_turn_goes_on_from_the_turn_before_and_keeps_what_they_have_in_common(tmp_path: Path) -> None:
    links = links_of(
        tmp_path,
        [
            {"input_blocks": [0, 1], "output_blocks": [2], "session_id": 0, "end_ns": 400_000_000},
            {"input_blocks": [3], "session_id": 1},
            {"input_blocks": [0, 1, 2, 4], "session_id": 0, "parent_request_id": 0},
            {"input_blocks": [0, 5], "session_id": 0},  # history rewritten
        ],
    )

    assert links.kind.tolist() == [START, START, TURN, TURN]
    assert links.parent.tolist() == [-1, -1, 0, 2]
    assert links.kept.tolist() == [0, 0, 3, 1]
    assert links.think_ns.tolist() == [-1, -1, 1_600_000_000, -1]


def test_a_prefix_of_everybody_is_no_link(tmp_path: Path) -> None:
    rows = [{"input_blocks": [0, 1 + number]} for number in range(60)]

    links = links_of(tmp_path, rows)

    assert set(links.kind.tolist()) == {START}
    assert links.kept.tolist() == [0, *[1] * 59] or links.kept.tolist() == [1] * 60


def test_ids_that_do_not_commit_to_what_is_before_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="chained"):
        links_of(tmp_path, [{"input_blocks": [0, 1]}, {"input_blocks": [2, 1]}])
