"""The process's limit of open files, for what holds many connections."""

import resource
from contextlib import suppress


def lift_file_limit() -> None:
    """Raise the soft limit, usually 1,024, to the hard one. A system that does not let us: it works as far as it goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
