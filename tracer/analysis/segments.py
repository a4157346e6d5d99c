"""What prompts share by their parts: in the order sent, in the best simple order, and if order did not matter. Pure."""

from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]
COLUMNS = ["segments"]


class SegmentReuse(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of all segment tokens, with endless memory. A segment counts whole or not at all."""

    segment_tokens: int
    as_sent: float  # in leading runs of segments that an earlier request began with too
    popular_first: float  # the same, had each request put its segments in the order of how many requests hold them
    in_any_order: float  # of content that came before anywhere: what a cache would give that does not need prefixes


def segment_reuse(table: pa.Table) -> SegmentReuse | None:
    """From the column `segments`; None where no segment has a length."""
    column = table["segments"].combine_chunks()
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False))])
    flat = column.flatten()
    content = flat.field("content_id").to_numpy(zero_copy_only=False).astype(np.int64)
    tokens = flat.field("tokens").fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    total = int(tokens.sum())
    if not total:
        return None
    request = np.repeat(np.arange(len(column)), np.diff(offsets))
    holders = np.bincount(np.unique(content << 32 | request) >> 32)
    by_popularity = np.lexsort((content, -holders[content], request))
    _, first = np.unique(content, return_index=True)
    return SegmentReuse(
        segment_tokens=total,
        as_sent=_prefix_tokens(content, tokens, offsets) / total,
        popular_first=_prefix_tokens(content[by_popularity], tokens[by_popularity], offsets) / total,
        in_any_order=(total - int(tokens[first].sum())) / total,
    )


def _prefix_tokens(content: Ints, tokens: Ints, offsets: Ints) -> int:
    """Tokens of leading segments that some earlier request began with, in the same order."""
    names: dict[tuple[int, int], int] = {}  # (name of all before, content) -> name
    contents, sizes = content.tolist(), tokens.tolist()
    hits = 0
    for start, end in pairwise(offsets.tolist()):
        above, is_known = -1, True
        for at in range(start, end):
            fresh = len(names)
            above = names.setdefault((above, contents[at]), fresh)
            is_known &= above != fresh
            if is_known:
                hits += sizes[at]
    return hits
