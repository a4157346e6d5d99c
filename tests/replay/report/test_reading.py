"""Run folders as they are left behind: whole, torn, old, or not run folders at all."""

import json

import pytest

from replay.errors import PlanError
from replay.report.reading import judge_run
from replay.results import compact


def test_torn_last_lines_are_left_out_and_said(kv_fills_at_5x):
    folder = kv_fills_at_5x.write()
    path = folder / "point-2.outcomes.jsonl"
    path.write_bytes(path.read_bytes()[:-25])

    summary = judge_run(folder)

    assert summary.points[2].sent == 1499
    assert [note.seen for note in summary.notes if note.kind == "torn"] == ["1 torn lines in the run folder were left out"]


def test_a_finished_point_in_parquet_reads_as_its_log_does(kv_fills_at_5x):
    folder = kv_fills_at_5x.write()
    before = judge_run(folder)

    for log in folder.glob("*.outcomes*.jsonl"):
        compact(log)

    assert judge_run(folder) == before
    assert before.points[0].latency.itl_ms is not None


def test_a_point_that_never_began_has_no_files(story):
    folder = story.write()
    manifest = json.loads((folder / "run.json").read_text())
    manifest["points"] = [{"index": 0, "scale": 1.0, "planned": 10, "planned_span_s": 3.0}]
    (folder / "run.json").write_text(json.dumps(manifest))

    point = judge_run(folder).points[0]

    assert (point.sent, point.not_sent, point.seed, point.cache.hit_rate_predicted) == (0, 10, None, None)


def test_not_a_run_folder(tmp_path):
    with pytest.raises(PlanError, match=r"not a run folder, wanted run\.json in it") as error:
        judge_run(tmp_path)

    assert error.value.path == str(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"points": []}', '{"points": [{"scale": "much"}]}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)

    with pytest.raises(PlanError, match=r"run\.json: cannot be read; saw"):
        judge_run(tmp_path)
