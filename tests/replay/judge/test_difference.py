"""Which changes between two runs of the same load are called worse, and which are noise."""

import numpy as np
import pytest

from replay.judge.difference import differences, figures, same_load
from replay.judge.summary import Slo
from replay.report.reading import judge_run
from replay.results import read_outcomes

SLOS = [Slo(metric="ttft", limit_ms=80.0)]


@pytest.fixture
def point(tmp_path, story):
    """A point of 600 requests whose TTFT wanders, as a queue's does: neighbours are alike."""

    def make(name, *, times=1.0, noise=0, later_start=0.0, share=0.0, **same):
        story.folder, story.scales = tmp_path / name, []
        story.folder.mkdir()
        rng = np.random.default_rng(noise)
        wander = np.exp(0.3 * np.convolve(rng.standard_normal(614), np.ones(15) / 15**0.5, "valid"))
        story.at(1).requests(600, every_ms=100, ttft_ms=lambda i: 50.0 * times * wander[i], **same)
        folder = story.write()
        return judge_run(folder, SLOS).points[0], read_outcomes(folder, 0)[0]

    return make


def verdicts(before, after, **options):
    found = differences(before, after, SLOS, figures_in_all=len(figures(SLOS)), **options)
    return {one.figure: one.verdict for one in found}


def test_a_run_beside_itself_is_the_same_in_every_figure(point):
    one = point("a")

    found = differences(one, one, SLOS, figures_in_all=10)

    assert {(row.change, row.low, row.high, row.verdict) for row in found} == {(0.0, 0.0, 0.0, "same")}
    assert len(found) == len(figures(SLOS))


def test_what_is_a_third_slower_is_worse_and_the_other_way_round_better(point):
    slow, fast = point("slow", times=1.33), point("fast")

    assert verdicts(fast, slow)["TTFT p50, ms"] == "worse"
    assert verdicts(slow, fast)["TTFT p50, ms"] == "better"
    assert verdicts(fast, slow)["TPOT p50, ms"] == "same"
    assert verdicts(fast, slow, tolerance=0.5)["TTFT p50, ms"] != "worse"


def test_noise_alone_is_hardly_ever_called_worse(point):
    runs = [point(f"{i}", noise=i) for i in range(6)]

    worse = sum("worse" in verdicts(*pair).values() for pair in zip(runs, runs[1:], strict=False))

    assert worse <= 1  # of five; one in twenty is allowed


def test_a_colder_cache_and_failed_answers_are_worse(point):
    warm, cold = point("warm"), point("cold", cached=500)
    failed = point("failed")
    for i in range(0, 600, 10):
        failed[1][i] = type(failed[1][i])(
            **{name: getattr(failed[1][i], name) for name in failed[1][i].__struct_fields__} | {"error_kind": "timeout"}
        )

    assert verdicts(warm, cold)["prefix hit rate"] == "worse"
    assert verdicts(warm, failed)["answered share"] == "worse"


def test_another_load_is_named(point):
    one = point("one")

    assert same_load(one, point("same", times=2.0)) is None
    assert same_load(one, point("longer", input_tokens=1500)) == "1,000 and 1,500 prompt tokens"


def test_too_few_requests_have_no_p99(story):
    story.at(1).requests(60, every_ms=100)
    folder = story.write()
    one = judge_run(folder).points[0], read_outcomes(folder, 0)[0]

    assert {row.figure for row in differences(one, one, [], figures_in_all=8)} == {
        "TTFT p50, ms", "TPOT p50, ms", "E2E p50, ms", "output tokens", "answered share", "prefix hit rate"
    }  # fmt: skip
