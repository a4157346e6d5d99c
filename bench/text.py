"""Speed of `chatreel materialize` under several tokenizers and chat templates, how many prompts are exact, peak memory by size.

    python bench/text.py TRACE.parquet --limit 4000      tokens/s; a minute goes into training two tokenizers
    python bench/text.py memory                          prompts of some 300 tokens, to a file

Tokens/s of prompt text written as OpenAI messages, whole process with start. The byte-level BPE and the SentencePiece-like
BPE have 32,000 tokens, trained on a sixth of Python's standard library. Naively: random token ids decoded to text, the usual
way of load generators; its exactness is the share of prompts that have their length after tokenizing again.
"""

import argparse
import json
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, ByteLevelBPETokenizer, SentencePieceBPETokenizer

from chatreel.materializing import Options, run_materialize
from synth.generating import generate_trace
from synth.model import load_workload
from tracer.tokens import TiktokenTokenizer, load_tokenizer
from tracer.tracefile import column, read_table

FAMILIES = {"byte-level BPE": ByteLevelBPETokenizer, "SentencePiece BPE": SentencePieceBPETokenizer}
TEMPLATES = {
    "ChatML": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "Llama 3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
        "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}
MARKERS = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ALONE = """
import resource, sys
from pathlib import Path
from chatreel.materializing import Options, run_materialize
run_materialize(Path(sys.argv[1]), Path(sys.argv[2]), Options(check=0), lambda _line: None)
print(*(resource.getrusage(who).ru_maxrss // 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
"""


def trained(folder: Path) -> dict[str, str]:
    """Name -> model folder."""
    sources = sorted(path for path in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in path.parts)
    texts = [path.read_text(errors="replace") for path in sources[::6]]
    found = {}
    for family, kind in FAMILIES.items():
        begin = time.perf_counter()
        tokenizer = kind()
        tokenizer.train_from_iterator(texts, vocab_size=32_000, min_frequency=2, show_progress=False)
        print(f"{family}: {tokenizer.get_vocab_size():,} tokens in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
        for name, template in TEMPLATES.items():
            model = folder / f"{family}, {name}"
            model.mkdir()
            tokenizer.save(str(model / "tokenizer.json"))
            config = {"bos_token": "<|begin_of_text|>", "chat_template": template}
            (model / "tokenizer_config.json").write_text(json.dumps(config))
            found[model.name] = str(model)
    return found


def ours(trace: Path, tokenizer: str, limit: int, workers: int) -> float:
    """Seconds."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        options = Options(tokenizer=tokenizer, limit=limit, workers=workers, check=0)
        run_materialize(trace, Path(folder) / "d", options, lambda _line: None)
        return time.perf_counter() - begin


def checked(trace: Path, tokenizer: str, prompts: int) -> str:
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        run_materialize(trace, Path(folder) / "d", Options(tokenizer=tokenizer, limit=prompts, check=prompts), said.append)
    return next(line for line in said if "checked" in line).partition(": ")[2]


def naive(inputs: list[int], tokenizer: TiktokenTokenizer) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    begin = time.perf_counter()
    texts = [tokenizer.encoding.decode(rng.integers(0, 100_000, count).tolist()) for count in inputs]
    seconds = time.perf_counter() - begin
    exact = [len(tokenizer.encode(text)) == count for text, count in zip(texts[:100], inputs, strict=False)]
    return seconds, float(np.mean(exact))


def speeds(trace: Path, limit: int, more: list[str]) -> None:
    inputs = column(read_table(trace, ["input_tokens"]), "input_tokens")[:limit]
    total = int(inputs.sum())
    with tempfile.TemporaryDirectory() as folder:
        models = {"cl100k, ChatML": "cl100k", "o200k, ChatML": "o200k", **trained(Path(folder))}
        models |= {Path(name).name: name for name in more}
        print("| | M tokens/s, 1 worker | 2 workers | exact in length and sharing |\n|---|---|---|---|")
        for name, tokenizer in models.items():
            ours(trace, tokenizer, 10, 1)  # reads its files
            rates = [f"{total / ours(trace, tokenizer, limit, workers) / 1e6:.1f}" for workers in (1, 2)]
            print(f"| {name} | {' | '.join(rates)} | {checked(trace, tokenizer, 100)} |", flush=True)
    tokenizer = load_tokenizer("cl100k")
    assert isinstance(tokenizer, TiktokenTokenizer)
    few = inputs[inputs > 0][:400].tolist()
    seconds, exact = naive(few, tokenizer)
    print(f"| random ids decoded (cl100k), text only | {sum(few) / seconds / 1e6:.1f} | | {exact:.0%} in length, no sharing |")


def memory() -> None:
    overrides = {"system_prompts.tokens": 100, "input_tokens": {"min": 40, "max": 100}, "output_tokens": {"min": 10, "max": 60}}
    print("| requests | tokens | made, peak | as text, peak | its workers | requests/s | M tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for requests in (10_000, 100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as folder:
            trace, out = Path(folder) / "t.parquet", Path(folder) / "d.jsonl"
            words = [sys.executable, __file__, "make", str(trace), json.dumps(overrides | {"requests": requests})]
            made = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
            begin = time.perf_counter()
            words = [sys.executable, "-c", ALONE, str(trace), str(out)]
            own, children = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
            seconds = time.perf_counter() - begin
            tokens = int(column(read_table(trace, ["input_tokens"]), "input_tokens").sum())
        rate = f"{requests / seconds:,.0f} | {tokens / seconds / 1e6:.1f}"
        print(f"| {requests:,} | {tokens:,} | {made} MB | {own} MB | {children} MB | {rate} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["make"]:
        workload = load_workload(preset="chat", overrides=json.loads(sys.argv[3]))
        generate_trace(workload, 0, Path(sys.argv[2]))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="or `memory`")
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--tokenizer", action="append", default=[], help="more of them: a tokenizer.json or a model folder")
    options = parser.parse_args()
    if str(options.trace) == "memory":
        memory()
    else:
        speeds(options.trace, options.limit, options.tokenizer)


if __name__ == "__main__":
    main()
