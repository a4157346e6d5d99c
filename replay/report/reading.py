"""A run folder back into values, then judged. Torn last lines (a killed run) are left out and said."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from replay.errors import PlanError
from replay.judge.metrics import Facts
from replay.judge.summary import Note, Slo, Summary
from replay.judge.verdict import headline, judge_point, judge_points
from replay.outcome import Outcome, Sample


def judge_run(run_dir: Path, slos: Sequence[Slo] = ()) -> Summary:
    """Judge every point of a run folder. Raises PlanError if it is none."""
    path = run_dir / "run.json"
    try:
        manifest: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError as error:
        raise PlanError(
            "not a run folder", path=str(run_dir), wanted="run.json in it", next_step="Use the folder of a replay"
        ) from error
    except msgspec.DecodeError as error:
        raise PlanError("cannot be read", path=str(path), seen=str(error)) from error
    points, torn = [], 0
    for raw in manifest["points"]:
        facts = msgspec.convert(raw, Facts)
        stem = run_dir / f"point-{facts.index}"
        outcomes, lost = _lines(Path(f"{stem}.outcomes.jsonl"), Outcome)
        samples, _ = _lines(Path(f"{stem}.samples.jsonl"), Sample)
        torn += lost
        points.append(judge_point(facts, outcomes, samples, slos))
    points = judge_points(points)
    notes = [
        Note(kind="plan", seen=text, why="the run differs from the trace as recorded", action="see docs/metrics.md")
        for text in manifest.get("notes", ())
    ]
    if torn:
        notes.append(
            Note(
                kind="torn",
                seen=f"{torn} torn lines",
                why="the run was killed while writing",
                action="none: the rest is whole",
            )
        )
    return Summary(
        trace=manifest["trace"],
        target=manifest["target"],
        server=manifest["model"],
        prompt_mode=manifest["prompt_mode"],
        seed=manifest["seed"],
        started_utc=manifest["started_utc"],
        slos=list(slos),
        headline=headline(points),
        points=points,
        notes=notes,
    )


def _lines[Row](path: Path, kind: type[Row]) -> tuple[list[Row], int]:
    decode = msgspec.json.Decoder(kind).decode
    rows, torn = [], 0
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    rows.append(decode(line))
                except msgspec.DecodeError:
                    torn += 1
    except FileNotFoundError:
        return [], 0
    return rows, torn
