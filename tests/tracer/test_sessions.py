"""Requests are linked into conversations by what they extend."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.sessions import CLOCK_SLACK_NS, SessionLinker, Turn

SECOND = 1_000_000_000


def turn(number: int, at_s: float, *, leaves: str = "", extends: str = "", took_s: float | None = 1.0, **more) -> Turn:
    arrival_ns = int(at_s * SECOND)
    return Turn(
        request_id=number,
        arrival_ns=arrival_ns,
        end_ns=None if took_s is None else arrival_ns + int(took_s * SECOND),
        leaves=[name.encode() for name in leaves.split()],
        extends=[name.encode() for name in extends.split()],
        **more,
    )


def test_a_conversation_is_one_session_with_turns_parents_and_think_times() -> None:
    linker = SessionLinker()

    first = linker.link(turn(0, 0, leaves="a"))
    second = linker.link(turn(1, 5, extends="a", leaves="b"))
    third = linker.link(turn(2, 6.5, extends="b a", leaves="c"))

    assert [one.session_id for one in (first, second, third)] == [0, 0, 0]
    assert [one.turn for one in (first, second, third)] == [0, 1, 2]
    assert [one.parent_request_id for one in (first, second, third)] == [None, 0, 1]
    assert [one.think_ns for one in (first, second, third)] == [None, 4 * SECOND, SECOND // 2]


def test_the_best_named_state_decides_before_the_latest_request() -> None:
    linker = SessionLinker()
    linker.link(turn(0, 0, leaves="deep"))
    linker.link(turn(1, 10, leaves="shallow"))

    link = linker.link(turn(2, 20, extends="deep shallow"))

    assert link.parent_request_id == 0


def test_equal_openings_of_two_clients_stay_apart() -> None:
    linker = SessionLinker()
    linker.link(turn(0, 0, leaves="hi", client=b"anna"))
    linker.link(turn(1, 1, leaves="hi", client=b"ben"))

    anna = linker.link(turn(2, 5, extends="hi", client=b"anna"))
    ben = linker.link(turn(3, 6, extends="hi", client=b"ben"))

    assert (anna.session_id, ben.session_id) == (0, 1)


def test_equal_openings_of_unknown_clients_are_each_continued_once() -> None:
    linker = SessionLinker()
    linker.link(turn(0, 0, leaves="hi"))
    linker.link(turn(1, 1, leaves="hi"))

    parents = {linker.link(turn(n, 5 + n, extends="hi")).parent_request_id for n in (2, 3)}

    assert parents == {0, 1}


def test_nothing_continues_a_request_that_has_not_ended() -> None:
    linker = SessionLinker()
    linker.link(turn(0, 0, leaves="a", took_s=10))
    linker.link(turn(1, 0, leaves="b", took_s=None))

    assert linker.link(turn(2, 1, extends="a")).parent_request_id is None
    assert linker.link(turn(3, 1, extends="b")).parent_request_id is None


def test_an_end_stamped_a_little_late_still_links_and_think_time_is_never_negative() -> None:
    linker = SessionLinker()
    linker.link(turn(0, 0, leaves="a", took_s=1))

    link = linker.link(turn(1, 1 - CLOCK_SLACK_NS / SECOND / 2, extends="a"))

    assert (link.parent_request_id, link.think_ns) == (0, 0)


def test_a_key_of_the_client_wins_over_what_the_prompt_extends() -> None:
    linker = SessionLinker()
    linker.link(turn(0, 0, leaves="a"))
    linker.link(turn(1, 2, leaves="b", session_key=b"k"))

    link = linker.link(turn(2, 5, extends="a", session_key=b"k"))
    other = linker.link(turn(3, 6, extends="b"))

    assert (link.session_id, link.turn, link.parent_request_id) == (1, 1, 1)
    assert other.session_id == 2


def test_parallel_requests_of_one_key_share_the_session_without_a_parent() -> None:
    linker = SessionLinker()
    linker.link(turn(0, 0, session_key=b"k", took_s=60))

    link = linker.link(turn(1, 1, session_key=b"k"))

    assert (link.session_id, link.turn, link.parent_request_id, link.think_ns) == (0, 1, None, None)


def test_where_ends_are_unknown_the_prompt_that_holds_an_answer_tells_that_it_has_ended() -> None:
    linker = SessionLinker()
    linker.link(turn(0, 0, leaves="a", took_s=None, end_is_unknown=True))

    link = linker.link(turn(1, 5, extends="a", took_s=None, end_is_unknown=True))

    assert (link.session_id, link.turn, link.parent_request_id, link.think_ns) == (0, 1, 0, None)


def test_a_key_alone_does_not_tell_that_the_request_before_has_ended() -> None:
    linker = SessionLinker()
    linker.link(turn(0, 0, session_key=b"k", leaves="a", took_s=None, end_is_unknown=True))

    beside = linker.link(turn(1, 5, session_key=b"k"))
    behind = linker.link(turn(2, 9, session_key=b"k", extends="a"))

    assert (beside.turn, beside.parent_request_id) == (1, None)
    assert (behind.turn, behind.parent_request_id) == (2, 0)


def test_old_states_are_forgotten_first() -> None:
    linker = SessionLinker(max_states=2)
    for number, name in enumerate("abc"):
        linker.link(turn(number, number * 2, leaves=name))

    assert linker.link(turn(3, 10, extends="a")).parent_request_id is None
    assert linker.link(turn(4, 11, extends="c")).parent_request_id == 2


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_interleaved_conversations_are_told_apart(sizes: list[int], order) -> None:
    """Any interleaving of conversations that keeps each one's own order gives back exactly those conversations."""
    schedule = [conversation for conversation, size in enumerate(sizes) for _ in range(size)]
    order.shuffle(schedule)
    linker = SessionLinker()
    done = dict.fromkeys(schedule, 0)
    found: dict[int, list] = {conversation: [] for conversation in schedule}

    for number, conversation in enumerate(schedule):
        at = done[conversation]
        extends = " ".join(f"{conversation}/{k}" for k in reversed(range(at)))
        found[conversation].append(linker.link(turn(number, 2 * number, leaves=f"{conversation}/{at}", extends=extends)))
        done[conversation] += 1

    assert len({links[0].session_id for links in found.values()}) == len(found)
    for links in found.values():
        assert {one.session_id for one in links} == {links[0].session_id}
        assert [one.turn for one in links] == list(range(len(links)))
