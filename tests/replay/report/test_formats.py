"""One table for CSV, SQL and Markdown: every figure of a point, absent ones empty, servers' words harmless."""

import csv
import io

from replay.report.flat import point_rows, to_csv
from replay.report.markdown import to_markdown
from replay.report.reading import judge_run
from replay.report.tables import outcomes_table, points_table, samples_table


def test_a_row_a_point_with_all_runs_below_each_other(kv_fills_at_5x):
    summary = judge_run(kv_fills_at_5x.write())

    rows = list(csv.DictReader(io.StringIO(to_csv([("before", summary), ("after", summary)]))))

    assert [row["run"] for row in rows] == ["before"] * 3 + ["after"] * 3
    assert [row["label"] for row in rows[:3]] == ["1x", "2x", "5x"]
    assert float(rows[2]["latency_ttft_schedule_ms_p99"]) == summary.points[2].latency.ttft_schedule_ms.p99
    assert int(rows[2]["cache_preemptions"]) == 37 and rows[0]["gpu"] == "" and rows[2]["regime"] == "wall"
    assert not any("series" in name for name in rows[0])


def test_the_same_names_in_every_row_whatever_was_measured(story):
    story.at(1).requests(60, every_ms=100).server(kv=0.3, gpu_count=1, gpu_power_w=300.0)
    story.at(2).requests(60, every_ms=100)

    first, second = point_rows(judge_run(story.write()))

    assert first.keys() == second.keys()
    assert first["gpu_power_w"] == 300 and second["gpu_power_w"] is None


def test_markdown_holds_the_table_of_every_report(story, outcome):
    scale = story.at(1).requests(60, every_ms=100)
    scale.outcomes[9] = outcome(9, planned_ms=900.0, error="http_status", error_text="a | b <script> [x](y) `z`\n# no")

    text = to_markdown("run", judge_run(story.write()))

    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0] == "| by users | 1x |" and table[1] == "| --- | ---: |"
    assert {line.count("|") - line.count("\\|") for line in table} == {3}
    assert "<script>" not in text and "\\[x\\](y)" not in text and "\n# no" not in text


def test_tables_hold_what_the_folder_holds(kv_fills_at_5x):
    folder = kv_fills_at_5x.write()
    summary = judge_run(folder)

    outcomes, samples = outcomes_table(folder, summary), samples_table(folder, summary)

    assert points_table(summary).num_rows == 3
    assert outcomes.num_rows == 2400 and set(outcomes["point"].to_pylist()) == {0, 1, 2}
    assert set(outcomes["load"].to_pylist()) == {1.0, 2.0, 5.0}
    assert max(samples["preemptions"].to_pylist()) == 37 and samples.num_rows == sum(
        len(one.samples) for one in kv_fills_at_5x.scales
    )
