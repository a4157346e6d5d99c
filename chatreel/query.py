"""SQL on a trace file, or on the run folder of a replay, by DuckDB."""

import sys
from pathlib import Path
from typing import Any

import duckdb

from tracer.errors import TraceError
from tracer.tracefile import read_footer


def print_query(source: Path, sql: str, as_csv: bool) -> None:
    """Print the result to stdout. Raises TraceError for SQL that DuckDB refuses."""
    with duckdb.connect() as database:
        if source.is_dir():
            words = _add_run(database, source)
        else:
            read_footer(source)
            quoted = str(source).replace("'", "''")
            database.execute(f"create view trace as select * from read_parquet('{quoted}')")
            words = "The columns are in docs/trace-format.md"
        try:
            relation = database.sql(sql)
            if relation is None:
                return
            if as_csv:
                relation.write_csv("/dev/stdout", header=True)
            else:
                sys.stdout.write(str(relation))
        except duckdb.Error as error:
            raise TraceError("the query failed", seen=str(error), next_step=words) from error


def _add_run(database: Any, run_dir: Path) -> str:
    """Views `points` (judged figures), `outcomes` and `samples` (as they are in the folder, each with its point)."""
    from replay.report.reading import judge_run
    from replay.report.tables import outcomes_table, points_table, samples_table

    summary = judge_run(run_dir)
    tables = {
        "points": points_table(summary),
        "outcomes": outcomes_table(run_dir, summary),
        "samples": samples_table(run_dir, summary),
    }
    for name, table in tables.items():
        database.register(name, table)
    return "Of a run there are points, outcomes and samples; see `describe outcomes`"
