"""How like a real trace are those that other projects' prefix generators make of it: by the gates of `chatreel compare`.

    python bench/fidelity_peers.py conversation_trace.jsonl --seeds 5 --aiperf AIPERF/bin/python \\
        --dynamo PYTHON:dynamo/benchmarks --vllm VLLM/bin/python --inference-perf INFERENCE_PERF/bin/python

Each generator gets the same Mooncake file and makes as many requests; ours are `generate --bootstrap` and `fit` with
`generate`. Then all are given the first two thirds only and graded against the last third. Peers run in their own
interpreters (bench/peers/generators.py); one that is not named is left out.

Shared-prefix generators know numbers, not traces. They get the trace's: mean lengths, rate and burstiness, the mean of what
an endless cache would find of a prompt as the shared part, and that number of requests per prefix of `PER_PREFIX` with which
the hit curve is nearest. All stamps are spread inside the source's time grid, as ours.
"""

import argparse
import dataclasses
import json
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from fidelity import SHOWN, cells, made, read

from synth.fidelity import Fidelity, Trace, compare, head
from tracer.analysis.reuse import hit_curve, touches_as_engine
from tracer.importing import import_trace
from tracer.surgery.slicing import slice_trace
from tracer.tracefile import column

ALL = {key: SHOWN[key] for key in SHOWN if key not in ("think KS", "turns")}  # a Mooncake trace has no sessions
PER_PREFIX = (2, 3, 5, 10, 40, 133, 798)
GENERATORS = Path(__file__).parent / "peers" / "generators.py"
type Make = Callable[[int, Path], Path]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    lines: Path
    trace: Path
    read: Trace

    @property
    def requests(self) -> int:
        return self.read[0].num_rows


def source_of(lines: Path, trace: Path) -> Source:
    return Source(lines=lines, trace=trace, read=read(trace))


