"""A body that comes again after its failure is a retry; anything else is a new request."""

from tracer.retries import WINDOW_NS, RetryLinker

A, B = b"a" * 8, b"b" * 8


def test_a_repeated_body_after_a_failure_is_a_retry_of_the_latest_one() -> None:
    linker = RetryLinker()

    links = [
        linker.link(0, A, 0, 10, has_failed=True),
        linker.link(1, B, 20, 30, has_failed=False),
        linker.link(2, A, 40, 50, has_failed=True),
        linker.link(3, A, 60, 70, has_failed=False),
        linker.link(4, A, 80, 90, has_failed=False),
    ]

    assert links == [None, None, 0, 2, None]


def test_neither_a_twin_under_way_nor_a_late_one_is_a_retry() -> None:
    linker = RetryLinker()
    linker.link(0, A, 0, 100, has_failed=True)
    linker.link(1, B, 0, 100, has_failed=True)

    assert linker.link(2, A, 50, 150, has_failed=False) is None
    assert linker.link(3, B, 101 + WINDOW_NS, 102 + WINDOW_NS, has_failed=False) is None


def test_memory_is_bounded() -> None:
    linker = RetryLinker(max_requests=2)

    for number in range(3):
        linker.link(number, bytes([number]), 0, 1, has_failed=True)

    assert linker.link(3, b"\x00", 2, 3, has_failed=False) is None
    assert linker.link(4, b"\x02", 2, 3, has_failed=False) == 2
