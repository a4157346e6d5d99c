"""A plan or target that cannot be used: the user's to mend. A target that fails later is an outcome, not an error."""

from tracer.errors import TraceError


class PlanError(TraceError):
    """Same shape as `TraceError`: where, what was seen, what was wanted, what to do."""
