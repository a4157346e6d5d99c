"""Traces out of traces, from the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chatreel.cli import app
from chatreel.surgery import parse_time_ns
from tracer.errors import TraceError
from tracer.schema import Footer, Request
from tracer.tracefile import iter_requests, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows: list[Request] = [
        {
            "request_id": k,
            "arrival_ns": k * 10**9,
            "session_id": k // 2,
            "model": "ab"[k % 2],
            "input_tokens": 32,
            "input_blocks": [0, 1 + k // 2],
        }
        for k in range(40)
    ]
    write_trace(tmp_path / "t.parquet", rows, Footer())
    return tmp_path / "t.parquet"


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def arrivals_s(path: Path) -> list[int]:
    return [row["arrival_ns"] // 10**9 for row in iter_requests(path)]


def test_slices_by_time_session_and_model(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"

    assert "3 requests ->" in run("slice", trace, "--from", "2s", "--to", "5s", "-o", out)
    assert arrivals_s(out) == [0, 1, 2]
    run("slice", trace, "--session", 1, "--session", 3, "-o", out)
    assert arrivals_s(out) == [2, 3, 6, 7]
    run("slice", trace, "--sessions", 2, "--model", "b", "-o", out)
    assert arrivals_s(out) == [1, 3]
    run("head", trace, "-n", 2, "-o", out)
    assert arrivals_s(out) == [0, 1]


def test_slices_merge_back_and_a_thinned_trace_has_whole_groups(trace: Path, tmp_path: Path) -> None:
    a, b, both, thin = (tmp_path / f"{name}.parquet" for name in ("a", "b", "both", "thin"))
    run("slice", trace, "--to", "7s", "-o", a)
    run("slice", trace, "--from", "7s", "-o", b)

    assert "slices of one trace, joined" in run("merge", b, a, "-o", both)
    assert list(iter_requests(both)) == list(iter_requests(trace))
    assert "of 20 sharing groups" in run("thin", trace, "--keep", "0.25", "--seed", 3, "-o", thin)
    sessions = [row["session_id"] for row in iter_requests(thin)]
    assert len(sessions) == 2 * len(set(sessions)) == 10


def test_whole_groups_an_anonymous_copy_and_the_difference(trace: Path, tmp_path: Path) -> None:
    groups, anonymous = tmp_path / "g.parquet", tmp_path / "a.parquet"

    assert "6 requests ->" in run("slice", trace, "--groups", 3, "-o", groups)
    assert "models without a name now: a, b" in run("anonymize", trace, "--at-least", 30, "--round", "5s", "-o", anonymous)
    assert arrivals_s(anonymous) == [k // 5 * 5 for k in range(40)]
    assert {row["model"] for row in iter_requests(anonymous)} == {None}
    table = run("diff", trace, groups)
    assert "requests per second" in table and "hit rate, endless cache" in table
    rows = {one["name"]: one for one in json.loads(run("diff", trace, groups, "--json"))}
    assert (rows["requests"]["first"], rows["requests"]["second"]) == (40, 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slice", "-o", "x.parquet"], "nothing to cut by"),
        (["slice", "--groups", "0", "-o", "x.parquet"], "no groups asked for"),
        (["anonymize", "--round", "1", "-o", "x.parquet"], "--round is no time"),
        (["slice", "--from", "nine", "-o", "x.parquet"], "--from is no time; saw 'nine', wanted a number with ms, s, m, h or d"),
        (["slice", "--from", "9h", "-o", "x.parquet"], "no request is left"),
        (["merge", "-o", "x.parquet"], "nothing to merge; saw 1 trace"),
        (["thin", "--keep", "2", "-o", "x.parquet"], "no share of a trace; saw 2.0"),
        (["head", "-n", "0", "-o", "x.parquet"], "no requests asked for"),
    ],
)
def test_what_cannot_be_done_is_said(trace: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        CliRunner().invoke(app, [arguments[0], str(trace), *arguments[1:]], catch_exceptions=False)

    assert message in str(caught.value)


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text("hello")

    with pytest.raises(TraceError, match="t.parquet: not a chatreel trace; saw b'hello'"):
        CliRunner().invoke(app, ["head", str(tmp_path / "t.parquet"), "-o", str(tmp_path / "x")], catch_exceptions=False)


def test_times_have_units() -> None:
    assert [parse_time_ns(text, "--to") for text in ("250ms", "1.5h", "2d")] == [
        250_000_000,
        5400 * 10**9,
        172_800 * 10**9,
    ]
