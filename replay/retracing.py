"""A point of a run as a trace: what went out when, what came back, and the prefix blocks that its plan gave it.

So a replay can be compared with what it was to replay, and all that is known of traces holds for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from replay.book import read_run
from replay.errors import PlanError
from replay.judge.metrics import Facts
from replay.outcome import Outcome
from replay.plan.plan import Plan
from replay.plan.scale import scale_plan
from replay.results import read_outcomes
from replay.run import planned
from replay.sweeping import Book, SweepConfig
from tracer.blocks import DenseIds
from tracer.record.rows import itl_summary
from tracer.schema import Footer, Request
from tracer.tracefile import column, read_footer, read_table, write_trace

SOURCE_FORMAT = "chatreel run"
_COPIED = ("client_id", "kind", "agent_id", "adapter", "input_tail_id")  # as the source has them


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """run.json, as far as its plan has to be made again."""

    trace: str
    target: str
    model: str
    prompt_mode: str = "ids"
    seed: int
    started_utc: str
    limit: int | None = None
    dequantise: bool = True
    open_loop: bool = False
    hang_up: bool = False  # where the recorded clients did
    sweep: dict[str, Any] | None = None
    points: list[Facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retraced:
    requests: int
    failed: int
    not_sent: int
    label: str  # of the point: 5x


def retrace(run_dir: Path, out_path: Path, *, point: int | None = None, trace: Path | None = None) -> Retraced:
    """Write a point of a run folder as a trace; without `point`, its only one. Raises PlanError or TraceError."""
    run = read_run(run_dir, RunFacts)
    facts = _chosen(run_dir, run.points, point)
    source = trace or Path(run.trace)
    if not source.exists():
        raise PlanError("the run's trace is not there", path=str(source), next_step="Give it with --trace")
    plan = _plan(run, facts, source, run_dir)
    outcomes, _ = read_outcomes(run_dir, facts.index)
    if outcomes and max(one.request_id for one in outcomes) >= len(plan):
        raise PlanError(
            "this is not the trace of the run", path=str(source), seen=f"{len(plan)} requests", next_step="Give it with --trace"
        )
    outcomes.sort(key=_arrival_ns)
    rows = _Rows(run, plan, outcomes, source, answers_reused=facts.answers_reused is not False)
    not_sent = facts.planned - len(outcomes)
    written = write_trace(out_path, rows.rows(), _footer(run, facts, source, not_sent))
    label = f"{facts.scale:g} by {facts.by}"
    return Retraced(requests=written, failed=sum(one.error_kind is not None for one in outcomes), not_sent=not_sent, label=label)


def _chosen(run_dir: Path, points: Sequence[Facts], index: int | None) -> Facts:
    known = ", ".join(f"{one.index} ({one.scale:g} by {one.by})" for one in points)
    if index is None and len(points) == 1:
        return points[0]
    found = next((one for one in points if one.index == index), None)
    if found is None:
        raise PlanError(
            "which point of the run?", path=str(run_dir), seen=f"point {index}" if index is not None else None,
            wanted=f"one of {known}" if known else "a point that has run", next_step="Give it with --point",
        )  # fmt: skip
    return found


def _plan(run: RunFacts, facts: Facts, source: Path, run_dir: Path) -> Plan:
    """What was to be sent, made again from the same seed."""
    if run.sweep is not None:
        return _plan_of_sweep(run.sweep, facts, source, run_dir)
    if facts.by not in ("users", "time"):
        raise PlanError("cannot make this plan again", path=str(run_dir), seen=facts.by, wanted="a run of replay or sweep")
    plan = planned(source, run.seed, limit=run.limit, dequantise=run.dequantise, open_loop=run.open_loop)
    return scale_plan(plan, facts.scale, facts.by, np.random.default_rng(facts.seed))


def _plan_of_sweep(asked: dict[str, Any], facts: Facts, source: Path, run_dir: Path) -> Plan:
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in asked.items()}
    config = SweepConfig(**known | {"trace": source, "run_dir": run_dir, "resume": True})
    if config.is_sample:
        raise PlanError("cannot make this plan again", path=str(run_dir), seen="a run of capacity", wanted="replay or sweep")
    return Book(config).drawn(facts.index, facts.scale).plan


def _footer(run: RunFacts, facts: Facts, source: Path, not_sent: int) -> Footer:
    before = read_footer(source)
    losses = {"requests not sent": not_sent} if not_sent else {}
    notes = {"planned": str(facts.planned), "scale": f"{facts.scale:g}", "by": facts.by, "target": run.target}
    return replace(
        Footer(),
        producer=before.producer,
        source_format=SOURCE_FORMAT,
        epoch_ns=_epoch_ns(run.started_utc),
        block_tokens=before.block_tokens,
        tail_rule=before.tail_rule,
        hashes=before.hashes,
        losses=losses,
        notes=notes,
        seed=facts.seed,
    )


def _epoch_ns(utc: str) -> int | None:
    """To a second, and of the run's beginning: nearer it does not say when a point began."""
    try:
        return int(datetime.fromisoformat(utc).timestamp()) * 10**9
    except ValueError:
        return None


