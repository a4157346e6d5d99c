"""A trace through the simulated engine in virtual time: no HTTP, no clock, the engine's own cache, batching, preemption. Pure.

Open loop: every request arrives at its recorded time, whether or not the answer before has come.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from replay.sim.engine import Engine, Request
from replay.sim.presets import Preset
from tracer.schema import Footer
from tracer.tracefile import blocks, column

COLUMNS = ["arrival_ns", "input_tokens", "output_tokens", "input_blocks", "output_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The engine after a step; counters since the start."""

    end_s: float
    kv_usage: float  # share of the KV memory that running requests hold
    waiting: int
    prompt_tokens: int  # of requests scheduled so far
    cached_tokens: int
    preemptions: int


def simulate(table: pa.Table, footer: Footer, preset: Preset) -> Iterator[Moment]:
    """Step by step until every request has its answer. Requests that the engine refuses are left out."""
    engine = Engine(preset)
    arrivals = (column(table, "arrival_ns") / 1e9).tolist()
    for number, (prompt, answer) in enumerate(_token_ids(table, footer.block_tokens)):
        while not engine.idle and engine.now_s < arrivals[number]:
            yield _step(engine)
        if engine.refusal(len(prompt), len(answer)) is None:
            engine.submit(Request(prompt=prompt, answer=answer, arrival_s=arrivals[number]))
    while not engine.idle:
        yield _step(engine)


def _step(engine: Engine) -> Moment:
    done = engine.step()
    return Moment(
        end_s=done.end_s,
        kv_usage=engine.kv_usage,
        waiting=len(engine.waiting),
        prompt_tokens=engine.prefix_cache_queries,
        cached_tokens=engine.prefix_cache_hits,
        preemptions=engine.preemptions,
    )


def _token_ids(table: pa.Table, block_tokens: int) -> Iterator[tuple["array[int]", "array[int]"]]:
    """Prompt and answer of each request: every token of a block is the block's id, so equal blocks are equal tokens.

    Tokens beyond the last block are the request's own.
    """
    prompts, answers = blocks(table, "input_blocks"), blocks(table, "output_blocks")
    first_free = 1 + max(int(prompts.ids.max(initial=-1)), int(answers.ids.max(initial=-1)))
    lengths = np.maximum(np.stack([column(table, "input_tokens"), column(table, "output_tokens")], axis=1), 1).tolist()
    for number, (input_tokens, output_tokens) in enumerate(lengths):
        named = np.repeat(np.concatenate([prompts[number], answers[number]]), block_tokens)
        ids = np.full(input_tokens + output_tokens, first_free + number, dtype=np.uint32)
        count = min(len(named), len(ids))
        ids[:count] = named[:count]
        path = array("I", ids.tobytes())
        yield path[:input_tokens], path[input_tokens:]
