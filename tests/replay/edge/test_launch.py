"""Servers of one's own: ready or not, and none of their processes stays behind."""

import sys
from pathlib import Path
from typing import Any

import pytest

from replay.edge.launch import Launch, LaunchError, free_port, launched, tail

SERVER = """
import http.server, os, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[2])); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def launch(tmp_path: Path, program: str, status: int = 200, **changes: Any) -> Launch:
    port = free_port()
    settings: dict[str, Any] = {
        "command": [sys.executable, "-c", program, str(port), str(status)],
        "env": {},
        "cwd": None,
        "ready": f"http://127.0.0.1:{port}/health",
        "ready_timeout_s": 20.0,
        "grace_s": 0.5,
        "log": tmp_path / "server.log",
    }
    return Launch(**settings | changes)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# A process of it ignores the first signal.
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_the_whole_group_is_gone_afterwards(tmp_path: Path, error: type[BaseException] | None) -> None:
    try:
        with launched(launch(tmp_path, SERVER)) as server:
            assert server.end() is None
            child = int(tail(tmp_path / "server.log")[0].split()[1])
            assert is_alive(child)
            if error is not None:
                raise error
    except KeyboardInterrupt:
        assert error is not None

    assert server.end() == "was killed by SIGTERM"
    assert not is_alive(child)


def test_one_that_ends_before_it_is_ready_is_said_to(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"ended with exit code 3 after .* s, before it was ready"):
        with launched(launch(tmp_path, "print('out of memory'); raise SystemExit(3)")):
            pass

    assert tail(tmp_path / "server.log") == ["out of memory"]


def test_one_that_is_never_ready_is_ended(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="not ready after 1 s: HTTP 503"):
        with launched(launch(tmp_path, SERVER, status=503, ready_timeout_s=1.0)):
            pass

    assert not is_alive(int(tail(tmp_path / "server.log")[0].split()[1]))


def test_a_command_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nosuchserver cannot be started: No such file"):
        with launched(launch(tmp_path, "", command=["nosuchserver"])):
            pass


def test_a_server_that_is_there_already_is_not_measured_in_place_of_ours(tmp_path: Path) -> None:
    first = launch(tmp_path, SERVER)
    with launched(first), pytest.raises(LaunchError, match="something answers at"):
        with launched(launch(tmp_path, SERVER, ready=first.ready, log=tmp_path / "second.log")):
            pass

    assert not (tmp_path / "second.log").exists()