def _arrival_ns(one: Outcome) -> int:
    """What never got onto the wire arrives when it was due."""
    return max(0, one.sent_ns if one.sent_ns is not None else one.planned_ns)


class _Rows:
    """Rows of the outcomes, in order of arrival; ids dense in the order in which they are first seen."""

    def __init__(self, run: RunFacts, plan: Plan, outcomes: Sequence[Outcome], source: Path, *, answers_reused: bool) -> None:
        self.run, self.plan, self.outcomes, self.answers_reused = run, plan, outcomes, answers_reused
        self.endpoint = "/v1/chat/completions" if run.prompt_mode == "chat" else "/v1/completions"
        table = read_table(source, ["request_id", *_COPIED])
        self.copied = {name: table.column(name).to_pylist() for name in _COPIED}
        self.row_of = {number: row for row, number in enumerate(column(table, "request_id").tolist())}
        self.place = {one.request_id: number for number, one in enumerate(outcomes)}
        later = [one for one in outcomes if one.answer_spliced is False]
        self.unlike = {int(plan.parent[one.request_id]) for one in later}  # what they wrote is not what the next turn carries
        self.ids: DenseIds[int] = DenseIds()
        self.sessions: DenseIds[int] = DenseIds()

    def rows(self) -> Iterator[Request]:
        for number, one in enumerate(self.outcomes):
            yield self._row(number, one)

    def _row(self, number: int, one: Outcome) -> Request:
        plan, row, arrival_ns = self.plan, one.request_id, _arrival_ns(one)
        before = self._turn_before(row)

        def since(t_ns: int | None) -> int | None:
            return None if t_ns is None else max(0, t_ns - arrival_ns)

        input_tokens = one.input_tokens if one.input_tokens is not None else one.planned_input_tokens
        input_blocks = [self.ids[block] for block in plan.blocks[row].tolist()]
        source = self.row_of[one.source_request_id]
        has_tail = self.copied["input_tail_id"][source] is not None and plan.tail_tokens[row] < plan.block_tokens
        return {
            "request_id": number,
            "client_id": self.copied["client_id"][source],
            "session_id": self.sessions[one.session_id],
            "turn": one.turn,
            "parent_request_id": None if before is None else before[0],
            "agent_id": self.copied["agent_id"][source],
            "kind": self.copied["kind"][source],
            "adapter": self.copied["adapter"][source],
            "arrival_ns": arrival_ns,
            "ttft_ns": since(one.first_token_ns),
            "end_ns": since(one.end_ns),
            "think_ns": None if before is None or before[1] is None else max(0, arrival_ns - before[1]),
            "model": self.run.model,
            "endpoint": self.endpoint,
            "stream": True,
            "max_tokens": int(plan.answer_tokens(hang_up=self.run.hang_up)[row]),
            "input_tokens": input_tokens,
            "input_tokens_count_source": "usage" if one.input_tokens is not None else "generated",
            "output_tokens": one.output_tokens,
            "output_tokens_count_source": "usage" if one.token_count_source == "usage" else None,
            "cached_tokens": one.cached_tokens,
            "input_blocks": input_blocks,
            "input_tail_id": self.ids[int(plan.tail_id[row])] if has_tail and plan.tail_id[row] >= 0 else None,
            "output_blocks": self._output_blocks(one),
            "client_abort_ns": since(one.end_ns) if one.error_kind == "client_abort" else None,
            "finish_reason": one.finish_reason,
            "http_status": one.http_status,
            "error_kind": one.error_kind,
            "itl_summary": itl_summary([0, *one.chunk_gaps_us], one.chunk_tokens) if one.chunk_gaps_us else None,
            "upstream": self.run.target,
        }

    def _turn_before(self, row: int) -> tuple[int, int | None] | None:
        """(its row in the trace, when it ended)."""
        number = self.place.get(int(self.plan.parent[row])) if self.plan.parent[row] >= 0 else None
        return None if number is None else (number, self.outcomes[number].end_ns)

    def _output_blocks(self, one: Outcome) -> list[int]:
        """As far as the answer came; none where the next turn carries another answer than the server wrote."""
        plan, row = self.plan, one.request_id
        if not self.answers_reused or row in self.unlike or one.output_tokens is None:
            return []
        whole = (one.planned_input_tokens + one.output_tokens) // plan.block_tokens
        return [self.ids[block] for block in plan.answer_blocks[row][: max(0, whole - len(plan.blocks[row]))].tolist()]
