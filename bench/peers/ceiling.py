"""How much load one client makes, and what a request costs it: each load generator against the same server, closed loop.

    sh bench/peers/setup.sh FOLDER
    python bench/peers/ceiling.py FOLDER [--only chatreel,wrk] [--cells 1x64,64x512] [--coalesce]

Requests/s as the server counts them, once every stream has sent its first. Client CPU is user + system time of all its
processes, between a run and one of twice the length, so that start-up does not count. A cell that fails says why.
"""

import argparse
import ctypes
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from clients import CLIENTS, TIMED, Load

CELL_S = 60  # of each run
PORT = 18080
CELLS = [(chunks, streams) for chunks in (1, 64, 256) for streams in (1, 64, 512)]
FAST = ("chatreel", "chatreel, 2 workers")
PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[str]:
    server = subprocess.Popen([str(folder / "server"), str(PORT), "--log", str(log), *options])
    time.sleep(0.1)
    try:
        yield f"http://127.0.0.1:{PORT}"
    finally:
        server.terminate()
        server.wait()


def reap_orphans() -> None:
    """Processes whose parent has gone become ours, so that their CPU time is counted."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_client(words: list[str], output: Path, limit_s: float = CELL_S) -> tuple[float, str | None]:
    """(CPU seconds, what went wrong) of a client with all its processes."""
    before = _cpu_of_children_s()
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with open(output, "wb") as out:
        try:
            client = subprocess.Popen(
                words, stdout=out, stderr=out, cwd=output.parent, env=os.environ | quiet, start_new_session=True
            )
        except OSError:
            return 0.0, "not installed"
        try:
            code: int | None = client.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        try:
            os.killpg(client.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        client.wait()
    while _has_reaped():
        pass
    if code is None:
        return 0.0, f"not done in {limit_s:g} s"
    if code not in (0, 3):  # 3: chatreel's "the client was the limit", which is what we are here for
        last = output.read_text(errors="replace").strip().splitlines()[-1:]
        return 0.0, f"exit code {code}: {' '.join(last)[:100]}"
    return _cpu_of_children_s() - before, None


def _has_reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] > 0
    except ChildProcessError:
        return False


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def amount_of(name: str, chunks: int, streams: int) -> int:
    """Requests (or seconds) of the shorter of two runs: some seconds of each client's speed."""
    if name in TIMED:
        return 2
    most = {1: 20_000, 64: 2500, 256: 800} if name in FAST else {1: 600, 64: 300, 256: 150}
    wanted = most[chunks] // (4 if streams == 1 else 1)
    return -(-max(wanted, 2 * streams) // streams) * streams


def measure(folder: Path, name: str, chunks: int, streams: int, options: list[str]) -> tuple[float, float] | str:
    """(requests/s, CPU ms a request), or what went wrong."""
    cpu_s, counts, rate = [], [], 0.0
    for times in (1, 2):
        with tempfile.TemporaryDirectory(prefix="ceiling-") as scratch:
            log = Path(scratch) / "arrivals.csv"
            amount = times * amount_of(name, chunks, streams)
            load = Load(
                url=f"http://127.0.0.1:{PORT}", chunks=chunks, streams=streams, amount=amount, peers=folder, scratch=Path(scratch)
            )
            words = CLIENTS[name](load)
            with serving(folder, log, *options):
                used_s, problem = run_client(words, Path(scratch) / "output")
            if problem is not None:
                return problem
            arrivals = np.loadtxt(log, delimiter=",", dtype=np.int64, ndmin=2)
            arrivals = arrivals[arrivals[:, 3] == chunks]
        if len(arrivals) < 2 * streams or len(arrivals) < 20:
            return f"only {len(arrivals)} requests of {chunks} chunks arrived"
        cpu_s.append(used_s)
        counts.append(len(arrivals))
        seen = np.sort(arrivals[:, 1])[max(streams, 10) :]
        rate = (len(seen) - 1) / (seen[-1] - seen[0]) * 1e9
    return rate, (cpu_s[1] - cpu_s[0]) / (counts[1] - counts[0]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where setup.sh put the peers and the server")
    parser.add_argument(
        "--only", help="clients, with commas between", default=";".join(CLIENTS).replace(", ", " ").replace(";", ",")
    )
    parser.add_argument("--cells", help="chunks x streams, with commas between", default=",".join(f"{c}x{s}" for c, s in CELLS))
    parser.add_argument("--coalesce", action="store_true", help="the server writes an answer at once")
    asked = parser.parse_args()
    reap_orphans()
    by_word = {name.replace(", ", " "): name for name in CLIENTS}
    print("| client | chunks x streams | requests/s | chunks/s | client CPU ms/request |\n|---|---|---|---|---|", flush=True)
    for name in asked.only.split(","):
        for cell in asked.cells.split(","):
            chunks, streams = (int(part) for part in cell.split("x"))
            seen = measure(asked.folder.resolve(), by_word[name], chunks, streams, ["--coalesce"] if asked.coalesce else [])
            figures = seen if isinstance(seen, str) else f"{seen[0]:.0f} | {seen[0] * chunks:.0f} | {seen[1]:.3f}"
            print(f"| {name} | {cell} | {figures} |" + (" | |" if isinstance(seen, str) else ""), flush=True)


if __name__ == "__main__":
    main()
