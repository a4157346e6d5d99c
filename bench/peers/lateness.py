"""How late a timed trace leaves the client, as the server's clock sees it: one Poisson trace, each client that can play one.

    sh bench/peers/setup.sh FOLDER
    python bench/peers/lateness.py FOLDER [--only chatreel,vllm] [--rate 500] [--seconds 20] [--chunks 64] [--answer-s 1]

A request's lateness is its arrival at the server (first byte read) less its planned time. Answers differ in length from
request to request, and arrivals are matched with the plan by that, not by their order alone. A client's zero is not known: the
least lateness seen is taken as zero, which flatters one that is always late. chatreel says when it handed each request to its
socket, on the server's own clock: the row "absolute" counts from its own zero, known but for the shortest
way from there to the server.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from ceiling import run_client, serving
from clients import PROMPT_TOKENS, Load, aiperf_words, guidellm_words, inference_perf_words, vllm_words
from numpy.typing import NDArray

from replay.results import read_outcomes
from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

Floats = NDArray[np.float64]
FANO_WINDOW_S = 0.1


def poisson_trace(path: Path, rate: float, seconds: float, mean_chunks: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """(planned seconds, chunks) of each request, written as a trace."""
    rng = np.random.default_rng(seed)
    gaps_ns = rng.exponential(1e9 / rate, round(rate * seconds)).astype(np.int64)
    planned_ns = np.cumsum(gaps_ns) - gaps_ns[0]
    chunks = 1 + np.arange(len(planned_ns)) % (2 * mean_chunks - 1)
    rows: Iterator[Request] = (
        {
            "request_id": row,
            "arrival_ns": due_ns,
            "session_id": row,
            "turn": 0,
            "input_tokens": PROMPT_TOKENS,
            "output_tokens": count,
            "input_blocks": [row],
            "input_tail_id": row,
        }
        for row, (due_ns, count) in enumerate(zip(planned_ns.tolist(), chunks.tolist(), strict=True))
    )
    write_trace(path, rows, Footer())
    return planned_ns / 1e9, chunks


def lateness(planned: Floats, chunks: NDArray[np.int64], arrived: Floats, arrived_chunks: NDArray[np.int64]) -> Floats:
    """Seconds from plan to arrival, but for a constant: the k-th arrival that asks for c chunks is the k-th planned."""
    late = np.full(len(planned), np.nan)
    for count in np.unique(chunks):
        rows, came = np.flatnonzero(chunks == count), np.sort(arrived[arrived_chunks == count])
        if len(rows) != len(came):
            raise ValueError(f"{len(came)} of {len(rows)} requests of {count} chunks arrived")
        late[rows] = came - planned[rows]
    return late


def gap_correlation(times: Floats) -> float:
    """Correlation of each gap with the next one; 0 for Poisson."""
    gaps = np.diff(np.sort(times))
    return float(np.corrcoef(gaps[:-1], gaps[1:])[0, 1])


def fano(times: Floats) -> float:
    """Variance to mean of the arrivals in windows of 0.1 s; 1 for Poisson."""
    counts = np.histogram(times, np.arange(times.min(), times.max(), FANO_WINDOW_S))[0]
    return float(counts.var() / counts.mean())


def chatreel(load: Load, workers: int = 1) -> list[str]:
    trace = str(load.scratch / "poisson.parquet")
    words = [sys.executable, "-m", "chatreel", "replay", trace, "--target", load.url, "--scale", "1"]
    return [*words, "--open-loop", "--workers", str(workers), "-o", str(load.scratch / "run")]


def vllm(load: Load) -> list[str]:
    words = [*vllm_words(load), "--dataset-name", "timed_trace", "--dataset-path", _exported(load, "timed_trace")]
    return [*words, "--self-timed", "--num-prompts", str(load.amount), "--no-oversample", "--timed-trace-chunk-hash-size", "16"]


def aiperf(load: Load) -> list[str]:
    words = [*aiperf_words(load), "--custom-dataset-type", "mooncake_trace", "--input-file", _exported(load, "aiperf")]
    return [*words, "--fixed-schedule", "--isl-block-size", "16"]


def guidellm(load: Load) -> list[str]:
    data = f"kind=mooncake,hash_id_block_size=16,source={_exported(load, 'guidellm')}"
    return [*guidellm_words(load), "--profile", "kind=replay", "--data", data]


def inference_perf(load: Load) -> list[str]:
    stage = {"rate": load.amount, "duration": 1}  # wanted, though the trace has the times
    trace = {"file": _exported(load, "inference_perf"), "format": "AzurePublicDataset"}
    sending = {"type": "trace_replay", "trace": trace, "num_workers": 1, "worker_max_concurrency": 10_000, "stages": [stage]}
    return inference_perf_words(load, {"type": "random", "trace": trace}, sending)


def _exported(load: Load, name: str) -> str:
    path = load.scratch / f"for-{name}.jsonl"
    words = [sys.executable, "-m", "chatreel", "export", str(load.scratch / "poisson.parquet"), "--format", name, "-o", str(path)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return str(path)


PLAYERS: dict[str, Callable[[Load], list[str]]] = {
    "chatreel": chatreel,
    "chatreel-2-workers": lambda load: chatreel(load, 2),
    "vllm": vllm,
    "inference-perf": inference_perf,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


def sent_by_chatreel(run_dir: Path, count: int) -> Floats:
    """Seconds since the start of the run at which each request was handed to its socket."""
    sent = np.zeros(count)
    for one in read_outcomes(run_dir, 0)[0]:
        sent[one.request_id] = (one.sent_ns or 0) / 1e9
    return sent


def row(name: str, late: Floats, arrived: Floats) -> str:
    p50, p99, most = np.percentile(late * 1e3, [50, 99, 100])
    return f"| {name} | {p50:.2f} | {p99:.2f} | {most:.1f} | {gap_correlation(arrived):+.3f} | {fano(arrived):.2f} |"


def play(name: str, asked: argparse.Namespace, scratch: Path) -> list[str]:
    """The client's rows of the table."""
    planned, chunks = poisson_trace(scratch / "poisson.parquet", asked.rate, asked.seconds, asked.chunks, asked.seed)
    log = scratch / "arrivals.csv"
    folder, gap_us = asked.folder.resolve(), round(asked.answer_s / asked.chunks * 1e6)
    with serving(folder, log, "--gap-us", str(gap_us)) as url:
        load = Load(url=url, chunks=asked.chunks, streams=0, amount=len(planned), peers=folder, scratch=scratch)
        problem = run_client(PLAYERS[name](load), scratch / "output", limit_s=asked.seconds + 60)[1]
    if problem is not None:
        return [f"| {name} | {problem} |"]
    arrivals = np.loadtxt(log, delimiter=",", dtype=np.int64, ndmin=2)
    arrivals = arrivals[np.argsort(arrivals[:, 0])][-len(planned) :]  # what came before are a client's probes
    arrived = (arrivals[:, 0] - arrivals[0, 0]) / 1e9
    try:
        late = lateness(planned, chunks, arrived, arrivals[:, 3])
    except ValueError as error:
        return [f"| {name} | {error} |"]
    rows = [row(name, late - late.min(), arrived)]
    if name.startswith("chatreel"):
        sent = sent_by_chatreel(scratch / "run", len(planned))
        to_server = late - lateness(planned, chunks, sent, chunks)
        rows.append(row(f"{name}, absolute", late - to_server.min(), arrived))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where setup.sh put the peers and the server")
    parser.add_argument("--only", help="clients, with commas between", default=",".join(PLAYERS))
    parser.add_argument("--rate", type=float, default=500, help="requests/s")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--chunks", type=int, default=64, help="in an answer, on average")
    parser.add_argument("--answer-s", type=float, default=1, help="how long an average answer takes")
    parser.add_argument("--keep", type=Path, help="keep what each client wrote in this folder")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print("| client | p50 ms | p99 ms | max ms | gap correlation | Fano |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="lateness-") as folder:
        planned, _ = poisson_trace(Path(folder) / "poisson.parquet", asked.rate, asked.seconds, asked.chunks, asked.seed)
        print(row("as planned", np.zeros(1), planned), flush=True)
    for name in asked.only.split(","):
        scratch = Path(tempfile.mkdtemp(prefix="lateness-"))
        print("\n".join(play(name, asked, scratch)), flush=True)
        if asked.keep:
            shutil.copytree(scratch, asked.keep / name)
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
