"""`chatreel analyze` against a GPU's memory: words, figures, the page, and faults named."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from chatreel.analyzing import AnalyzeOptions, analyze_trace, read_config, run_analyze
from tracer.errors import TraceError
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations below one block, in turn; the first sees the other's block in between."""
    rows: list[Request] = [
        {
            "request_id": k,
            "arrival_ns": k * 10**9,
            "session_id": k % 2,
            "turn": k // 2,
            "input_tokens": 40_001,
            "output_tokens": 15,
            "input_blocks": [0, 1 + k % 2],
            "end_ns": 10**9 // 2,
        }
        for k in range(8)
    ]
    path = tmp_path / "t.parquet"
    write_trace(path, rows, Footer(block_tokens=20_000))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return path


def options(**more: object) -> AnalyzeOptions:
    return AnalyzeOptions(sizes_blocks=[1], **more)  # type: ignore[arg-type]


def said(trace: Path, chosen: AnalyzeOptions, **paths: Path) -> str:
    console = Console(file=io.StringIO(), width=400)
    run_analyze(trace, chosen, paths.get("json"), paths.get("html"), paths.get("images"), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_words_say_what_the_gpu_holds(trace: Path, config: Path) -> None:
    text = said(trace, options(model_config=config, gpu="h100-80g", tp=1))

    assert "One h100-80g with this model holds 426.8 k tokens of KV: a hit rate of 81.2%, 100% of the possible hits." in text
    assert "Kept for 2.0 s after each use" in text
    assert "hit rate by cause" in text


def test_too_small_a_memory_says_how_many_replicas(trace: Path) -> None:
    text = said(trace, options(kv_bytes_per_token=5e5, gpu="a10", replicas=2))

    assert "One a10 without any weights holds 43.2 k tokens" in text
    assert "90 % of the possible hits take 2 such replicas" in text
    assert "2 replicas of 43.2 k tokens each: round robin 75.0%, session sticky 75.0%, prefix aware" in text


def test_figures_page_and_images_are_written(trace: Path, config: Path, tmp_path: Path) -> None:
    page, figures, images = tmp_path / "r.html", tmp_path / "a.json", tmp_path / "charts"

    said(trace, options(model_config=config, gpu="h200", tp=2), json=figures, html=page, images=images)

    found = json.loads(figures.read_text())
    assert found["kv"]["budget"]["tensor_parallel"] == 2 and found["kv"]["kv"]["attention"] == "GQA"
    assert found["memory"]["reuse_time"]["p50_s"] == 1.0 and found["routing"] is None
    assert "2 x h200" in page.read_text()
    assert {"hit.svg", "hit.png", "demand.svg"} <= {path.name for path in images.iterdir()}


def test_without_a_gpu_everything_else_is_there(trace: Path, config: Path) -> None:
    found = analyze_trace(trace, options(model_config=config))

    assert found.kv is None and found.memory is not None and found.profile is not None
    assert found.memory.marginal[0].gain_of_ten_gb is not None  # the bytes per token are known


def test_a_models_folder_will_do(config: Path) -> None:
    assert read_config(config.parent) == LLAMA_8B


def test_faults_of_the_user_are_named(trace: Path, config: Path, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    wrong = [
        (options(gpu="h100-80g"), "Add --model-config or --kv-bytes-per-token"),
        (options(gpu="h1000", model_config=config), "no such GPU"),
        (options(model_config=config, kv_bytes_per_token=1.0), "Give one of them"),
        (options(kv_bytes_per_token=0.0), "more than 0"),
        (options(model_config=tmp_path / "nope.json"), "cannot be read"),
        (options(model_config=tmp_path / "list.json"), "not a JSON object"),
        (options(replicas=0), "1 or more"),
    ]
    for chosen, message in wrong:
        with pytest.raises(TraceError, match=message):
            analyze_trace(trace, chosen)
    with pytest.raises(TraceError, match="cannot write here"):
        said(trace, options(), html=tmp_path / "no" / "folder.html")
