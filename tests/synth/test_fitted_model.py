"""A workload learned and drawn again: laws of the trace, likeness to the source, bounded slices."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth import drawing
from synth.dialing import Wishes
from synth.drawing import Amount, draw
from synth.fidelity import COLUMNS, Fidelity, compare
from synth.fit import COLUMNS as FIT_COLUMNS
from synth.fit import fit
from synth.generate import Totals
from synth.generating import fit_trace, generate_from_model, generate_trace, read_model
from synth.learned import Model, from_json, to_json
from synth.model import load_workload
from tests.synth.test_group_bootstrap import AZURE, MOONCAKE, assert_lawful, needs, rows_of
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.errors import TraceError
from tracer.importing import import_trace
from tracer.schema import Footer
from tracer.tracefile import read_footer, read_table, write_trace


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "chat.parquet"
    generate_trace(load_workload(preset="chat", overrides={"requests": 1500, "system_prompts.count": 3}), 1, path)
    return path


@pytest.fixture(scope="module")
def model(chat: Path) -> Model:
    return fit(read_table(chat, FIT_COLUMNS), read_footer(chat), "chat")


def drawn(model: Model, seed: int = 0, **amount: Any) -> pa.Table:
    return pa.concat_tables(list(draw(model, Amount(**amount), np.random.default_rng(seed), Totals())))


def likeness(source: Path, tmp_path: Path, seed: int) -> Fidelity:
    fit_trace(source, tmp_path / "model.json")
    generate_from_model(tmp_path / "model.json", tmp_path / "drawn.parquet", seed)
    real, synth = ((read_table(path, COLUMNS), read_footer(path)) for path in (source, tmp_path / "drawn.parquet"))
    return compare(real, synth)


@given(seed=st.integers(0, 2**40), scale=st.sampled_from([0.2, 1.0, 2.5]))
@settings(max_examples=8, deadline=None)
def test_what_is_drawn_obeys_the_laws_of_a_trace(
    tmp_path_factory: pytest.TempPathFactory, model: Model, seed: int, scale: float
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    (folder / "m.json").write_bytes(to_json(model))

    report = generate_from_model(folder / "m.json", folder / "t.parquet", seed, Wishes(scale=scale))
    rows = rows_of(folder / "t.parquet")

    assert_lawful(rows)
    assert report.requests == len(rows) == pytest.approx(1500 * scale, rel=0.4)
    assert all(len(row["input_blocks"]) == row["input_tokens"] // 16 for row in rows)
    assert all((row["input_tail_id"] is None) == (row["input_tokens"] % 16 == 0) for row in rows)
    for row in rows:
        if row["parent_request_id"] is not None:
            before = rows[row["parent_request_id"]]
            assert row["arrival_ns"] == before["arrival_ns"] + before["end_ns"] + row["think_ns"]
    table = read_table(folder / "t.parquet")
    curve = hit_curve(touches_as_engine(table, read_footer(folder / "t.parquet")))
    assert report.prefix_share == pytest.approx(curve.hit_rate_infinite, abs=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_is_drawn_from_a_chat_is_like_it(chat: Path, tmp_path: Path, seed: int) -> None:
    found = likeness(chat, tmp_path, seed)

    assert found["hit curve, largest error"] < 0.06  # of nine minutes only: its own halves differ by 0.2
    assert found["input tokens, KS"] < 0.08
    assert found["think time, KS"] < 0.05
    assert found["turns, variation"] < 0.08


@needs(MOONCAKE)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_model_of_the_mooncake_trace_passes_every_gate(tmp_path: Path, seed: int) -> None:
    import_trace(MOONCAKE, tmp_path / "mooncake.parquet")

    found = likeness(tmp_path / "mooncake.parquet", tmp_path, seed)

    assert [gate.name for gate in found.gates if not gate.passed] == []
    assert len(found.gates) == 11
    assert found["hit curve, largest error"] <= 0.03


@needs(AZURE)
def test_a_model_of_the_azure_trace_keeps_lengths_and_bursts(tmp_path: Path) -> None:
    import_trace(AZURE, tmp_path / "azure.parquet")

    found = likeness(tmp_path / "azure.parquet", tmp_path, 0)

    assert found["input tokens, KS"] <= 0.05 and found["output tokens, KS"] <= 0.05
    assert all(0.7 <= found[f"dispersion per {window} s, ratio"] <= 1.4 for window in (1, 10, 60))


def test_how_it_is_sliced_changes_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_time = drawing._at_a_time(model)
    whole = drawn(model, 5)

    monkeypatch.setattr(drawing, "CHUNK_BLOCKS", 200)
    monkeypatch.setattr(drawing, "_at_a_time", lambda _model: at_a_time)

    assert drawn(model, 5).equals(whole)


def test_starts_that_come_in_small_portions_give_a_lawful_trace_too(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drawing, "_at_a_time", lambda _model: 7)
    (tmp_path / "m.json").write_bytes(to_json(model))

    generate_from_model(tmp_path / "m.json", tmp_path / "t.parquet", 1)

    assert_lawful(rows_of(tmp_path / "t.parquet"))
    assert len(rows_of(tmp_path / "t.parquet")) == pytest.approx(1500, rel=0.1)


def test_the_same_seed_gives_the_same_trace_and_another_another(model: Model) -> None:
    assert drawn(model, 3).equals(drawn(model, 3))
    assert not drawn(model, 3).equals(drawn(model, 4))


def test_a_model_survives_its_file(model: Model) -> None:
    assert from_json(to_json(model)) == model


def test_a_longer_draw_repeats_the_profile(model: Model) -> None:
    twice = drawn(model, 2, duration_s=2 * model.span_s)

    assert twice.num_rows > 1.7 * drawn(model, 2).num_rows
    assert model.span_s * 1.5e9 < twice["arrival_ns"][-1].as_py() < model.span_s * 2e9


def test_nested_prefixes_are_drawn_as_a_tree(tmp_path: Path) -> None:
    """Half of the prompts begin with block 0 alone, half with 0, 1: a start of the second kind has both."""
    rows = [
        {
            "request_id": number,
            "arrival_ns": number * 10**9,
            "input_tokens": 16 * (2 + number % 2),
            "output_tokens": 5,
            "input_blocks": [0, 1, 2 + number] if number % 2 else [0, 2 + number],
        }
        for number in range(200)
    ]
    dense: dict[int, int] = {}
    for row in rows:
        row["input_blocks"] = [dense.setdefault(one, len(dense)) for one in row["input_blocks"]]  # type: ignore[attr-defined]
    write_trace(tmp_path / "t.parquet", rows, Footer())  # type: ignore[arg-type]
    model = fit(read_table(tmp_path / "t.parquet", FIT_COLUMNS), read_footer(tmp_path / "t.parquet"))

    prompts = drawn(model)["input_blocks"].to_pylist()

    assert [(one.under, one.blocks, one.share) for one in model.prefixes] == [(None, 1, 0.5), (0, 2, 0.5)]
    first = prompts[0][0]
    assert {prompt[0] for prompt in prompts} == {first}
    second = {prompt[1] for prompt in prompts if len(prompt) == 3}
    assert len(second) == 1
    assert sum(len(prompt) == 3 for prompt in prompts) == pytest.approx(100, abs=12)


def test_amounts_that_make_no_trace_and_files_that_are_no_model_are_named(tmp_path: Path, model: Model) -> None:
    (tmp_path / "m.json").write_bytes(to_json(model))
    with pytest.raises(TraceError, match="nothing was drawn"):
        generate_from_model(tmp_path / "m.json", tmp_path / "t.parquet", 0, Wishes(duration_s=1e-9))
    assert not (tmp_path / "t.parquet").exists()
    (tmp_path / "m.json").write_text('{"requests": "many"}')
    with pytest.raises(TraceError, match="not a model file"):
        read_model(tmp_path / "m.json")
    with pytest.raises(TraceError, match="chatreel fit"):
        read_model(tmp_path / "none.json")


def test_an_empty_trace_teaches_nothing(chat: Path) -> None:
    table = read_table(chat, FIT_COLUMNS)
    with pytest.raises(TraceError, match="no request"):
        fit(table.slice(0, 0), read_footer(chat))
