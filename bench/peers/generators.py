"""Prefix generators of other projects, each in its own interpreter: a Mooncake trace or its means in, Mooncake lines out.

    PYTHON bench/peers/generators.py PEER SOURCE.jsonl OUT.jsonl SEED REQUESTS [SETTINGS as JSON]

Called by bench/fidelity_peers.py. Prints one JSON object: version, and what had to be mended. Imports nothing of chatreel.
"""

import json
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import numpy as np

BLOCK_TOKENS = 512
VOCABULARY = 32_000


def aiperf(source: Path, seed: int, _requests: int, _settings: dict) -> tuple[list[dict], str, str]:
    """What `aiperf profile --custom-dataset-type mooncake_trace` runs over a trace when a `--synthesis-*` option is given."""
    from aiperf.common import random_generator
    from aiperf.dataset.synthesis import SynthesisParams, Synthesizer

    random_generator.init(seed)
    version = f"aiperf {metadata.version('aiperf')}"
    try:
        return Synthesizer(SynthesisParams()).synthesize_from_file(source), version, ""
    except ValueError as error:
        said = str(error)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    seen = Counter(block for row in rows for block in row["hash_ids"])
    mended = [row for row in rows if row["input_length"] % BLOCK_TOKENS and all(seen[block] > 1 for block in row["hash_ids"])]
    for row in mended:
        row["hash_ids"].pop()
    made = Synthesizer(SynthesisParams()).synthesize_traces(rows)
    for row in made:
        row.setdefault("hash_ids", [])
    return made, version, f"stops with '{said}'; run again without the id of the partial last block in {len(mended)} rows"


def dynamo(source: Path, seed: int, requests: int, settings: dict) -> tuple[list[dict], str, str]:
    """`datagen synthesize --num-requests N`. Its own samplers always start from seed 0, the walk from numpy's global state."""
    sys.path.insert(0, settings["path"])
    from prefix_data_generator.synthesizer import Synthesizer

    np.random.seed(seed)  # noqa: TID251  the peer draws from it
    return Synthesizer(str(source)).synthesize_requests(requests), "Dynamo's prefix_data_generator", ""


def vllm(_source: Path, seed: int, requests: int, settings: dict) -> tuple[list[dict], str, str]:
    """`vllm bench serve --dataset-name prefix_repetition --request-rate R --burstiness B`."""
    from vllm.benchmarks.datasets import PrefixRepetitionRandomDataset

    wanted = {key: settings[key] for key in ("prefix_len", "suffix_len", "num_prefixes", "output_len")}
    dataset = PrefixRepetitionRandomDataset(random_seed=seed)
    made = dataset.sample(PlainTokenizer(), num_requests=requests, **wanted)
    stamps = gamma_stamps(len(made), settings, seed)
    prompts = [(one.prompt, one.expected_output_len) for one in made]
    return as_lines(prompts, stamps), f"vLLM {metadata.version('vllm')}", ""


def inference_perf(_source: Path, seed: int, requests: int, settings: dict) -> tuple[list[dict], str, str]:
    """`data: {type: shared_prefix}` with `load: {type: poisson}`."""
    from inference_perf.config import APIConfig, DataConfig
    from inference_perf.datagen.synthetic.shared_prefix_datagen import SharedPrefixDataGenerator

    words = ("num_unique_system_prompts", "num_users_per_system_prompt", "system_prompt_len", "question_len", "output_len")
    wanted = {key: settings[key] for key in words} | {"seed": seed}
    config = DataConfig.model_validate({"type": "shared_prefix", "shared_prefix": wanted})
    found = SharedPrefixDataGenerator(APIConfig(), config, PlainTokenizer())
    stamps = gamma_stamps(len(found.prompts), settings | {"burstiness": 1.0}, seed)
    prompts = list(zip(found.prompts, found.flat_output_lens, strict=True))
    return as_lines(prompts, stamps), f"inference-perf {metadata.version('inference-perf')}", ""


class PlainTokenizer:
    """Four characters a token, any tokens: text that always has the length asked for. Kinder to the peers than a real one."""

    vocab_size = VOCABULARY
    all_special_ids: tuple[int, ...] = ()

    def get_tokenizer(self):
        return self

    def decode(self, ids, **_options) -> str:
        return np.asarray(ids, dtype="<u4").tobytes().decode("latin-1")

    def encode(self, text: str, **_options) -> list[int]:
        return np.frombuffer(text.encode("latin-1"), dtype="<u4").tolist()

    def count_tokens(self, text: str, **_options) -> int:
        return len(text) // 4


def gamma_stamps(count: int, settings: dict, seed: int) -> list[int]:
    """ms. As vllm.benchmarks.serve.get_request: Gamma gaps, then stretched to count / rate; burstiness 1 is Poisson."""
    shape, rate = settings["burstiness"], settings["rate"]
    times = np.cumsum(np.random.default_rng(seed).gamma(shape, 1 / (rate * shape), count))
    return (times * (count / rate / times[-1]) * 1000).astype(int).tolist()


def as_lines(prompts: list[tuple[str, int]], stamps: list[int]) -> list[dict]:
    """Ids by the content of each block and of those before it; a partial last block has one too."""
    ids: dict[tuple[int, str], int] = {}
    lines = []
    for (text, output), stamp in zip(prompts, stamps, strict=True):
        path, parent = [], -1
        for begin in range(0, len(text), 4 * BLOCK_TOKENS):
            parent = ids.setdefault((parent, text[begin : begin + 4 * BLOCK_TOKENS]), len(ids))
            path.append(parent)
        lines.append({"timestamp": stamp, "input_length": len(text) // 4, "output_length": output, "hash_ids": path})
    return lines


PEERS = {"aiperf": aiperf, "dynamo": dynamo, "vllm": vllm, "inference_perf": inference_perf}


def main() -> None:
    peer, source, out, seed, requests, *settings = sys.argv[1:]
    rows, version, mended = PEERS[peer](Path(source), int(seed), int(requests), json.loads(settings[0]) if settings else {})
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    with open(out, "w") as file:
        for row in rows:
            file.write(json.dumps({key: row[key] for key in keys}) + "\n")
    print(json.dumps({"version": version, "mended": mended, "requests": len(rows)}))


if __name__ == "__main__":
    main()
