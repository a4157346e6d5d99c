"""SQL on a trace file: DuckDB with the trace as the view `trace`."""

import sys
from pathlib import Path

import duckdb

from tracer.errors import TraceError
from tracer.tracefile import read_footer


def print_query(trace: Path, sql: str, as_csv: bool) -> None:
    """Print the result to stdout. Raises TraceError for SQL that DuckDB refuses."""
    read_footer(trace)
    with duckdb.connect() as database:
        quoted = str(trace).replace("'", "''")
        database.execute(f"create view trace as select * from read_parquet('{quoted}')")
        try:
            relation = database.sql(sql)
            if relation is None:
                return
            if as_csv:
                relation.write_csv("/dev/stdout", header=True)
            else:
                sys.stdout.write(str(relation))
        except duckdb.Error as error:
            raise TraceError("the query failed", seen=str(error), next_step="The columns are in docs/trace-format.md") from error
