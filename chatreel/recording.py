"""`chatreel record` and `compact`: live figures while it runs, a summary when it ends."""

import ipaddress
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from chatreel.record_metrics import StatsPage, metrics_page
from chatreel.record_view import RecordView
from tracer.errors import TraceError
from tracer.record.compactor import compact
from tracer.record.recording import record
from tracer.record.session import RecordConfig, RecordStats
from tracer.record.texts import TEXT_WARNING, texts_path
from tracer.record.writer import segments_folder


def run_record(config: RecordConfig, prometheus_port: int | None, err: Console) -> Iterator[str]:
    """Record until Ctrl-C. Yields what to say when it has ended."""
    target = ", ".join(config.allow_hosts) if config.forward else ", ".join([config.upstream, *config.more_upstreams])
    page = StatsPage()

    def say(text: str, style: str = "") -> None:
        err.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def ready(url: str) -> None:
        say(f"recording at {url} for {target} (Ctrl-C drains and writes {config.out})")

    with ExitStack() as stack:
        if prometheus_port is not None:
            say(f"metrics at {stack.enter_context(metrics_page(page, prometheus_port))}")
        view = stack.enter_context(RecordView(err, config.workers, time.monotonic))

        def show(stats: RecordStats) -> None:
            page.stats = stats
            view.show(stats)

        result = record(
            config, ready, show, lambda text: say(f"warning: {text}", "bold red" if text.startswith(TEXT_WARNING) else "yellow")
        )
    yield from _ended(result.rows, str(result.path), result.losses)
    if config.keep_text:
        yield f"what was said, in clear -> {texts_path(Path(result.path))}"


def _ended(rows: int, path: str, losses: Mapping[str, int]) -> Iterator[str]:
    yield f"{rows:,} requests -> {path}"
    if losses:
        yield "counted on the way: " + ", ".join(f"{name} {count:,}" for name, count in sorted(losses.items()))


def check_host(host: str, beyond_loopback: bool, err: Console) -> None:
    """Whoever reaches the recorder can use the server behind it, so that must be asked for."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise TraceError("not an address to listen on", seen=repr(host), wanted="an IP address, e.g. 127.0.0.1") from error
    if not is_loopback and not beyond_loopback:
        raise TraceError(
            "others could use the server behind the recorder",
            seen=f"--host {host}",
            wanted="a loopback address, e.g. 127.0.0.1",
            next_step="If that is what you want, add --beyond-loopback",
        )
    if not is_loopback:
        err.print(f"warning: whoever reaches {host} can use the server behind the recorder", style="yellow", highlight=False)


def split_tokenizers(given: list[str]) -> tuple[str, dict[str, str]]:
    """(of all models, of some by name). A path that holds a `=` can only be given for a model."""
    by_model = dict(one.split("=", 1) for one in given if "=" in one)
    defaults = [one for one in given if "=" not in one]
    if len(defaults) > 1:
        raise TraceError(
            "more than one tokenizer for every model", seen=" ".join(defaults), wanted="one, and MODEL=... for others"
        )
    return defaults[0] if defaults else "cl100k", by_model


def run_compact(recording: Path) -> Iterator[str]:
    """Accepts the -o path of the recording or its .segments folder."""
    folder = recording if recording.suffix == ".segments" else segments_folder(recording)
    if not folder.is_dir():
        raise TraceError(
            "no segments of an unfinished recording", path=str(folder), next_step="Give the -o path that the recorder had"
        )
    result = compact(folder, folder.with_suffix(".parquet"))
    yield from _ended(result.rows, str(result.path), result.losses)
