"""`chatreel report --format`: runs judged again, as text on stdout."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from replay.errors import PlanError
from replay.judge.summary import Slo, Summary
from replay.judge.verdict import EXIT_INVALID, EXIT_SLO_MISSED, exit_code
from replay.report.reading import judge_run

Format = Literal["json", "csv", "md", "html"]


def print_reports(run_dirs: Sequence[Path], how: Format, slos: Sequence[Slo], attain: float | None) -> int:
    """The worst exit code of the runs."""
    if how == "html" and len(run_dirs) > 1:
        raise PlanError(
            "a page has one run", seen=f"{len(run_dirs)} runs", next_step="Leave out --format: each gets a report.html of its own"
        )
    runs = [(run_dir.name or str(run_dir), judge_run(run_dir, slos)) for run_dir in run_dirs]
    sys.stdout.write(_text(runs, how))
    return worst([exit_code(summary, attain) for _, summary in runs])


def worst(codes: Sequence[int]) -> int:
    """A run that must not be trusted comes before one that missed its SLO, and that before one that was cut short."""
    return next((code for code in (EXIT_INVALID, EXIT_SLO_MISSED, 1) if code in codes), 0)


def _text(runs: Sequence[tuple[str, Summary]], how: Format) -> str:
    match how:
        case "csv":
            from replay.report.flat import to_csv

            return to_csv(runs)
        case "md":
            from replay.report.markdown import to_markdown

            return "\n".join(to_markdown(name, summary) for name, summary in runs)
        case "html":
            from replay.report.html import page

            return page(runs[0][1])
        case "json":
            from replay.report.json import to_json

            texts = [to_json(summary).decode() for _, summary in runs]
            return (texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]") + "\n"
