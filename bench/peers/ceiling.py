"""How much load one client makes, and what a request costs it: each load generator against the same server, closed loop.

    sh bench/peers/setup.sh FOLDER
    python bench/peers/ceiling.py FOLDER [--only chatreel,wrk] [--cells 1x64,64x512] [--coalesce]

Requests/s as the server counts them, from when every stream has sent its first to the last one's arrival. Client CPU is user +
system time of all its processes in that span: neither start-up nor the final report counts. A cell that fails says why.
"""

import argparse
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from clients import CLIENTS, TIMED, Load
from numpy.typing import NDArray

CELL_S = 60
SAMPLE_S = 0.05
PORT = 18080
CELLS = [(chunks, streams) for chunks in (1, 64, 256) for streams in (1, 64, 512)]
Used = NDArray[np.float64]
FAST = ("chatreel", "chatreel, 2 workers")


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[str]:
    server = subprocess.Popen([str(folder / "server"), str(PORT), "--log", str(log), *options])
    time.sleep(0.1)
    try:
        yield f"http://127.0.0.1:{PORT}"
    finally:
        server.terminate()
        server.wait()


def run_client(words: list[str], output: Path, limit_s: float = CELL_S) -> tuple[Used, str | None]:
    """([moments, (monotonic s, CPU s of all its processes so far)], what went wrong)."""
    used: list[tuple[float, float]] = []
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(output.parent), "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    with open(output, "wb") as out:
        try:
            client = subprocess.Popen(
                words, stdout=out, stderr=out, cwd=output.parent, env=os.environ | quiet, start_new_session=True
            )
        except OSError:
            return np.zeros((0, 2)), "not installed"
        end = time.monotonic() + limit_s
        while client.poll() is None and time.monotonic() < end:
            used.append((time.monotonic(), _cpu_s(client.pid)))
            time.sleep(SAMPLE_S)
        code = client.poll()
        with suppress(ProcessLookupError):
            os.killpg(client.pid, signal.SIGKILL)
        client.wait()
    if code is None:
        return np.array(used), f"not done in {limit_s:g} s"
    if code not in (0, 3):  # 3: chatreel's "the client was the limit", which is what we are here for
        last = output.read_text(errors="replace").strip().splitlines()[-1:]
        return np.array(used), f"exit code {code}: {' '.join(last)[:100]}"
    return np.array(used), None


def _cpu_s(session: int) -> float:
    """User and system time of a session's processes, and of those of their children that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(int(fields[i]) for i in (11, 12, 13, 14))
    return ticks / os.sysconf("SC_CLK_TCK")


def amount_of(name: str, chunks: int, streams: int) -> int:
    """Requests (or seconds): some seconds of each client's speed."""
    if name in TIMED:
        return 4
    most = {1: 40_000, 64: 6000, 256: 2000} if name in FAST else {1: 3000, 64: 1500, 256: 800}
    wanted = most[chunks] // (4 if streams == 1 else 1)
    return -(-max(wanted, 3 * streams) // streams) * streams


def measure(folder: Path, name: str, chunks: int, streams: int, options: list[str]) -> tuple[float, float] | str:
    """(requests/s, CPU ms a request), or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="ceiling-") as scratch:
        log = Path(scratch) / "arrivals.csv"
        amount = amount_of(name, chunks, streams)
        url = f"http://127.0.0.1:{PORT}"
        load = Load(url=url, chunks=chunks, streams=streams, amount=amount, peers=folder, scratch=Path(scratch))
        words = CLIENTS[name](load)
        with serving(folder, log, *options):
            used, problem = run_client(words, Path(scratch) / "output")
        if problem is not None:
            return problem
        arrivals = np.loadtxt(log, delimiter=",", dtype=np.int64, ndmin=2)
    seen = np.sort(arrivals[arrivals[:, 3] == chunks, 1])[max(streams, 10) :] / 1e9
    if len(seen) < max(streams, 10):
        return f"only {len(seen)} requests after each stream's first"
    took_s, count = seen[-1] - seen[0], len(seen) - 1
    cpu_s = np.diff(np.interp(seen[[0, -1]], used[:, 0], used[:, 1]))[0]
    return count / took_s, cpu_s / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where setup.sh put the peers and the server")
    parser.add_argument(
        "--only", help="clients, with commas between", default=";".join(CLIENTS).replace(", ", " ").replace(";", ",")
    )
    parser.add_argument("--cells", help="chunks x streams, with commas between", default=",".join(f"{c}x{s}" for c, s in CELLS))
    parser.add_argument("--coalesce", action="store_true", help="the server writes an answer at once")
    asked = parser.parse_args()
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