def peer(name: str, python: str, source: Source, settings: dict, said: dict[str, str]) -> Make:
    def make(seed: int, folder: Path) -> Path:
        lines, trace = folder / f"{name}.jsonl", folder / f"{name}.parquet"
        words = [str(source.lines), str(lines), str(seed), str(source.requests), json.dumps(settings)]
        done = subprocess.run([python, str(GENERATORS), name, *words], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        told = json.loads(done.stdout.splitlines()[-1])
        said[name] = f"{told['version']}{', which ' if told['mended'] else ''}{told['mended']}"
        rejected = import_trace(lines, trace, source_format="mooncake").bad_rows
        if rejected:
            said[name] += f"; {rejected} rows cannot be read"
        return trace

    return make


def ours(how: str, source: Source) -> Make:
    return lambda seed, folder: made(source.trace, how, seed, folder)


def as_spread(trace: Trace, source: Source) -> Trace:
    return trace[0], dataclasses.replace(trace[1], time_grid_ns=source.read[1].time_grid_ns)


def means(source: Source, per_prefix: int) -> dict:
    """Settings of the shared-prefix generators, by their own words."""
    table, footer = head(source.read, source.requests)
    inputs, outputs = column(table, "input_tokens"), column(table, "output_tokens")
    arrival_s = column(table, "arrival_ns") / 1e9
    gaps = np.diff(arrival_s)
    touches = touches_as_engine(table, footer)
    found = hit_curve(touches).hits_infinite * touches.unit_tokens
    prefixes = len(inputs) // per_prefix
    shared = min(round(found / (prefixes * (per_prefix - 1))), int(inputs.mean()) - 1)
    return {
        "rate": len(inputs) / float(arrival_s[-1] - arrival_s[0]),
        "burstiness": float((gaps.mean() / gaps.std()) ** 2),
        "num_prefixes": prefixes,
        "prefix_len": shared,
        "suffix_len": round(float(inputs.mean()) - shared),
        "output_len": round(float(outputs.mean())),
        "num_unique_system_prompts": prefixes,
        "num_users_per_system_prompt": per_prefix,
        "system_prompt_len": shared,
        "question_len": distribution(inputs, shared),
        "output_distribution": distribution(outputs, 0),
    }


def distribution(values: np.ndarray, less: int) -> dict:
    """inference-perf's: lognormal, with the mean, deviation, least and most of the trace's lengths."""
    mean, least, most = (max(1, round(float(one)) - less) for one in (values.mean(), values.min(), values.max()))
    return {"type": "lognormal", "mean": mean, "std_dev": float(values.std()), "min": least, "max": most}


def nearest(name: str, python: str, source: Source, folder: Path, said: dict[str, str]) -> Make:
    """With the number of requests per prefix that has the smallest error of the hit curve."""
    errors = {}
    for per_prefix in PER_PREFIX:
        settings = settings_for(name, means(source, per_prefix))
        trace = peer(name, python, source, settings, said)(0, folder)
        errors[per_prefix] = compare(source.read, as_spread(read(trace), source))["hit curve, largest error"]
    best = min(errors, key=lambda per_prefix: errors[per_prefix])
    settings = settings_for(name, means(source, best))
    said[f"settings of {name}"] = json.dumps(settings)
    return peer(name, python, source, settings, said)


def settings_for(name: str, found: dict) -> dict:
    return found | {"output_len": found["output_distribution"]} if name == "inference_perf" else found


def makers(source: Source, options: argparse.Namespace, folder: Path, said: dict[str, str]) -> dict[str, Callable[[], Make]]:
    found: dict[str, Callable[[], Make]] = {
        "chatreel, bootstrap": partial(ours, "bootstrap", source),
        "chatreel, model": partial(ours, "model", source),
    }
    if options.aiperf:
        found["AIPerf, synthesis at x1"] = partial(peer, "aiperf", options.aiperf, source, {}, said)
    if options.dynamo:
        python, _, path = options.dynamo.partition(":")
        found["Dynamo, datagen synthesize"] = partial(peer, "dynamo", python, source, {"path": path}, said)
    for title, name in (("vLLM, prefix_repetition", "vllm"), ("inference-perf, shared_prefix", "inference_perf")):
        if python := getattr(options, name):
            found[title] = partial(nearest, name, python, source, folder, said)
    return found


def report(title: str, source: Source, graded: Source, options: argparse.Namespace, folder: Path) -> None:
    said: dict[str, str] = {}
    print(f"\n**{title}**\n\n| | {' | '.join(ALL)} | gates passed | same rows |\n|---|{'---|' * (len(ALL) + 2)}", flush=True)
    for name, maker in makers(source, options, folder, said).items():
        try:
            make = maker()
            traces = [as_spread(read(make(seed, folder)), source) for seed in range(options.seeds)]
        except RuntimeError as error:
            print(f"| {name} | does not run: {error} |", flush=True)
            continue
        found = [compare(graded.read, one) for one in traces]
        print(f"| {name} | {' | '.join(cells(found, ALL))} | {passed(found)} | {same_rows(source, traces[0]):.0%} |", flush=True)
    for name, line in said.items():
        print(f"\n{name}: {line}")


def passed(found: list[Fidelity]) -> str:
    """Of the worst seed."""
    worst = min(found, key=lambda one: sum(gate.passed for gate in one.gates))
    return f"{sum(gate.passed for gate in worst.gates)} of {len(worst.gates)}"


def same_rows(source: Source, trace: Trace) -> float:
    """Share of rows that have the lengths of the source's row in the same place."""
    pairs = [[column(one, name) for name in ("input_tokens", "output_tokens")] for one in (source.read[0], trace[0])]
    count = min(len(one[0]) for one in pairs)
    return float(np.mean([(a[:count] == b[:count]) for a, b in zip(*pairs, strict=True)], axis=1).min()) if count else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, help="Mooncake JSONL")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--aiperf", help="python with aiperf")
    parser.add_argument("--dynamo", help="PYTHON:FOLDER, the folder that holds prefix_data_generator")
    parser.add_argument("--vllm", help="python with vllm")
    parser.add_argument("--inference-perf", help="python with inference-perf")
    parser.add_argument("--part", choices=["whole", "held"], action="append", help="one of the two tables only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "source.parquet"
        import_trace(options.lines, trace, source_format="mooncake")
        whole = source_of(options.lines, trace)
        if "whole" in (options.part or ["whole"]):
            title = f"Learned and graded on {options.lines.name}: {whole.requests:,} requests, worst of {options.seeds} seeds"
            report(title, whole, whole, options, folder)
        if "held" in (options.part or ["held"]):
            first, last = thirds(whole, folder)
            title = f"Learned from the first two thirds ({first.requests:,}), graded on the last ({last.requests:,})"
            report(title, first, last, options, folder)


def thirds(whole: Source, folder: Path) -> tuple[Source, Source]:
    edge = int(column(whole.read[0], "arrival_ns")[-1] * 2 // 3)
    first, last, lines = folder / "first.parquet", folder / "last.parquet", folder / "first.jsonl"
    slice_trace(whole.trace, first, to_ns=edge)
    slice_trace(whole.trace, last, from_ns=edge)
    kept = [line for line in whole.lines.read_text().splitlines() if json.loads(line)["timestamp"] * 1_000_000 < edge]
    lines.write_text("".join(f"{line}\n" for line in kept))
    return source_of(lines, first), source_of(whole.lines, last)


if __name__ == "__main__":
    main()
