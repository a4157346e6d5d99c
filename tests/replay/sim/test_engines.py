"""Engine files: written, read back, and refused with the line that is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from replay.sim.engines import engine_named, write_engine
from tracer.errors import TraceError


def test_an_engine_file_gives_the_same_engine(tmp_path: Path) -> None:
    engine = replace(engine_named("h100:qwen3-30b-a3b"), max_num_seqs=77)

    write_engine(tmp_path / "e.toml", engine, "mine", ["fitted"])
    again = engine_named(str(tmp_path / "e.toml"))

    assert again.model.name == "mine"
    assert (again.kv_blocks, again.max_num_seqs, again.model.max_model_len) == (engine.kv_blocks, 77, 40960)
    for load in ((1, 500, 500), (64, 60_000, 60_000), (8192, 20_000, 8192 * 4000)):
        assert again.step_s(*load) == pytest.approx(engine.step_s(*load), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("kv_tokens", "kv_tokns"), "unknown setting"),
        (("kv_tokens = 426788", ""), "kv_tokens"),
        (("weights_s = ", "weights_s = -"), "less than nothing"),
        (("[step]", "[step"), "no TOML file"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "e.toml"
    write_engine(path, engine_named("h100:llama3-8b"), "mine", [])
    path.write_text(path.read_text().replace(*change))

    with pytest.raises(TraceError, match=words):
        engine_named(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        engine_named(str(tmp_path / "none.toml"))
