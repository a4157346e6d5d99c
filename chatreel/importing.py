"""`chatreel import`: a public trace, or a capture of traffic that another tool made, whichever the file shows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from chatreel import PRODUCER
from chatreel.progress import byte_progress
from tracer.errors import TraceError
from tracer.formats.named_csv import NAME as CSV
from tracer.formats.named_csv import parse_map
from tracer.importing import FORMATS, HEAD_BYTES, detect, import_trace, reading
from tracer.record.capturing import CAPTURES, detect_capture, import_capture


def run_import(
    source: Path,
    out_path: Path,
    source_format: str | None,
    columns: str | None,
    strict: bool,
    tokenizer: str,
    key: Path | None,
    err: Console,
) -> Iterator[str]:
    """Yields what to say when it is done."""
    mapped = parse_map(columns) if columns is not None else None
    if mapped is not None and source_format not in (None, CSV):
        raise TraceError("--map is for plain CSV", seen=f"--format {source_format}", wanted=f"--format {CSV}, or none")
    name = source_format or (CSV if mapped is not None else _detect(source))
    if name in FORMATS:
        yield from _public(source, out_path, name, strict, mapped, err)
    elif name in CAPTURES:
        yield from _capture(source, out_path, name, strict, tokenizer, key)
    else:
        raise TraceError("no such format", seen=repr(name), wanted=", ".join([*FORMATS, *CAPTURES]))


def _detect(source: Path) -> str:
    try:
        return detect(source)
    except TraceError as fault:
        if fault.wanted is None:  # it is no file, or a trace already
            raise
        try:
            return detect_capture(source)
        except TraceError:
            with reading(source) as (file, _):
                if FORMATS[CSV].looks_like(file.read(HEAD_BYTES)):
                    return CSV
            raise replace(fault, wanted="one of " + ", ".join([*FORMATS, *CAPTURES])) from None


def _public(source: Path, out_path: Path, name: str, strict: bool, columns: dict[str, str] | None, err: Console) -> Iterator[str]:
    with byte_progress(err, f"importing {source.name}") as on_progress:
        done = import_trace(
            source,
            out_path,
            source_format=name,
            strict=strict,
            producer=PRODUCER,
            columns=columns,
            on_progress=on_progress,
        )
    yield f"{done.rows:,} requests of format {done.source_format} -> {out_path}"
    if "read_as" in done.footer.notes:
        yield f"read as: {done.footer.notes['read_as']}"
    if done.footer.time_grid_ns:
        yield f"time stamps lie on a grid of {done.footer.time_grid_ns / 1e9:g} s; replay spreads them"
    if done.first_bad is not None:
        first = f"first: line {done.first_bad.line}: {done.first_bad.reason}"
        yield f"{done.bad_rows:,} bad rows set aside in {done.quarantine} ({first})"


def _capture(source: Path, out_path: Path, name: str, strict: bool, tokenizer: str, key: Path | None) -> Iterator[str]:
    done = import_capture(
        source, out_path, source_format=name, tokenizer=tokenizer, key_path=key, strict=strict, producer=PRODUCER
    )
    yield f"{done.rows:,} requests of format {done.source_format} -> {out_path}"
    yield f"block hashes are keyed with {done.key_path}; without it nobody can confirm a guess at a prompt"
    if done.losses:
        yield "counted on the way: " + ", ".join(f"{what} {count:,}" for what, count in sorted(done.losses.items()))
    if done.secrets_in_source:
        yield f"WARNING: {source} holds credentials in clear ({done.secrets_in_source:,} requests); the trace does not"
    if done.first_bad is not None:
        first = f"first: {done.first_bad.place}: {done.first_bad.reason}"
        yield f"{done.bad_entries:,} bad entries named in {done.quarantine} ({first})"
