"""A mitmdump as a user starts it, with the recorder as its script: traffic passes, rows are those of the own proxy."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tracer.tracefile import iter_requests, read_footer

CHAT = "/v1/chat/completions"
BODY = {"model": "stream", "stream": True, "messages": [{"role": "user", "content": "CANARY-prompt " * 20}]}
MITMDUMP = Path(sys.executable).with_name("mitmdump")


@contextmanager
def mitmdump(upstream: str, home: Path, *settings: str) -> Iterator["subprocess.Popen[str]"]:
    path = subprocess.check_output([sys.executable, "-m", "tracer.record.mitmdump_script"], text=True).strip()
    options = [f"confdir={home / 'ca'}", *settings]
    command = [str(MITMDUMP), "--mode", f"reverse:{upstream}", "--listen-host", "127.0.0.1", "-p", "0", "-s", path]
    command += [part for option in options for part in ("--set", option)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: "subprocess.Popen[str]", *wanted: str) -> str:
    """What it says until it has said all of these, or ends."""
    said = ""
    while not all(one in said for one in wanted):
        line = process.stdout.readline()
        if not line:
            break
        said += line
    return said


def test_a_mitmdump_of_the_users_own_records(server: str, tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    with mitmdump(server, tmp_path, f"chatreel_out={out}", "chatreel_tokenizer=o200k", "chatreel_chunk_times=true") as process:
        said = lines_until(process, "listening at ", "chatreel records into")
        url = "http://" + said.partition("listening at ")[2].split()[0].removeprefix("http://").rstrip(".")
        answer = httpx.post(url + CHAT, json=BODY, headers={"Authorization": "Bearer CANARY-key"})
        models = httpx.get(url + "/v1/models")
        process.send_signal(signal.SIGINT)
        said = lines_until(process, "never said")
        process.wait(20)

    (row,) = iter_requests(out)
    footer = read_footer(out)
    assert answer.text.count("CANARY-answer") == 5 and answer.text.endswith("data: [DONE]\n\n")
    assert models.json()["data"]
    assert f"chatreel: 1 requests -> {out}" in said
    assert (row["http_status"], row["output_tokens"], row["upstream"]) == (200, 5, server.removeprefix("http://"))
    assert len(row["input_blocks"]) > 3 and len(row["chunk_delta_us"]) == 5
    assert footer.hashes.tokenizer == "o200k" and footer.losses["passed_through"] == 1
    assert out.stat().st_mode & 0o077 == 0
    assert b"CANARY" not in out.read_bytes()


def test_a_mitmdump_that_cannot_record_says_why_and_ends(server: str, tmp_path: Path) -> None:
    with mitmdump(server, tmp_path, f"chatreel_out={tmp_path / 't.json'}") as process:
        said = lines_until(process, "never said")

    assert "chatreel cannot record" in said and "a path that ends in .parquet" in said
    assert process.returncode == 1
