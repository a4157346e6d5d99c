"""A plan cut into shares, for several sending processes or hosts. Pure: all of them cut the same plan in the same way."""

import hashlib
from dataclasses import dataclass, fields

import numpy as np

from replay.plan.plan import Ints, Plan
from tracer.blocks import Blocks
from tracer.words import splitmix64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One host's part of a plan: number `index`, from 0, of `count`."""

    index: int = 0
    count: int = 1


WHOLE = Shard()


def share_rows(plan: Plan, index: int, count: int, shard: Shard = WHOLE) -> Ints:
    """The requests of share `index` of `count` of a host's part, by planned time.

    A session stays whole, since its later turns wait for its answers. Sessions are drawn by a hash of their number: a thinned
    Poisson process is Poisson again, whereas every n-th arrival of one is more regular than that. Hosts may have different
    counts of processes: what draws the host is taken out before the process is drawn.
    """
    if count == shard.count == 1:
        return np.arange(len(plan))
    drawn = splitmix64(plan.session_id.astype(np.uint64) + np.uint64(1))
    hosts = np.uint64(shard.count)
    is_here = drawn % hosts == np.uint64(shard.index)
    return np.flatnonzero(is_here & (drawn // hosts % np.uint64(count) == np.uint64(index)))


def plan_digest(plan: Plan) -> str:
    """The same for the same requests at the same times to the same servers."""
    digest = hashlib.blake2b(digest_size=16)
    for field in fields(plan):
        value = getattr(plan, field.name)
        arrays = (value.offsets, value.ids) if isinstance(value, Blocks) else () if field.name == "notes" else (value,)
        for array in arrays:
            digest.update(field.name.encode())
            digest.update(b"" if array is None else np.ascontiguousarray(array).data)
    return digest.hexdigest()
