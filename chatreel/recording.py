"""`chatreel record` and `compact`: a live line while it runs, a summary when it ends."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from tracer.errors import TraceError
from tracer.record.compactor import compact, segments_folder
from tracer.record.recording import record
from tracer.record.session import RecordConfig, RecordStats


def run_record(config: RecordConfig, err: Console) -> Iterator[str]:
    """Record until Ctrl-C. Yields what to say when it has ended."""
    target = ", ".join(config.allow_hosts) if config.forward else ", ".join([config.upstream, *config.more_upstreams])

    def ready(url: str) -> None:
        err.print(f"recording at {url} for {target} (Ctrl-C drains and writes {config.out})", highlight=False, soft_wrap=True)

    def warn(text: str) -> None:
        err.print(f"warning: {text}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    with Live("", console=err, auto_refresh=False, transient=True) if err.is_terminal else _Quiet() as live:
        result = record(config, ready, lambda stats: live.update(_line(stats), refresh=True), warn)
    yield f"{result.rows:,} requests -> {result.path}"
    if result.losses:
        yield "counted on the way: " + ", ".join(f"{name} {count:,}" for name, count in sorted(result.losses.items()))


class _Quiet:
    """Stands for the live line where nobody watches."""

    def __enter__(self) -> "_Quiet":
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, _text: str, refresh: bool = False) -> None: ...


def _line(stats: RecordStats) -> str:
    parts = [f"{stats.seen:,} requests", f"{stats.in_flight} in flight", f"{stats.recorded:,} written"]
    if stats.lost:
        parts.append(f"[red]{stats.lost:,} lost[/red]")
    if stats.prompts_shed:
        parts.append(f"{stats.prompts_shed:,} without prompt")
    if stats.token_drift:
        parts.append(f"{stats.token_drift:,} counted otherwise by the server")
    return ", ".join(parts)


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
    yield f"{result.rows:,} requests -> {result.path}"
    if result.losses:
        yield "counted on the way: " + ", ".join(f"{name} {count:,}" for name, count in sorted(result.losses.items()))
