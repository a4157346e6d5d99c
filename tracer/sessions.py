"""Which request continues which conversation, by prefix extension. Pure; works on digests, never on text.

A request leaves a conversation in some state (its prompt, or its prompt and the answer it got). A later request whose
prompt begins with that state continues it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

CLOCK_SLACK_NS = 100_000_000  # an answer can reach its client, and the next turn us, before we have stamped its end
MAX_STATES = 1_000_000  # some 300 MB; the states longest unseen are forgotten first
MAX_HOLDERS = 8  # requests that left one and the same state


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What linking needs to know of a request. `leaves` and `extends` hold names (digests) of states."""

    request_id: int
    arrival_ns: int
    end_ns: int | None  # on the clock of arrival_ns; None: it has no end, so nothing continues it, unless
    end_is_unknown: bool = False  # a log tells none: then an answer that a later prompt holds must have ended
    client: bytes | None = None  # breaks ties among equal conversations
    session_key: bytes | None = None  # given by the client; it decides
    leaves: Sequence[bytes] = ()
    extends: Sequence[bytes] = ()  # best first: exact before approximate, deep before shallow


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    session_id: int
    turn: int
    parent_request_id: int | None = None
    think_ns: int | None = None  # parent's end -> this arrival


@dataclass(slots=True)
class _Holder:
    turn: Turn
    link: Link
    is_continued: bool = False


class SessionLinker:
    """`link` requests in order of arrival. Memory is bounded by MAX_STATES."""

    def __init__(self, max_states: int = MAX_STATES) -> None:
        self._max_states = max_states
        self._states: OrderedDict[bytes, list[_Holder]] = OrderedDict()
        self._named: OrderedDict[bytes, _Holder] = OrderedDict()  # latest request of each client-named session
        self._sessions = 0

    def link(self, turn: Turn) -> Link:
        parent = self._parent(turn)
        named = self._named.get(turn.session_key) if turn.session_key is not None else None
        if turn.session_key is not None:
            link = self._named_link(turn, named, parent)
        elif parent is not None:
            link = _continue(turn, parent, session_id=parent.link.session_id, turn_number=parent.link.turn + 1)
        else:
            link = Link(session_id=self._new_session(), turn=0)
        if parent is not None and link.parent_request_id == parent.turn.request_id:
            parent.is_continued = True
        self._remember(_Holder(turn, link))
        return link

    def _named_link(self, turn: Turn, named: _Holder | None, parent: _Holder | None) -> Link:
        """The client's name decides the session; inside it the parent is the extended request, else the previous one."""
        if named is None:
            return Link(session_id=self._new_session(), turn=0)
        if parent is None or parent.link.session_id != named.link.session_id:
            parent = named
        if not (_has_ended(parent, turn) or (parent.turn.end_is_unknown and parent is not named)):
            return Link(session_id=named.link.session_id, turn=named.link.turn + 1)
        return _continue(turn, parent, session_id=named.link.session_id, turn_number=named.link.turn + 1)

    def _parent(self, turn: Turn) -> _Holder | None:
        for state in turn.extends:
            holders = [
                one
                for one in self._states.get(state, ())
                if (one.turn.end_is_unknown or _has_ended(one, turn)) and one.turn.session_key == turn.session_key
            ]
            if holders:
                self._states.move_to_end(state)
                return max(holders, key=lambda one: (one.turn.client == turn.client, not one.is_continued, one.turn.arrival_ns))
        return None

    def _remember(self, holder: _Holder) -> None:
        for state in holder.turn.leaves:
            holders = self._states.setdefault(state, [])
            holders.append(holder)
            del holders[:-MAX_HOLDERS]
            self._states.move_to_end(state)
        if holder.turn.session_key is not None:
            self._named[holder.turn.session_key] = holder
            self._named.move_to_end(holder.turn.session_key)
        for table in (self._states, self._named):
            while len(table) > self._max_states:
                table.popitem(last=False)

    def _new_session(self) -> int:
        self._sessions += 1
        return self._sessions - 1


def _has_ended(earlier: _Holder, turn: Turn) -> bool:
    return earlier.turn.end_ns is not None and earlier.turn.end_ns <= turn.arrival_ns + CLOCK_SLACK_NS


def _continue(turn: Turn, parent: _Holder, *, session_id: int, turn_number: int) -> Link:
    end_ns = parent.turn.end_ns
    return Link(
        session_id=session_id,
        turn=turn_number,
        parent_request_id=parent.turn.request_id,
        think_ns=max(turn.arrival_ns - end_ns, 0) if end_ns is not None else None,
    )
