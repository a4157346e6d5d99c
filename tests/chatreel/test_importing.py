"""Files in and out, from the command line: what is said about them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from chatreel.cli import app
from tracer.errors import TraceError
from tracer.importing import FORMATS, TARGETS
from tracer.record.capturing import CAPTURES
from tracer.tracefile import iter_requests

CSV = "when,p,c,who\n1700000000,374,44,u1\n1700000001.5,20,3,u2\n"


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_csv_of_ones_own_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(CSV)

    said = run("import", tmp_path / "x.csv", "--map", "arrival=when,input=p,output=c,client=who", "-o", tmp_path / "t.parquet")

    assert "2 requests of format csv" in said
    assert "read as: arrival from when, input from p, output from c, client from who; times in s since 1970" in said
    assert [row["client_id"] for row in iter_requests(tmp_path / "t.parquet")] == [0, 1]


def test_a_csv_with_usual_names_needs_no_map_and_others_are_told_of_it(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("timestamp,prompt_tokens,completion_tokens\n1,2,3\n")
    assert "1 requests of format csv" in run("import", tmp_path / "x.csv", "-o", tmp_path / "t.parquet")

    (tmp_path / "x.csv").write_text(CSV)
    with pytest.raises(TraceError, match=r"format not recognised.*--map arrival=COLUMN"):
        run("import", tmp_path / "x.csv", "-o", tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="--map is for plain CSV"):
        run("import", tmp_path / "x.csv", "--format", "azure", "--map", "arrival=when", "-o", tmp_path / "t.parquet")


def test_a_gateways_csv_stays_a_capture(tmp_path: Path) -> None:
    row = '2026-01-01T00:00:00Z,"{""model"": ""m"", ""messages"": [{""role"": ""user"", ""content"": ""hi""}]}",7,9'
    (tmp_path / "g.csv").write_text(f"timestamp,request_json,input_tokens,output_tokens\n{row}\n")

    said = run("import", tmp_path / "g.csv", "-o", tmp_path / "g.parquet")

    assert "1 requests of format gateway_csv" in said


def test_an_export_says_what_is_lost_and_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("timestamp,input_tokens,output_tokens,model\n" + "".join(f"{k},32,3,m\n" for k in range(4)))
    run("import", tmp_path / "x.csv", "-o", tmp_path / "t.parquet")

    said = run("export", tmp_path / "t.parquet", "--format", "timed_trace", "-o", tmp_path / "out.jsonl")

    assert "4 requests -> " in said
    assert "what timed_trace cannot hold, and in how many requests: model (4)" in said
    assert "use: vllm bench serve" in said


def test_help_names_every_format() -> None:
    imports, exports = (" ".join(run(command, "--help").split()) for command in ("import", "export"))

    assert all(name in imports for name in [*FORMATS, *CAPTURES])
    assert all(name in exports for name in [*FORMATS, *TARGETS])
