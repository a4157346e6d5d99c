"""A grid of predictions: a run folder for each pair, one table, and how many GPUs a scale needs."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from chatreel.cli import app
from replay.foretelling import PredictConfig
from replay.grid import Cell, Needed, needed, run_grid
from replay.judge.summary import Slo
from replay.report import frontier
from replay.sim.split import Split
from tests.replay.test_replay import chats
from tracer.errors import TraceError
from tracer.schema import Footer
from tracer.tracefile import write_trace


def cell(**values: object) -> Cell:
    usual = {
        "scale": 1.0,
        "kv_tokens": 1000,
        "replicas": 1,
        "gpus": 1,
        "requests_per_s": 2.0,
        "goodput_per_s": 1.5,
        "attainment": 0.75,
        "hit_rate": 0.5,
        "ttft_p99_ms": 900.0,
        "tpot_p50_ms": 10.0,
        "preemptions": 3,
        "run": "a",
    }
    return msgspec.convert({**usual, **values}, Cell)


def test_every_pair_is_run_and_has_its_own_report(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", chats(sessions=20, turns=2, gap_s=0.05), Footer())
    config = PredictConfig(trace=tmp_path / "t.parquet", run_dir=tmp_path / "g", engine="laptop-demo", scales=(1.0, 2.0))
    slos = [Slo(metric="ttft", limit_ms=500)]

    cells = run_grid(config, [4096, 8192], [1, 2], slos)

    assert [(one.kv_tokens, one.replicas, one.scale) for one in cells] == [
        (kv, count, scale) for kv in (4096, 8192) for count in (1, 2) for scale in (1.0, 2.0)
    ]
    assert all((config.run_dir / one.run / "run.json").exists() and one.attainment is not None for one in cells)
    assert len(msgspec.json.decode((config.run_dir / "grid.json").read_bytes())["cells"]) == 8
    with pytest.raises(TraceError, match="a grid here already"):
        run_grid(config, [4096], [1], slos)


def test_splits_stand_beside_each_other_with_the_gpus_of_both_sides(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", chats(sessions=10, turns=2, gap_s=0.05), Footer())
    config = PredictConfig(trace=tmp_path / "t.parquet", run_dir=tmp_path / "g", engine="laptop-demo", scales=(1.0,))

    cells = run_grid(config, [8192], [2, Split(prefill=1, decode=2)], [])

    assert [(one.split, one.replicas, one.gpus) for one in cells] == [(None, 2, 2), ("1:2", 3, 3)]
    assert "split" in msgspec.json.decode((config.run_dir / cells[1].run / "run.json").read_bytes())["target"]
    with pytest.raises(TraceError, match="split"):
        run_grid(replace(config, run_dir=tmp_path / "h"), [8192], [Split(prefill=0, decode=2)], [])


def test_other_settings_are_varied_and_told_in_table_words_and_chart(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", chats(sessions=10, turns=2, gap_s=0.05), Footer())
    config = PredictConfig(trace=tmp_path / "t.parquet", run_dir=tmp_path / "g", engine="laptop-demo", scales=(1.0,))

    vary = {"max_num_seqs": [2, 64], "eviction": ["lru", "fifo"], "engine": ["laptop-demo"]}
    cells = run_grid(config, [8192], [1], [Slo(metric="ttft", limit_ms=5000)], vary=vary)

    assert [tuple(one.settings.values()) for one in cells] == [
        (seqs, eviction, "laptop-demo") for seqs in (2, 64) for eviction in ("lru", "fifo")
    ]
    assert len({one.run for one in cells}) == 4
    few, many = cells[0], cells[2]
    assert (few.ttft_p99_ms or 0) > 2 * (many.ttft_p99_ms or 0)
    assert frontier.heads(cells)[4:7] == ["max num seqs", "eviction", "engine"]
    assert [row[4] for row in frontier.rows(cells)] == ["2", "2", "64", "64"]
    assert all(len(row) == len(frontier.heads(cells)) for row in frontier.rows(cells))
    assert "max_num_seqs = " in frontier.words(needed(cells, 0.5), 0.5)[0]
    assert "max_num_seqs 64, eviction fifo" in frontier.page(cells, [], "here")


@pytest.mark.parametrize("wrong", ["max-num-seqs", "colour=red", "eviction=mru", "chunked-prefill=maybe", "block-tokens=few"])
def test_what_cannot_be_varied_is_refused(tmp_path: Path, wrong: str) -> None:
    found = CliRunner().invoke(app, ["predict", str(tmp_path / "t.parquet"), "--grid", "--vary", wrong])

    assert found.exit_code == 2 and not isinstance(found.exception, ValueError)


def test_what_cannot_run_is_said_before_anything_does(tmp_path: Path) -> None:
    config = PredictConfig(trace=tmp_path / "none.parquet", run_dir=tmp_path / "g", engine="laptop-demo")

    with pytest.raises(TraceError, match="kv_tokens"):
        run_grid(config, [4096, 0], [1], [])
    assert not config.run_dir.exists()


def test_needed_is_the_fewest_gpus_then_the_least_memory() -> None:
    small, large = (cell(gpus=2, kv_tokens=kv, attainment=0.99) for kv in (1000, 2000))
    cells = [cell(), cell(gpus=4, attainment=1.0), large, small, cell(scale=5.0, attainment=0.2)]

    assert needed(cells, 0.99) == [Needed(scale=1.0, cell=small), Needed(scale=5.0, cell=None)]
