"""How soon a replay of a long trace begins, and what memory it takes while it runs.

    chatreel generate --preset chat -n 1000000 -o million.parquet
    python bench/start.py million.parquet --seconds 20 [-- OPTIONS OF chatreel replay]

Runs `chatreel replay --scale 1` against bench/peers/server.c, interrupts it after --seconds, and prints the seconds from the
start of the process to its first request of the trace at the server (its trials of the target come before), and each second's
memory of the process and of those that it started. Loopback only.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SERVER = Path(__file__).with_name("peers") / "server.c"
TRIAL_CHUNKS = 2  # answers asked for when a target is tried out are shorter than this or as long


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def resident_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(one.split()[1]) / 1024 for one in lines if one.startswith("VmRSS")), 0.0)


def children_mb(pid: int) -> float:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return 0.0
    return sum(resident_mb(int(one)) for one in children)


def requests_seen(log: Path) -> list[tuple[int, int]]:
    """(monotonic ns, chunks) of each request; the last line may not be whole."""
    rows = [line.split(",") for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(int(row[1]), int(row[3])) for row in rows]


def figures(run_dir: Path) -> tuple[str, str, str]:
    """(lateness, event loop's delays, what made the point invalid) of a run's only point."""
    point = json.loads((run_dir / "summary.json").read_text())["points"][0]
    late, lag_ms = point["lateness_ms"], point["client_loop_lag_p99_ms"]
    notes = [one["seen"] for one in point["notes"] if one["kind"].startswith("client")]
    return f"p50 {late['p50']:.2f} ms, max {late['max']:.2f} ms", f"p99 {lag_ms:.1f} ms", "; ".join(notes)


def run(trace: Path, seconds: float, options: list[str], folder: Path) -> None:
    port, log = free_port(), folder / "requests.csv"
    subprocess.run(["cc", "-O2", "-o", folder / "server", SERVER], check=True)
    server = subprocess.Popen([folder / "server", str(port), "--gap-us", "1000", "--log", log])
    command = [sys.executable, "-m", "chatreel", "replay", trace, "--target", f"http://127.0.0.1:{port}", "--scale", "1"]
    start_ns = time.monotonic_ns()
    replay = subprocess.Popen([*command, "--out", folder / "run", *options], stdout=subprocess.DEVNULL)
    print("| s | replay, MB | its processes, MB |\n|---|---|---|")
    stopped_s = None
    while replay.poll() is None:
        time.sleep(1)
        passed_s = (time.monotonic_ns() - start_ns) / 1e9
        if replay.poll() is None:
            print(f"| {passed_s:.0f} | {resident_mb(replay.pid):.0f} | {children_mb(replay.pid):.0f} |", flush=True)
        if stopped_s is None and passed_s >= seconds:
            replay.send_signal(signal.SIGINT)
            stopped_s = passed_s
    ended_s = (time.monotonic_ns() - start_ns) / 1e9
    server.terminate()
    server.wait()
    sent = [t for t, chunks in requests_seen(log) if chunks > TRIAL_CHUNKS]
    print(f"\nfirst request {(sent[0] - start_ns) / 1e9:.2f} s after the start, {len(sent)} in all")
    late, lag, notes = figures(folder / "run")
    print(f"sent late: {late}; the loop's delays: {lag}; {notes}")
    print(f"interrupted at {stopped_s:.0f} s, ended at {ended_s:.0f} s with exit code {replay.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seconds", type=float, default=20)
    options, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        run(options.trace, options.seconds, [one for one in others if one != "--"], Path(folder))


if __name__ == "__main__":
    main()
