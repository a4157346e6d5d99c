"""A run folder as Arrow tables: what `chatreel query` and notebooks look at."""

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from replay.judge.summary import Summary
from replay.outcome import Outcome, Sample
from replay.report.flat import point_rows
from replay.results import SCHEMA, read_lines

_LISTS = {"metrics_missing": pa.list_(pa.string()), "metrics_late": pa.list_(pa.string()), "t_ns": pa.int64()}
_SAMPLE_NAMES = [name for name in Sample.__struct_fields__ if name != "servers"]
SAMPLES = pa.schema([("point", pa.int32()), *((name, _LISTS.get(name, pa.float64())) for name in _SAMPLE_NAMES)])


def points_table(summary: Summary) -> pa.Table:
    """A row a point; see flat.py."""
    return pa.Table.from_pylist(point_rows(summary))


def outcomes_table(run_dir: Path, summary: Summary) -> pa.Table:
    """All points' requests, those of killed shares too; `point` and `load` say which."""
    parts = [pa.table({"point": pa.array([], pa.int32()), "load": pa.array([], pa.float64())} | _empty())]
    for one in summary.points:
        for path in sorted(run_dir.glob(f"point-{one.index}.outcomes*.parquet")):
            parts.append(_of_point(pq.read_table(path), one.index, one.scale))
        for path in sorted(run_dir.glob(f"point-{one.index}.outcomes*.jsonl")):
            rows, _ = read_lines(path, Outcome)
            table = pa.Table.from_pylist([msgspec.structs.asdict(row) for row in rows], SCHEMA)
            parts.append(_of_point(table, one.index, one.scale))
    return pa.concat_tables(parts)


def samples_table(run_dir: Path, summary: Summary) -> pa.Table:
    """Gauges and counters as they were read, without the single servers'."""
    rows = []
    for one in summary.points:
        samples, _ = read_lines(run_dir / f"point-{one.index}.samples.jsonl", Sample)
        rows += [{"point": one.index} | {name: getattr(sample, name) for name in _SAMPLE_NAMES} for sample in samples]
    return pa.Table.from_pylist(rows, SAMPLES)


def _empty() -> dict[str, pa.Array]:
    return {field.name: pa.array([], field.type) for field in SCHEMA}


def _of_point(table: pa.Table, index: int, load: float) -> pa.Table:
    point, loads = (pa.array([value] * len(table), kind) for value, kind in ((index, pa.int32()), (load, pa.float64())))
    return table.select(SCHEMA.names).cast(SCHEMA).add_column(0, "load", loads).add_column(0, "point", point)
