"""run.json of a replay, as it fills: before a point runs, when it has ended, and when what is predicted beside it is known."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from replay.beside import beside
from replay.edge.probe import Target
from replay.errors import PlanError
from replay.judge.summary import LoadBy
from replay.plan.plan import Plan
from replay.plan.predict import Prediction


class Book:
    """`notes`: those so far, asked for at each writing."""

    def __init__(self, run_dir: Path, manifest: dict[str, Any], notes: Callable[[], list[str]]) -> None:
        self._run_dir, self._manifest, self._notes = run_dir, manifest, notes
        self._more_notes: list[str] = []

    @contextlib.asynccontextmanager
    async def point(
        self, facts: dict[str, Any], prediction: Prediction | Callable[[], Prediction], told: Callable[[Prediction], None]
    ) -> AsyncIterator[None]:
        """A prediction that is yet to be made is made in a process beside the point."""
        self._manifest["points"].append(facts)
        if isinstance(prediction, Prediction):
            self._foretold(facts, prediction, told)
        self.write()
        task = None if isinstance(prediction, Prediction) else asyncio.create_task(self._foretell(facts, prediction, told))
        try:
            yield
            self.write()
            if task is not None:
                await task
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _foretell(
        self, facts: dict[str, Any], predicted: Callable[[], Prediction], told: Callable[[Prediction], None]
    ) -> None:
        prediction = await beside(predicted)
        if prediction is None:
            self._more_notes.append("the predicting process died, for want of memory perhaps: no predicted hit rate")
        else:
            self._foretold(facts, prediction, told)
        self.write()

    def _foretold(self, facts: dict[str, Any], prediction: Prediction, told: Callable[[Prediction], None]) -> None:
        facts.update(predicted_facts(prediction))
        for server, one in zip(facts["servers"], prediction.by_server, strict=bool(prediction.by_server)):
            server["hit_rate_predicted"] = one and one.at_capacity
        told(prediction)

    def write(self) -> None:
        self._manifest["notes"] = [*self._notes(), *self._more_notes]
        write_json(self._run_dir / "run.json", self._manifest)


def point_facts(index: int, scale: float, by: LoadBy, seed: int, plan: Plan, prediction: Prediction | None) -> dict[str, Any]:
    """What run.json says of a point before it runs."""
    return {
        "index": index,
        "scale": scale,
        "by": by,
        "seed": seed,
        "planned": len(plan),
        "planned_span_s": float(plan.planned_ns[-1]) / 1e9,
        "later_turns": int(((plan.parent >= 0) & (plan.think_ns >= 0)).sum()),
        **predicted_facts(prediction),
        "stopped": None,
    }


def server_facts(target: Target, kv_tokens: Sequence[int | None], plan: Plan) -> list[dict[str, Any]]:
    """Of each server where there are several; the predicted hit rate is filled in when it is known."""
    if plan.server is None:
        return []
    return [
        {
            "url": url,
            "metrics_urls": pages,
            "kv_capacity_tokens": tokens,
            "planned": int((plan.server == number).sum()),
            "hit_rate_predicted": None,
        }
        for number, (url, pages, tokens) in enumerate(zip(target.urls, target.pages, kv_tokens, strict=True))
    ]


def predicted_facts(prediction: Prediction | None) -> dict[str, Any]:
    """None: not known yet."""
    return {
        "hit_rate_predicted": prediction and prediction.at_capacity,
        "hit_rate_predicted_infinite": prediction and prediction.infinite,
        "kv_capacity_tokens": prediction and prediction.kv_capacity_tokens,
        "answers_reused": prediction and prediction.answers_reused,
    }


def read_run[Kind](run_dir: Path, kind: type[Kind]) -> Kind:
    """run.json, as far as `kind` has it. Raises PlanError for a folder that is no run."""
    path = run_dir / "run.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise PlanError(
            "not a run folder", path=str(run_dir), wanted="run.json in it", next_step="Use the folder of a replay"
        ) from error
    except msgspec.DecodeError as error:  # ValidationError is one
        raise PlanError(
            "cannot be read", path=str(path), seen=str(error), wanted="what chatreel replay writes", next_step="Replay again"
        ) from error


def write_json(path: Path, value: object) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2))
    partial.replace(path)
