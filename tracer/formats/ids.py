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

    def row(self, blocks: Sequence[int]) -> list[int]:
        """New numbers of a request's blocks: as one by one, several times as fast."""
        new = self._new
        if blocks and (most := max(blocks)) >= len(new):
            new.extend([-1] * (most + 1 - len(new)))
        numbers: list[int] = []
        for block in blocks:
            number = new[block]
            if number < 0:
                number = new[block] = self.fresh()
            numbers.append(number)
        return numbers

    def fresh(self) -> int:
        self._count += 1
        return self._count - 1


class LaidOut:
    """Names the full blocks of contents laid end to end: each by all that is before it and what it covers.

    What a content's blocks are called depends only on the place where it begins: the contents before it. So the work is one
    look-up a content, however many blocks it has.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._count = 0
        self._runs: dict[tuple[int, Hashable], Sequence[int]] = {}  # (place, content) -> ids of the blocks that end in it
        self._places: dict[tuple[int, Hashable, int], int] = {}  # (place, content, tokens) -> the place behind it; 0: the start

    def path(self, contents: Iterable[tuple[Hashable, int]]) -> list[int]:
        """`contents`: what it is and its tokens, in order."""
        size, runs, places = self._block_tokens, self._runs, self._places
        ids: list[int] = []
        place = covered = 0  # covered: tokens of the block that is not full yet
        for content, tokens in contents:
            if not tokens:
                continue
            full, covered = divmod(covered + tokens, size)
            if full:
                run = runs.get((place, content), ())
                if len(run) < full:
                    fresh = range(self._count, self._count + full - len(run))
                    runs[place, content] = run = [*run, *fresh] if run else fresh
                    self._count = fresh.stop
                ids.extend(run[:full])
            place = places.setdefault((place, content, tokens), len(places) + 1)
        return ids
