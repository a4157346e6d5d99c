"""What the prefix cache will do to a plan, before anything is sent. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replay.plan.plan import Plan
from replay.plan.scale import rows_of
from tracer.analysis.reuse import HitCurve, engine_paths, hit_curve
from tracer.blocks import Blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Token-weighted prefix hit rates. `at_capacity` is None where the server's KV size is not known."""

    at_capacity: float | None
    infinite: float
    kv_capacity_tokens: int | None
    answers_reused: bool
    by_server: "tuple[Prediction | None, ...]" = ()  # where there are several; None: one that gets no request


def plan_curve(plan: Plan, *, answers_reused: bool) -> HitCurve:
    """The LRU curve of a plan. Answers fill the cache in any case; later turns can hit them only if they are reused."""
    answers = plan.answer_blocks if answers_reused else Blocks.from_lists([()] * len(plan))
    return hit_curve(
        engine_paths(
            blocks=plan.blocks,
            block_tokens=plan.block_tokens,
            tail_id=plan.tail_id,
            tail_tokens=plan.tail_tokens,
            input_tokens=plan.input_tokens,
            output_tokens=plan.output_tokens,
            answer_blocks=answers,
        )
    )


def predict(plan: Plan, kv_capacity_tokens: int | None, *, answers_reused: bool) -> Prediction:
    """LRU hit rate at the server's KV size, and with endless memory.

    Where answers are not reused, a later turn still names its predecessor's answer blocks, but their tokens were
    never in the server's cache; the curve then shares only what prompts themselves have in common.
    """
    curve = plan_curve(plan, answers_reused=answers_reused)
    at_capacity = None
    if kv_capacity_tokens is not None:
        at_capacity = curve.hit_rate_at(kv_capacity_tokens // curve.unit_tokens)
    return Prediction(
        at_capacity=at_capacity,
        infinite=curve.hit_rate_infinite,
        kv_capacity_tokens=kv_capacity_tokens,
        answers_reused=answers_reused,
    )


def predict_routed(plan: Plan, kv_tokens: Sequence[int | None], *, answers_reused: bool) -> Prediction:
    """Every server's cache sees its own requests only; together: tokens found / tokens of all prompts.

    `kv_tokens`: of each server. Where there is one, as `predict`.
    """
    if plan.server is None:
        return predict(plan, kv_tokens[0], answers_reused=answers_reused)
    rows = [np.flatnonzero(plan.server == number) for number in range(len(kv_tokens))]
    by_server = tuple(
        predict(rows_of(plan, own), tokens, answers_reused=answers_reused) if len(own) else None
        for own, tokens in zip(rows, kv_tokens, strict=True)
    )
    weights = [int(plan.input_tokens[own].sum()) for own in rows]
    used = [(one, weight) for one, weight in zip(by_server, weights, strict=True) if one is not None]
    total = sum(weights)
    known = [(one.at_capacity, weight) for one, weight in used if one.at_capacity is not None]
    sizes = [tokens for tokens in kv_tokens if tokens is not None]
    return Prediction(
        at_capacity=sum(rate * weight for rate, weight in known) / total if len(known) == len(used) else None,
        infinite=sum(one.infinite * weight for one, weight in used) / total,
        kv_capacity_tokens=sum(sizes) if len(sizes) == len(kv_tokens) else None,
        answers_reused=answers_reused,
        by_server=by_server,
    )
