"""Command lines of the load generators: each sends `amount` requests (seconds, where it counts time) of 20 prompt tokens over
`streams` streams, closed loop, and asks for `chunks` tokens, streamed."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tracer.schema import Footer, Request
from tracer.tracefile import write_trace

PROMPT_TOKENS = 20
BODY = {"model": "tiny", "prompt": " ".join(["word"] * PROMPT_TOKENS), "stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    url: str
    chunks: int
    streams: int
    amount: int
    peers: Path  # the folder that setup.sh filled
    scratch: Path  # empty


def chatreel(load: Load, workers: int = 1) -> list[str]:
    trace = load.scratch / "closed.parquet"
    write_trace(trace, _sessions(load), Footer())
    words = [sys.executable, "-m", "chatreel", "replay", str(trace), "--target", load.url, "--scale", "1"]
    return [*words, "--workers", str(workers), "-o", str(load.scratch / "run")]


def _sessions(load: Load) -> list[Request]:
    """One session a stream, no think time: a stream's next request goes out when its answer has ended."""
    rows: list[Request] = []
    for turn in range(-(-load.amount // load.streams)):
        for session in range(load.streams):
            rows.append(
                {
                    "request_id": len(rows),
                    "arrival_ns": turn * 1_000_000,
                    "session_id": session,
                    "turn": turn,
                    "think_ns": 0 if turn else None,
                    "input_tokens": PROMPT_TOKENS,
                    "output_tokens": load.chunks,
                    "input_blocks": [len(rows)],
                    "input_tail_id": len(rows),
                }
            )
    return rows


def wrk(load: Load) -> list[str]:
    script = load.scratch / "post.lua"
    body = json.dumps(BODY | {"max_tokens": load.chunks})
    script.write_text(f"wrk.method='POST'\nwrk.body=[[{body}]]\nwrk.headers['Content-Type']='application/json'\n")
    return ["wrk", "-t1", f"-c{load.streams}", f"-d{load.amount}s", "-s", str(script), f"{load.url}/v1/completions"]


def locust(load: Load) -> list[str]:
    script = load.scratch / "locustfile.py"
    body = BODY | {"max_tokens": load.chunks}
    script.write_text(
        "from locust import FastHttpUser, task\n\n"
        f"BODY = {body!r}\n\n\nclass User(FastHttpUser):\n    @task\n    def ask(self):\n"
        "        self.client.post('/v1/completions', json=BODY)\n"
    )
    users = ["-u", str(load.streams), "-r", str(load.streams), "-t", f"{load.amount}s"]
    return [program(load, "locust"), "-f", str(script), "--headless", "--only-summary", "--host", load.url, *users]


def aiperf(load: Load) -> list[str]:
    words = [*aiperf_words(load), "--concurrency", str(load.streams), "--request-count", str(load.amount)]
    return [*words, "--isl", str(PROMPT_TOKENS), "--osl", str(load.chunks)]


def aiperf_words(load: Load) -> list[str]:
    """Without what it sends, as the three below."""
    (load.scratch / "bench").mkdir()
    (load.scratch / "bench" / "tok").symlink_to(load.peers / "tok")  # it takes a folder only by what looks like a model's name
    words = [program(load, "aiperf"), "profile", "--model", "tiny", "--url", load.url, "--endpoint-type", "completions"]
    return [
        *words,
        "--streaming",
        "--tokenizer",
        "bench/tok",
        "--ui-type",
        "none",
        "--artifact-dir",
        str(load.scratch / "aiperf"),
    ]


def guidellm(load: Load) -> list[str]:
    data = load.scratch / "prompts.jsonl"
    prompt = " ".join(f"w{i}" for i in range(PROMPT_TOKENS))
    row = json.dumps({"prompt": prompt, "output_tokens_count": load.chunks})
    data.write_text(f"{row}\n" * load.amount)
    limits = ["--constraint", f"kind=max_requests,count={load.amount}", "--data", f"kind=json_file,path={data}"]
    return [*guidellm_words(load), "--profile", f"kind=concurrent,streams={load.streams}", *limits]


def guidellm_words(load: Load) -> list[str]:
    backend = f"kind=openai_http,target={load.url},model=tiny,request_format=/v1/completions"
    tokenizer = f"kind=hf_auto,model={load.peers / 'tok'}"
    return [program(load, "guidellm"), "run", "--backend", backend, "--tokenizer", tokenizer]


def vllm(load: Load) -> list[str]:
    words = [*vllm_words(load), "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS)]
    words += ["--random-output-len", str(load.chunks), "--num-prompts", str(load.amount)]
    return [*words, "--max-concurrency", str(load.streams)]


def vllm_words(load: Load) -> list[str]:
    words = [program(load, "vllm"), "bench", "serve", "--backend", "openai", "--base-url", load.url]
    words += ["--endpoint", "/v1/completions", "--model", "tiny", "--tokenizer", str(load.peers / "tok")]
    return [*words, "--ignore-eos"]


def inference_perf(load: Load) -> list[str]:
    size = {"type": "normal", "total_count": load.amount, "std_dev": 0}
    data = {
        "type": "random",
        "input_distribution": size | {"min": PROMPT_TOKENS, "max": PROMPT_TOKENS, "mean": PROMPT_TOKENS},
        "output_distribution": size | {"min": load.chunks, "max": load.chunks, "mean": load.chunks},
    }
    sending = {
        "type": "concurrent",
        "num_workers": 1,
        "worker_max_concurrency": load.streams,
        "stages": [{"num_requests": load.amount, "concurrency_level": load.streams}],
    }
    return inference_perf_words(load, data, sending)


def inference_perf_words(load: Load, data: dict[str, object], sending: dict[str, object]) -> list[str]:
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": data,
        "load": sending,
        "server": {"type": "vllm", "model_name": "tiny", "base_url": load.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(load.peers / "tok")},
        "storage": {"local_storage": {"path": str(load.scratch / "reports")}},
    }
    path = load.scratch / "config.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return [program(load, "inference-perf"), "--config_file", str(path)]


def program(load: Load, name: str) -> str:
    return str(load.peers / name / "bin" / name)


CLIENTS: dict[str, Callable[[Load], list[str]]] = {
    "chatreel": chatreel,
    "chatreel, 2 workers": lambda load: chatreel(load, 2),
    "wrk": wrk,
    "locust": locust,
    "vllm": vllm,
    "inference-perf": inference_perf,
    "aiperf": aiperf,
    "guidellm": guidellm,
}
TIMED = ("wrk", "locust")  # `amount` is seconds
