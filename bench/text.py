"""Speed of `chatreel materialize`, beside the same prompts made naively, and how many prompts are exact.

    python bench/text.py TRACE.parquet --limit 4000

Tokens/s of prompt text written as OpenAI messages, whole process with start. Naively: random token ids decoded to text, the
usual way of load generators; its exactness is the share of prompts that have their length after tokenizing again.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from chatreel.materializing import Options, run_materialize
from tracer.tokens import TiktokenTokenizer, load_tokenizer
from tracer.tracefile import column, read_table


def ours(trace: Path, tokenizer: str, limit: int, workers: int) -> tuple[float, str]:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        options = Options(tokenizer=tokenizer, limit=limit, workers=workers, check=0)
        run_materialize(trace, Path(folder) / "d", options, lambda _line: None)
        seconds = time.perf_counter() - begin
        said: list[str] = []
        run_materialize(trace, Path(folder) / "d", Options(tokenizer=tokenizer, limit=200, check=200), said.append)
    return seconds, next(line for line in said if "checked" in line).partition(": ")[2]


def naive(inputs: list[int], tokenizer: TiktokenTokenizer) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    begin = time.perf_counter()
    texts = [tokenizer.encoding.decode(rng.integers(0, 100_000, count).tolist()) for count in inputs]
    seconds = time.perf_counter() - begin
    exact = [len(tokenizer.encode(text)) == count for text, count in zip(texts[:100], inputs, strict=False)]
    return seconds, float(np.mean(exact))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--tokenizer", action="append", help="more of them: a tokenizer.json or a model folder")
    options = parser.parse_args()
    inputs = column(read_table(options.trace, ["input_tokens"]), "input_tokens")[: options.limit]
    total = int(inputs.sum())
    print("| | workers | M tokens/s | exact in length and sharing |\n|---|---|---|---|")
    for name in ("cl100k", "o200k", *(options.tokenizer or [])):
        for workers in (1, 2):
            seconds, checked = ours(options.trace, name, options.limit, workers)
            print(f"| {Path(name).name} | {workers} | {total / seconds / 1e6:.1f} | {checked} |", flush=True)
    tokenizer = load_tokenizer("cl100k")
    assert isinstance(tokenizer, TiktokenTokenizer)
    few = inputs[inputs > 0][:400].tolist()
    seconds, exact = naive(few, tokenizer)
    print(f"| random ids decoded (cl100k), text only | 1 | {sum(few) / seconds / 1e6:.1f} | {exact:.0%} in length, no sharing |")


if __name__ == "__main__":
    main()
