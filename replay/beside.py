"""A long trace's prediction in a process of its own, while its requests are sent already.

A thread would not do: it would hold up the event loop, and with it every stream.
"""

import asyncio
import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from replay.plan.predict import Prediction, predict
from replay.plan.scale import By, scale_plan
from replay.reading import Reading

NICE = 10  # the sender goes first where cores are few


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretelling:
    """All that a prediction follows from."""

    trace: Path
    seed: int
    limit: int | None
    dequantise: bool
    scale: float
    by: By
    point_seed: int
    kv_capacity_tokens: int | None
    answers_reused: bool

    def run(self) -> Prediction:
        reading = Reading(self.trace, self.seed, limit=self.limit, dequantise=self.dequantise, open_loop=False)
        scaled = scale_plan(reading.whole(), self.scale, self.by, np.random.default_rng(self.point_seed))
        return predict(scaled, self.kv_capacity_tokens, answers_reused=self.answers_reused)


async def predict_beside(asked: Foretelling) -> Prediction | None:
    """None: the process died, for want of memory say. Cancelling ends it."""
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, asked), name="chatreel-predict", daemon=True)
    process.start()
    theirs.close()
    try:
        prediction: Prediction = await asyncio.to_thread(ours.recv)
        return prediction
    except EOFError:
        return None
    finally:
        process.terminate()
        process.join()


def _answer(pipe: Connection, asked: Foretelling) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group, and the parent decides
    os.nice(NICE)
    pipe.send(asked.run())
