"""`chatreel record` as it is watched: table, plain lines, metrics page."""

import http.client
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from rich.console import Console

from chatreel.record_metrics import StatsPage, metrics_page
from chatreel.record_view import Rate, RecordView, facts
from tracer.errors import TraceError
from tracer.record.messages import Figures
from tracer.record.session import RecordStats
from tracer.tracefile import iter_requests

STATS = RecordStats(
    seen=1200,
    in_flight=7,
    recorded=1100,
    lost=3,
    prompts_shed=2,
    token_drift=5,
    figures=Figures(
        prompt_blocks=1000,
        reused_blocks=742,
        ttft_us={136: 98, 160: 2},
        input_tokens={80: 1},
        output_tokens={64: 1},
    ),
)


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 5}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as one:
        one.daemon_threads = True
        one.block_on_close = False
        thread = Thread(target=one.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{one.server_port}"
        one.shutdown()
        thread.join()


def scrape(url: str) -> dict[str, float]:
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name + "".join(sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_facts_are_rates_quantiles_shares_and_drops() -> None:
    lines = dict(facts(STATS, per_s=12.34))

    assert lines == {
        "requests": "1,200 (12.3/s), 7 in flight, 1,100 written",
        "first token": "p50 131 ms, p99 1.05 s",
        "tokens": "p50 in 1,024, out 256",
        "prefix reuse": "74.2% of 1,000 prompt blocks",
        "token drift": "5 requests",
        "drops": "3 rows lost, 2 without prompt",
    }


def test_reuse_that_is_a_lower_bound_says_so_and_why() -> None:
    forgetful = RecordStats(figures=Figures(prompt_blocks=10, reused_blocks=5, forgets=True))

    assert dict(facts(STATS, 0, workers=2))["prefix reuse"].startswith("at least (per worker) 74.2%")
    assert dict(facts(forgetful, 0))["prefix reuse"].startswith("at least (old blocks forgotten) 50.0%")
    assert dict(facts(RecordStats(), 0))["prefix reuse"] == "-"


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    rate = Rate(0.0)

    found = [rate.at(float(second), 100 * min(second, 20)) for second in range(1, 32)]

    assert (found[0], found[19], found[24], found[30]) == (100.0, 100.0, 50.0, 0.0)


def shown(seconds: range, **console: object) -> str:
    out, clock = StringIO(), iter([0.0, *map(float, seconds)])
    with RecordView(Console(file=out, width=80, **console), 1, lambda: next(clock)) as view:
        for _ in seconds:
            view.show(STATS)
    return out.getvalue()


def test_without_a_terminal_there_is_a_plain_line_each_ten_seconds() -> None:
    lines = shown(range(1, 26)).splitlines()

    assert len(lines) == 2
    assert "requests: 1,200 (120.0/s), 7 in flight" in lines[0] and "prefix reuse: 74.2%" in lines[0]
    assert "\x1b" not in "".join(lines)


def test_a_terminal_shows_a_table_that_is_gone_at_the_end() -> None:
    text = shown(range(1, 3), force_terminal=True)

    assert "prefix reuse" in text and "3 rows lost" in text
    assert text.count("\x1b[2K") >= 6  # erased lines


def test_the_metrics_page_tells_the_same_numbers() -> None:
    page = StatsPage()
    with metrics_page(page, 0) as url:
        before = scrape(url)
        page.stats = STATS
        after = scrape(url)

    assert url.startswith("http://127.0.0.1:")
    assert before["chatreel_record_requests_total"] == 0
    assert "chatreel_record_recent_ttft_seconds0.5" not in before
    assert after["chatreel_record_requests_total"] == 1200
    assert after["chatreel_record_requests_in_flight"] == 7
    assert after["chatreel_record_rows_lost_total"] == 3
    assert after["chatreel_record_reused_prompt_blocks_total"] == 742
    assert after["chatreel_record_recent_ttft_seconds0.5"] == pytest.approx(0.131, rel=0.01)
    assert after["chatreel_record_recent_input_tokens0.99"] == 1024


def test_a_taken_metrics_port_says_so() -> None:
    with metrics_page(StatsPage(), 0) as url:
        port = int(url.split(":")[2].partition("/")[0])

        with pytest.raises(TraceError, match="cannot serve metrics here"), metrics_page(StatsPage(), port):
            pass


@pytest.mark.parametrize("workers", [1, 2])
def test_the_command_records_serves_metrics_and_ends_on_sigterm(server: str, tmp_path: Path, workers: int) -> None:
    out = tmp_path / "t.parquet"
    options = ["--upstream", server, "--port", "0", "-o", str(out), "--workers", str(workers), "--prometheus", "0"]
    with subprocess.Popen([sys.executable, "-m", "chatreel", "record", *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        metrics_url = process.stderr.readline().split()[-1]
        port = int(process.stderr.readline().split()[2].rpartition(":")[2])
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 100}]})
        for _ in range(20):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            assert b"usage" in connection.getresponse().read()
            connection.close()
        found = scrape(metrics_url)
        while found["chatreel_record_rows_written_total"] < 20 or found["chatreel_record_prompt_blocks_total"] < 120:
            found = scrape(metrics_url)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()

    assert process.returncode == 0, said
    assert found["chatreel_record_requests_total"] == 20
    assert found["chatreel_record_token_drift_requests_total"] == 20
    new_blocks = found["chatreel_record_prompt_blocks_total"] - found["chatreel_record_reused_prompt_blocks_total"]
    assert new_blocks in [found["chatreel_record_prompt_blocks_total"] / 20 * n for n in range(1, workers + 1)]
    assert found["chatreel_record_recent_input_tokens0.5"] == pytest.approx(100, rel=0.05)
    assert f"20 requests -> {out}" in said
    assert len(list(iter_requests(out))) == 20
