"""The summary as a flat table, a row a point: for CSV, SQL and data frames. Pure."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import msgspec

from replay.judge.summary import Point, Summary

LEFT_OUT = ("series", "notes", "window_s", "errors")  # lists; the window, counted failures and the notes' kinds come as cells

type Row = dict[str, Any]


def point_rows(summary: Summary) -> list[Row]:
    """Names of nested figures are joined by `_`: latency_ttft_schedule_ms_p99. What was not measured is None."""
    rows = [_row(summary, one) for one in summary.points]
    names = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in names} for row in rows]


def to_csv(runs: Sequence[tuple[str, Summary]]) -> str:
    """Runs by name, below each other."""
    rows = [{"run": name, **row} for name, summary in runs for row in point_rows(summary)]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _row(summary: Summary, point: Point) -> Row:
    plain = msgspec.to_builtins(point)
    return {
        "trace": summary.trace,
        "target": summary.target,
        "server": summary.server,
        "started_utc": summary.started_utc,
        "label": point.label,
        **_flat({name: value for name, value in plain.items() if name not in LEFT_OUT}),
        "window_from_s": point.window_s[0],
        "window_to_s": point.window_s[1],
        "failed": sum(point.errors.values()),
        "note_kinds": " ".join(note.kind for note in point.notes),
    }


def _flat(value: Row, before: str = "") -> Row:
    found: Row = {}
    for name, one in value.items():
        found |= _flat(one, f"{before}{name}_") if isinstance(one, dict) else {before + name: one}
    return found
