"""summary.json holds every figure and reads back."""

import json

import msgspec

from replay.judge.summary import Slo, Summary
from replay.report.json import to_json, write_json
from replay.report.reading import judge_run


def test_summary_json_reads_back_as_the_same_summary(kv_fills_at_5x, tmp_path):
    summary = judge_run(kv_fills_at_5x.write(), [Slo(metric="tpot", limit_ms=20)])

    write_json(summary, tmp_path / "summary.json")

    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes(), type=Summary) == summary


def test_what_was_not_measured_is_null(story):
    story.at(1).requests(60, every_ms=100, cached=None)

    raw = json.loads(to_json(judge_run(story.write())))

    cache = raw["points"][0]["cache"]
    assert cache["hit_rate_usage"] is None and cache["preemptions"] is None and cache["kv_usage_max"] is None
    assert raw["points"][0]["goodput_per_s"] is None


def test_the_same_run_folder_gives_the_same_bytes(kv_fills_at_5x):
    folder = kv_fills_at_5x.write()

    assert to_json(judge_run(folder)) == to_json(judge_run(folder))
