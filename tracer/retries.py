"""Which request repeats an earlier one that failed. Pure; works on digests, never on text."""

from collections import OrderedDict
from dataclasses import dataclass

WINDOW_NS = 600_000_000_000  # a body that comes again later than that is taken for a new request
MAX_REQUESTS = 200_000


@dataclass(frozen=True, slots=True)
class _Failed:
    request_id: int
    end_ns: int


class RetryLinker:
    """`link` requests in order of arrival. Remembers the failed ones only, and of those the latest."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max = max_requests
        self._failed: OrderedDict[bytes, _Failed] = OrderedDict()

    def link(self, request_id: int, body: bytes, arrival_ns: int, end_ns: int, *, has_failed: bool) -> int | None:
        """The id of the request that this one repeats: the same body (by digest) and client, after a failure.

        `end_ns` is on the clock of `arrival_ns`. A request sent while its twin is still under way is no retry.
        """
        earlier = self._failed.pop(body, None)
        if has_failed:
            self._failed[body] = _Failed(request_id, end_ns)
            if len(self._failed) > self._max:
                self._failed.popitem(last=False)
        if earlier is None or not earlier.end_ns <= arrival_ns <= earlier.end_ns + WINDOW_NS:
            return None
        return earlier.request_id
