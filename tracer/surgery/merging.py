"""Several traces in one, by time from a common zero, or slices of one trace put together again."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from tracer.errors import TraceError
from tracer.formats import source_extra
from tracer.schema import Footer, HashScheme, Request
from tracer.surgery.slicing import NUMBER, OUTSIDE, REFERRING, SliceOf, number_in_whole, refuse_same, slice_of
from tracer.tracefile import TraceWriter, count_requests, iter_requests, read_footer, read_table

MIXED = "merged"  # the source format of traces that were not slices of one
_BLOCK_COLUMNS = ("input_blocks", "output_blocks")
_ID_COLUMNS = ("client_id", "session_id", "group_id")


def merge_traces(paths: Sequence[Path], out_path: Path) -> int:
    """Returns the requests written.

    Each trace begins at the common zero, and shares nothing with the others: its block, session, client and content ids
    become others, since dense ids of two files cannot be matched. Slices of one trace that follow each other instead go back to
    their own times, with the ids that they have in common. Raises TraceError where blocks have different sizes.
    """
    if len(paths) < 2:
        raise TraceError("nothing to merge", seen=f"{len(paths)} trace", wanted="two or more")
    for path in paths:
        refuse_same(path, out_path)
    footers = [read_footer(path) for path in paths]
    sizes = {footer.block_tokens for footer in footers}
    if len(sizes) > 1:
        raise TraceError(
            "traces with blocks of different sizes cannot be one",
            seen=", ".join(f"{footer.block_tokens} tokens in {path}" for path, footer in zip(paths, footers, strict=True)),
            wanted="equal block_tokens",
        )
    slices = [slice_of(footer) for footer in footers]
    first = slices[0]
    if first is not None and all(one is not None and one.trace == first.trace for one in slices):
        return _join([one for one in slices if one is not None], paths, footers, out_path)
    return _mix(paths, footers, out_path)


def _join(slices: list[SliceOf], paths: Sequence[Path], footers: list[Footer], out_path: Path) -> int:
    """Slices of one trace: rows at their times in the whole, numbered anew; references across the cuts come back."""
    counts = [count_requests(path) for path in paths]
    is_whole = sum(counts) == slices[0].requests  # no request is there twice, or the loop below raises
    zero_ns = 0 if is_whole else min(one.start_ns for one in slices)
    first = _first_of_span(slices, counts)
    notes = {name: text for name, text in footers[0].notes.items() if name != "slice_of"}
    if not is_whole:
        within = msgspec.structs.replace(slices[0], start_ns=zero_ns, first_request=first)
        notes["slice_of"] = msgspec.json.encode(within).decode()
    epoch_ns = None if slices[0].epoch_ns is None else slices[0].epoch_ns + zero_ns
    parts = [
        _of_slice(path, number, one, one.start_ns - zero_ns) for number, (one, path) in enumerate(zip(slices, paths, strict=True))
    ]
    new_of: list[dict[int, int]] = [{} for _ in slices]  # by number in the slice
    of_whole: dict[int, int] = {}
    with TraceWriter(out_path, replace(footers[0], epoch_ns=epoch_ns, notes=notes)) as writer:
        for count, (arrival_ns, number, part, row) in enumerate(heapq.merge(*parts, key=lambda one: one[:2])):
            if of_whole.setdefault(number, count) != count:
                raise TraceError("slices overlap", path=str(paths[part]), seen=f"request {number} of the whole twice")
            new_of[part][row["request_id"]] = count
            _relink(row, new_of[part])
            _restore(row, of_whole, number if not is_whole and first is None else None)
            row["request_id"], row["arrival_ns"] = count, arrival_ns
            writer.write(row)
    return writer.rows_written


def _first_of_span(slices: list[SliceOf], counts: list[int]) -> int | None:
    """The number in the whole that slices which follow each other begin with; None where there are gaps."""
    spans = sorted((one.first_request, count) for one, count in zip(slices, counts, strict=True) if one.first_request is not None)
    follows = all(before + count == after for (before, count), (after, _) in pairwise(spans))
    return spans[0][0] if follows and len(spans) == len(slices) else None


def _of_slice(path: Path, part: int, within: SliceOf, later_ns: int) -> Iterator[tuple[int, int, int, Request]]:
    """(arrival since the common zero, number in the whole, which slice, row)"""
    return ((row["arrival_ns"] + later_ns, number_in_whole(row, within), part, row) for row in iter_requests(path))


def _restore(row: Request, of_whole: dict[int, int], number: int | None) -> None:
    """References that a slice had to set aside, where what they name is here now.

    `number`: the row's in the whole, if it still needs it.
    """
    before = source_extra(row)
    extra = {name: value for name, value in before.items() if name not in (OUTSIDE, NUMBER)}
    left = {}
    for name, other in before.get(OUTSIDE, {}).items():
        found = [of_whole.get(one) for one in other] if name == "wait_for" else of_whole.get(other)
        if found is None or (isinstance(found, list) and None in found):
            left[name] = other
        else:
            row[name] = found  # type: ignore[literal-required]
    if left:
        extra[OUTSIDE] = left
    if number is not None:
        extra[NUMBER] = number
    if extra != before:
        row["source_extra"] = msgspec.json.encode(extra).decode() if extra else None


@dataclass(slots=True)
class _Part:
    """What to add to the ids of one of the traces."""

    add: dict[str, int]
    new_of: dict[int, int] = field(default_factory=dict)


def _mix(paths: Sequence[Path], footers: list[Footer], out_path: Path) -> int:
    parts, streams = [], []
    add = dict.fromkeys((*_ID_COLUMNS, "block", "content"), 0)
    for number, path in enumerate(paths):
        parts.append(_Part(dict(add)))
        for name, highest in _highest_ids(path).items():
            add[name] += highest + 1
        streams.append(_stream(path, number))
    losses: dict[str, int] = {}
    for footer in footers:
        for name, lost in footer.losses.items():
            losses[name] = losses.get(name, 0) + lost
    footer = Footer(
        producer=footers[0].producer,
        source_format=MIXED,
        block_tokens=footers[0].block_tokens,
        time_unit_ns=min(footer.time_unit_ns for footer in footers),
        time_grid_ns=_common([footer.time_grid_ns for footer in footers]),
        tail_rule=_common([footer.tail_rule for footer in footers]),
        hashes=HashScheme(
            tokenizer=_common([footer.hashes.tokenizer for footer in footers]),
            template=_common([footer.hashes.template for footer in footers]),
            chained=all(footer.hashes.chained for footer in footers),
            scope="local" if any(footer.hashes.scope == "local" for footer in footers) else "global",
        ),
        losses=losses,
        notes={"merged": str(len(paths))},
    )
    with TraceWriter(out_path, footer) as writer:
        for count, (_, number, row) in enumerate(heapq.merge(*streams, key=lambda one: one[:2])):
            part = parts[number]
            part.new_of[row["request_id"]] = count
            _relink(row, part.new_of)
            _shift(row, part.add)
            row["request_id"] = count
            writer.write(row)
    return writer.rows_written


def _common[Value](values: Sequence[Value | None]) -> Value | None:
    """What all of them say, if they agree."""
    return values[0] if len(set(values)) == 1 else None


def _stream(path: Path, number: int) -> Iterator[tuple[int, int, Request]]:
    """(arrival since the common zero, which trace, row)"""
    return ((row["arrival_ns"], number, row) for row in iter_requests(path))


def _highest_ids(path: Path) -> dict[str, int]:
    table = read_table(path, [*_ID_COLUMNS, *_BLOCK_COLUMNS, "input_tail_id", "segments"])
    highest = {name: int(np.max(table[name].fill_null(-1).to_numpy(), initial=-1)) for name in _ID_COLUMNS}
    lists = [table[name].combine_chunks().flatten() for name in _BLOCK_COLUMNS] + [
        table["input_tail_id"].combine_chunks().fill_null(-1)
    ]
    highest["block"] = max(int(np.max(ids.to_numpy(zero_copy_only=False), initial=-1)) for ids in lists)
    contents = table["segments"].combine_chunks().flatten().field("content_id").fill_null(-1)
    highest["content"] = int(np.max(contents.to_numpy(zero_copy_only=False), initial=-1))
    return highest


def _relink(row: Request, new_of: dict[int, int]) -> None:
    for name in REFERRING:
        other = row.get(name)
        if isinstance(other, int):
            row[name] = new_of.get(other)  # type: ignore[literal-required]
    if (waits := row.get("wait_for")) is not None:
        row["wait_for"] = [new_of[one] for one in waits if one in new_of]


def _shift(row: Request, add: dict[str, int]) -> None:
    for name in _ID_COLUMNS:
        if (own := row.get(name)) is not None:
            row[name] = own + add[name]  # type: ignore[literal-required, operator]
    for name in _BLOCK_COLUMNS:
        if (ids := row.get(name)) is not None:
            row[name] = [one + add["block"] for one in ids]  # type: ignore[literal-required, attr-defined]
    if (tail := row.get("input_tail_id")) is not None:
        row["input_tail_id"] = tail + add["block"]
    for segment in row.get("segments") or []:
        segment["content_id"] += add["content"]
