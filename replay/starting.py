"""When a point starts: as soon as it can, or at a time of the wall clock that several hosts agreed upon."""

import asyncio
import contextlib
import socket
import time
from typing import Any

import numpy as np

from replay.edge.clock import clock_state
from replay.errors import PlanError
from replay.plan.plan import Plan
from replay.plan.share import Shard, plan_digest, share_rows
from replay.sharing import LOOK_AHEAD_NS, Stop

NEAR_NS = 3_000_000_000
FURTHEST_S = 7 * 86_400  # a start that is further away is a slip of the keyboard


def check_start(shard: Shard, start_at_ns: int | None, scales: int) -> None:
    """Raises PlanError for what several hosts cannot do together, or a start that has passed."""
    if shard.count > 1 and scales > 1:
        raise PlanError(
            "hosts cannot tell each other when a scale has ended",
            seen=f"{scales} scales with --shard",
            wanted="one",
            next_step="Give --scale 1, and run each scale with a --start-at of its own",
        )
    if shard.count > 1 and start_at_ns is None:
        raise PlanError(
            "shards start together", seen="--shard without --start-at", next_step="Give every host the same --start-at"
        )
    if start_at_ns is None:
        return
    in_s = (start_at_ns - time.time_ns()) / 1e9
    if not 0 < in_s < FURTHEST_S:
        raise PlanError(
            "the start lies in the past" if in_s <= 0 else "the start is more than a week away",
            seen=f"--start-at {'is' if in_s > 0 else 'was'} {abs(in_s):.0f} s {'away' if in_s > 0 else 'ago'}",
            wanted="a time that leaves every host some seconds to read the trace",
            next_step="Check its time zone: 2026-01-31T09:30:00Z is UTC",
        )


async def wait_until_near(start_at_ns: int | None, stop: Stop) -> None:
    """Until there is just time to read the server's counters: what it did before the start is none of this run."""
    if start_at_ns is not None:
        await _wait_ns(start_at_ns - NEAR_NS - time.time_ns(), stop)


async def wait_for_start(start_at_ns: int | None, stop: Stop) -> int:
    """Returns the start on the monotonic clock, when there is just time to begin. Raises PlanError if that time has passed.

    The wall clock is looked at as late as possible: what keeps it may bend it meanwhile.
    """
    if start_at_ns is None:
        return time.monotonic_ns() + LOOK_AHEAD_NS
    spare_ns = start_at_ns - LOOK_AHEAD_NS - time.time_ns()
    if spare_ns < 0:
        raise PlanError(
            "the start came before this host was ready",
            seen=f"{-spare_ns / 1e9:.1f} s too late",
            wanted="a --start-at that leaves time to read the trace and to ask the target",
            next_step="Give all hosts a later --start-at",
        )
    await _wait_ns(spare_ns, stop)
    return time.monotonic_ns() + start_at_ns - time.time_ns()


async def _wait_ns(wait_ns: int, stop: Stop) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0, wait_ns) / 1e9):
            await stop.event.wait()


def shard_facts(plan: Plan, shard: Shard, facts: dict[str, Any], start_at_ns: int | None) -> dict[str, Any]:
    """What run.json says of a point of which only this host's part is sent: counts are of that part, predictions of the whole."""
    rows = share_rows(plan, 0, 1, shard)
    is_own = np.zeros(len(plan), dtype=bool)
    is_own[rows] = True
    servers = [one | {"planned": int((is_own & (plan.server == number)).sum())} for number, one in enumerate(facts["servers"])]
    return {
        "planned": len(rows),
        "later_turns": int((is_own & (plan.parent >= 0) & (plan.think_ns >= 0)).sum()),
        "servers": servers,
        "shard": {
            "index": shard.index,
            "count": shard.count,
            "planned_by_all": len(plan),
            "plan_digest": plan_digest(plan),
            "start_unix_ns": start_at_ns,
            "host": socket.gethostname(),
            "clock": clock_state(),
        },
    }


def shard_notes(shard: Shard) -> list[str]:
    if shard.count == 1:
        return []
    return [
        f"shard {shard.index}/{shard.count}: requests are this host's only, the server's figures are of all hosts; "
        "chatreel gather joins them"
    ]
