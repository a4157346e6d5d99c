"""A plan cut into shares, for several sending processes or machines. Pure: all of them cut the same plan in the same way."""

import numpy as np

from replay.plan.plan import Ints, Plan
from tracer.words import splitmix64


def share_rows(plan: Plan, index: int, count: int) -> Ints:
    """The requests of share `index` of `count`, by planned time.

    A session stays whole, since its later turns wait for its answers. Sessions are drawn by a hash of their number: a thinned
    Poisson process is Poisson again, whereas every n-th arrival of one is more regular than that.
    """
    if count == 1:
        return np.arange(len(plan))
    owner = splitmix64(plan.session_id.astype(np.uint64) + np.uint64(1)) % np.uint64(count)
    return np.flatnonzero(owner == np.uint64(index))
