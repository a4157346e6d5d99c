"""A run folder back into values, then judged. Torn lines (a killed run) are left out and said."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from replay.book import read_run
from replay.judge.headline import headline
from replay.judge.knee import with_regimes
from replay.judge.metrics import Facts
from replay.judge.notes import plan_note, torn_note
from replay.judge.summary import Slo, Summary
from replay.judge.verdict import judge_point
from replay.outcome import Sample
from replay.results import iter_outcomes, read_lines, read_outcomes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """run.json, as far as a report needs it."""

    schema_version: int
    trace: str
    target: str
    model: str
    prompt_mode: str
    seed: int
    started_utc: str
    notes: list[str] = []
    points: list[Facts]


def judge_run(run_dir: Path, slos: Sequence[Slo] = ()) -> Summary:
    """Judge every point of a run folder. Raises PlanError if it is none."""
    manifest = read_run(run_dir, Manifest)
    points, torn = [], 0
    for facts in manifest.points:
        outcomes, torn_outcomes = read_outcomes(run_dir, facts.index, with_chunks=False)
        samples, torn_samples = read_lines(run_dir / f"point-{facts.index}.samples.jsonl", Sample)
        torn += torn_outcomes + torn_samples
        points.append(judge_point(facts, outcomes, samples, slos, iter_outcomes(run_dir, facts.index)))
    points = with_regimes(points)
    return Summary(
        trace=manifest.trace,
        target=manifest.target,
        server=manifest.model,
        prompt_mode=manifest.prompt_mode,
        seed=manifest.seed,
        started_utc=manifest.started_utc,
        slos=list(slos),
        headline=headline(points),
        points=points,
        notes=[*map(plan_note, manifest.notes), *([torn_note(torn)] if torn else [])],
    )
