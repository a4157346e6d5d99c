"""Source block ids to the file's own: chained, dense from 0, in first-seen order. Pure."""

from array import array
from collections.abc import Hashable, Iterable, Sequence


class ChainedIds:
    """Names each distinct prefix by the next integer.

    An id that turns up after a second predecessor gets a new name there, so the result is chained even where the
    source is not. Sources that are dense and chained already (Mooncake) keep their ids and cost 4 bytes an id.
    """

    def __init__(self) -> None:
        self._above = array("i")  # predecessor of each id that kept its name; they are 0 .. len - 1
        self._renamed: dict[tuple[int, int], int] = {}  # (predecessor's new id, source id) -> new id

    def path(self, source_ids: Sequence[int]) -> list[int]:
        """New ids of a request's blocks, from the first one on."""
        above, renamed, keep = -1, self._renamed, self._above
        size = len(keep)
        ids: list[int] = []
        for one in source_ids:
            if 0 <= one < size and keep[one] == above:
                above = one
            elif one == size and not renamed:
                keep.append(above)
                above = one
                size += 1
            else:
                above = renamed.setdefault((above, one), size + len(renamed))
            ids.append(above)
        return ids


class FirstSeen:
    """Renumbers dense ids in the order in which they come by; `fresh` takes a number that nothing else has."""

    def __init__(self) -> None:
        self._new = array("q")
        self._count = 0

    def __getitem__(self, block: int) -> int:
        if block >= len(self._new):
            self._new.extend([-1] * (block + 1 - len(self._new)))
        if self._new[block] < 0:
            self._new[block] = self.fresh()
        return self._new[block]

    def fresh(self) -> int:
        self._count += 1
        return self._count - 1


class LaidOut:
    """Names the full blocks of contents laid end to end: each by all that is before it and what it covers."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names: dict[tuple[int, tuple[tuple[Hashable, int], ...]], int] = {}

    def path(self, contents: Iterable[tuple[Hashable, int]]) -> list[int]:
        """`contents`: what it is and its tokens, in order."""
        names, above = self._names, -1
        ids: list[int] = []
        covered: list[tuple[Hashable, int]] = []
        room = self._block_tokens
        for content, tokens in contents:
            at = 0
            while tokens - at >= room:
                covered.append((content, at))
                above = names.setdefault((above, tuple(covered)), len(names))
                ids.append(above)
                at += room
                covered, room = [], self._block_tokens
            if at < tokens:
                covered.append((content, at))
                room -= tokens - at
        return ids
