"""`chatreel replay` and `report`: run, judge, write the three reports."""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from chatreel.progress import replay_progress
from replay.edge.clock import clock_state, clock_words
from replay.errors import PlanError
from replay.foretelling import PredictConfig, run_predict
from replay.gathering import gather
from replay.grid import Setting, needed, run_grid
from replay.judge.summary import Slo
from replay.judge.verdict import EXIT_SLO_MISSED, exit_code
from replay.plan.share import WHOLE, Shard
from replay.progress import OnProgress
from replay.report.json import write_json
from replay.report.reading import judge_run
from replay.report.text import print_summary
from replay.run import ReplayConfig, run_replay
from replay.sim.split import Split


def parse_slos(texts: Sequence[str]) -> list[Slo]:
    """`ttft:500` -> TTFT within 500 ms."""
    slos = []
    for text in texts:
        metric, _, limit = text.partition(":")
        try:
            if metric not in ("ttft", "tpot", "e2e"):
                raise ValueError(metric)
            limit_ms = float(limit.removesuffix("ms"))
            if not 0 < limit_ms < math.inf:
                raise ValueError(limit)
            slos.append(Slo(metric=metric, limit_ms=limit_ms))  # type: ignore[arg-type]
        except ValueError as error:
            raise PlanError("no such SLO", seen=repr(text), wanted="METRIC:MS, e.g. ttft:500, tpot:40 or e2e:10000") from error
    return slos


def parse_shard(text: str | None) -> Shard:
    """`0/4`: the first of four."""
    if text is None:
        return WHOLE
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise PlanError("no such shard", seen=repr(text), wanted="I/N, counted from 0: 0/4, 1/4, 2/4 and 3/4 of four hosts")
    return Shard(index=int(found[1]), count=int(found[2]))


def parse_start(text: str | None) -> int | None:
    """Nanoseconds since 1970."""
    if text is None:
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return round(float(text) * 1e9)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise PlanError(
            "no such time" if found is None else "a time without its zone is another one on every host",
            seen=f"--start-at {text!r}",
            wanted="2026-01-31T09:30:00Z, or seconds since 1970",
            next_step="Give all hosts what `date -u -d +2min +%FT%TZ` says on one of them",
        )
    return round(found.timestamp() * 1e9)


def run_and_report(
    config: ReplayConfig,
    slos: Sequence[Slo],
    attain: float | None,
    out: Console,
    err: Console,
    ray: str | None = None,
    ray_workers: int | None = None,
) -> int:
    """Returns the exit code: 0 ok, 1 cut short, 3 the client was the limit, 4 an SLO was missed."""
    if (config.run_dir / "run.json").exists():
        raise PlanError("there is a run here already", path=str(config.run_dir), next_step="Choose another --out")
    err.print(f"seed {config.seed}", highlight=False)
    if config.start_at_ns is not None:
        _say_start(config.start_at_ns, err)
    with replay_progress(err) as show:
        if ray is None:
            run_replay(config, show)
        else:
            _run_on_ray(config, ray, ray_workers, err, show)
    return write_reports(config.run_dir, slos, attain, out, err)


def _run_on_ray(config: ReplayConfig, address: str, shards: int | None, err: Console, show: OnProgress) -> None:
    from replay.edge.ray_workers import ray_crew  # where Ray is not asked for, nothing of it is loaded
    from replay.nodes import check_led, replay_on

    check_led(config)
    with ray_crew(address, shards, config.workers) as crew:
        replay_on(crew, config, lambda line: err.print(line, highlight=False, soft_wrap=True), show)


def _say_start(start_at_ns: int, err: Console) -> None:
    start = datetime.fromtimestamp(start_at_ns / 1e9, UTC)
    away_s = (start - datetime.now(UTC)).total_seconds()
    if away_s > 0:
        words = clock_words(clock_state())
        err.print(f"starts at {start:%Y-%m-%d %H:%M:%S} UTC, in {away_s:.0f} s; {words}", highlight=False)


def gather_and_report(
    shards: Sequence[Path], run_dir: Path, slos: Sequence[Slo], attain: float | None, out: Console, err: Console
) -> int:
    """Exit codes as `run_and_report`."""
    for line in gather(shards, run_dir):
        err.print(line, highlight=False)
    return write_reports(run_dir, slos, attain, out, err)


def predict_and_report(config: PredictConfig, slos: Sequence[Slo], attain: float | None, out: Console, err: Console) -> int:
    """Exit codes as `run_and_report`."""
    if (config.run_dir / "run.json").exists():
        raise PlanError("there is a run here already", path=str(config.run_dir), next_step="Choose another --out")
    err.print(f"seed {config.seed}", highlight=False)
    run_predict(config)
    return write_reports(config.run_dir, slos, attain, out, err)


def grid_and_report(
    config: PredictConfig,
    kv_tokens: Sequence[int | None],
    replicas: Sequence[int | Split],
    vary: Mapping[str, Sequence[Setting]],
    slos: Sequence[Slo],
    attain: float,
    out: Console,
    err: Console,
) -> int:
    """0, or 4 if an SLO was asked for and a scale has no cell that meets it."""
    from replay.report.frontier import print_grid, words, write_grid  # its charts take long to load, see below

    err.print(f"seed {config.seed}", highlight=False)
    cells = run_grid(config, kv_tokens, replicas, slos, lambda line: err.print(line, highlight=False), vary)
    found = needed(cells, attain) if slos else []
    lines = words(found, attain)
    print_grid(cells, lines, out)
    limits = ", ".join(f"{slo.metric.upper()} <= {slo.limit_ms:g} ms" for slo in slos) or "no SLO"
    write_grid(config.run_dir, cells, lines, f"{config.trace} · {config.engine} · by {config.by} · {limits} · seed {config.seed}")
    err.print(f"\nreport: {config.run_dir / 'grid.html'}", highlight=False, soft_wrap=True)
    return EXIT_SLO_MISSED if any(one.cell is None for one in found) else 0


def write_reports(
    run_dir: Path, slos: Sequence[Slo], attain: float | None, out: Console, err: Console, images: Path | None = None
) -> int:
    from replay.report.html import write_html, write_images  # its charts take a third of a second to load, a replay is to begin

    summary = judge_run(run_dir, slos)
    print_summary(summary, out)
    write_json(summary, run_dir / "summary.json")
    write_html(summary, run_dir / "report.html")
    if images is not None:
        for kind in ("svg", "png"):
            write_images(summary, images, kind)
    err.print(f"\nreport: {run_dir / 'report.html'}   figures: {run_dir / 'summary.json'}", highlight=False, soft_wrap=True)
    code = exit_code(summary, attain)
    if code == 0 and any(note.kind == "stopped_early" for one in summary.points for note in one.notes):
        return 1
    return code
