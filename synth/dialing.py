"""What a user asks of a fitted model, solved: another model, an amount, and dials that meet it. Pure.

A mean that is asked for is met by the trace that is drawn, its end included, on average over seeds: it is measured on a
trial of some thousand starts.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from synth.arrivals import NS
from synth.dials import Dial, Dials, Length, gaps_cv, with_burstiness, with_think, with_turns
from synth.drawing import MAX_STARTS, Amount, draw, drawn
from synth.generate import Totals
from synth.hit_rate import closest
from synth.learned import Model
from synth.links import START, TURN
from synth.naming import Drawn
from synth.share import TOLERANCE
from tracer.analysis.reuse import HitCurve, hit_curve, touches_as_engine
from tracer.errors import TraceError
from tracer.schema import BASE_BLOCK_TOKENS, Footer

TRIAL_STARTS, TRIAL_REQUESTS = 4_000, 40_000
THINK_TRIES, THINK_OFF = 8, 0.01
TRIAL_BLOCKS = 8_000_000  # of which hit rates are measured
MAX_FACTOR = 1000.0
LEAST_LOG_ODDS, MOST_LOG_ODDS, TURNS_OFF = 12.0, 9.0, 1.003
SETTINGS = [0.0, 0.5, 1.0, *(1 + np.arange(1, 9) / 8).tolist()]  # parts of what is shared, then longer prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """None: as in the trace."""

    requests: int | None = None
    requests_per_s: float | None = None
    users: float | None = None  # sessions under way on average
    scale: float | None = None
    duration_s: float | None = None
    burstiness: Dial | None = None  # CV of gaps between starts
    turns: Dial | None = None  # mean of a session
    think_s: Dial | None = None  # mean
    input_tokens: Length | None = None
    output_tokens: Length | None = None
    prefix_share: float | None = None
    hit_rate: float | None = None
    hit_rate_at_tokens: int | None = None


@dataclass(slots=True, kw_only=True)
class Dialed:
    model: Model
    amount: Amount
    dials: Dials
    notes: list[str] = field(default_factory=list)


def dialed(model: Model, wishes: Wishes, seed: int) -> Dialed:
    """`TraceError` for what the model cannot do, with the reason."""
    _check(model, wishes)
    plain = Dials()
    found = Dialed(
        model=model,
        amount=Amount(duration_s=wishes.duration_s),
        dials=replace(
            plain,
            input_tokens=wishes.input_tokens or plain.input_tokens,
            output_tokens=wishes.output_tokens or plain.output_tokens,
        ),
    )
    _set_burstiness(found, wishes.burstiness)
    _set_think(found, wishes.think_s, seed)
    _set_turns(found, wishes.turns, seed)
    _set_amount(found, model, wishes, seed)
    if wishes.prefix_share is not None:
        _set_sharing(found, wishes.prefix_share, None, seed)
    if wishes.hit_rate is not None:
        _set_sharing(found, wishes.hit_rate, wishes.hit_rate_at_tokens, seed)
    return found


def _check(model: Model, wishes: Wishes) -> None:
    no_sessions = "the trace names no sessions; what goes on from an earlier prompt is only told by its blocks"
    no_blocks = "the trace names no prefix blocks, so the model knows nothing of sharing"
    turns = bool(model.turns)
    reasons = [
        ("users", wishes.users, model.has_sessions, no_sessions),
        ("turns", wishes.turns, model.has_sessions, no_sessions),
        ("turns", wishes.turns, turns, "no session of the trace has a second turn, so there is none to learn from"),
        ("think", wishes.think_s, model.has_sessions, no_sessions),
        ("think", wishes.think_s, turns, "no session of the trace has a second turn"),
        ("think", wishes.think_s, model.service is not None, "the trace names no ends of answers, from which a user thinks"),
        ("prefix-share", wishes.prefix_share, model.has_blocks, no_blocks),
        ("hit-rate", wishes.hit_rate, model.has_blocks, no_blocks),
    ]
    for name, wish, can, reason in reasons:
        if wish is not None and not can:
            raise TraceError(
                f"--{name} does not apply to this model", seen=reason, next_step="Leave it out, or fit a trace that has this"
            )
    _check_ranges(wishes)


def _check_ranges(wishes: Wishes) -> None:
    for name, dial, least, most in (
        ("burstiness", wishes.burstiness, 0.01, 100.0),
        ("turns", wishes.turns, 1.0, 1e6),
        ("think", wishes.think_s, 0.0, 1e6),
    ):
        if dial is None:
            continue
        low, high = (0.0, MAX_FACTOR) if dial.is_factor else (least, most)
        if not low <= dial.value <= high or (dial.is_factor and dial.value == 0 and name != "think"):
            raise TraceError(f"wrong value for `--{name}`", seen=f"{dial.value:g}", wanted=f"{low:g} to {high:g}")
    for name, length in (("input-tokens", wishes.input_tokens), ("output-tokens", wishes.output_tokens)):
        if length is not None and not 0 < length.factor <= MAX_FACTOR:
            raise TraceError(f"wrong value for `--{name}`", seen=f"x{length.factor:g}", wanted=f"a factor up to {MAX_FACTOR:g}")
    for name, share in (("prefix-share", wishes.prefix_share), ("hit-rate", wishes.hit_rate)):
        if share is not None and not 0 <= share <= 1:
            raise TraceError(f"wrong value for `--{name}`", seen=f"{share:g}", wanted="0 to 1")
    if wishes.prefix_share is not None and wishes.hit_rate is not None:
        raise TraceError("--prefix-share and --hit-rate both set how much is shared", next_step="Give one of them")
    amounts = {"requests_per_s": wishes.requests_per_s, "users": wishes.users, "scale": wishes.scale}
    given = [name for name, value in amounts.items() if value is not None]
    if len(given) > 1 or (wishes.requests is not None and wishes.scale is not None):
        raise TraceError("only one of these can set the rate", seen=", ".join(given), next_step="Give one of them")
    for name, value in (*amounts.items(), ("requests", wishes.requests), ("duration_s", wishes.duration_s)):
        if value is not None and not 0 < value < 1e12:
            raise TraceError(f"wrong value for `{name}`", seen=repr(value), wanted="a number above 0")


def _set_burstiness(found: Dialed, wish: Dial | None) -> None:
    if wish is None or wish == Dial(value=1.0, is_factor=True):
        return
    own = gaps_cv(found.model)
    cv = wish.value * own if wish.is_factor else wish.value
    found.model = with_burstiness(found.model, cv)
    found.notes.append(f"gaps between starts have a CV of {cv:.3g} inside windows (learned: {own:.3g})")


def _set_think(found: Dialed, wish: Dial | None, seed: int) -> None:
    if wish is None:
        return
    learned, factor = found.model, wish.value
    if not wish.is_factor:
        own = met = _mean_think_s(_trial(found, seed))
        if not own > 0:
            raise TraceError("--think does not apply to this model", seen="nobody thinks in it: all think times are 0")
        factor = 1.0
        for _ in range(THINK_TRIES):  # the longer they are, the more of them meet the end of the trace
            factor *= wish.value / met if met else 1.0
            met = _mean_think_s(_trial(replace(found, model=with_think(learned, factor)), seed))
            if abs(met - wish.value) <= THINK_OFF * wish.value:
                break
        if abs(met - wish.value) > 5 * THINK_OFF * wish.value:
            raise TraceError(
                "think times of this mean do not fit into the trace",
                seen=f"{wish.value:g} s",
                wanted=f"less; {met:.3g} s came of {factor:.3g} times those learned",
                next_step="Raise --duration",
            )
        found.notes.append(f"think times of {met:.3g} s on average, {factor:.3g} times those learned, which have {own:.3g} s")
    found.model = with_think(learned, factor)


def _set_turns(found: Dialed, wish: Dial | None, seed: int) -> None:
    if wish is None or wish == Dial(value=1.0, is_factor=True):
        return
    learned = found.model

    def mean(log_odds: float, starts: int = TRIAL_STARTS) -> float:
        return _mean_turns(_trial(replace(found, model=with_turns(learned, float(np.exp(log_odds)))), seed, starts))

    own = mean(0.0)
    target = wish.value * own if wish.is_factor else wish.value
    low, high = (-LEAST_LOG_ODDS, 0.0) if target < own else (0.0, 1.0)
    while target > own and mean(high) < target and high < MOST_LOG_ODDS:
        low, high = high, high + 1
    most = own if target <= own else mean(high)
    if not 1 <= target <= most * TURNS_OFF:
        raise TraceError(
            "no chance of going on gives so many turns",
            seen=f"{target:.3g} turns of a session on average",
            wanted=f"1 to {most:.3g}",
            next_step="A session has more turns in a longer --duration, or with shorter --think",
        )
    for _ in range(16):
        middle = (low + high) / 2
        met = mean(middle)
        if abs(met / target - 1) < TURNS_OFF - 1:
            break
        low, high = (middle, high) if met < target else (low, middle)
    found.model = with_turns(learned, float(np.exp(middle)))
    found.notes.append(f"{met:.3g} turns of a session on average (learned: {own:.3g})")


def _set_amount(found: Dialed, learned: Model, wishes: Wishes, seed: int) -> None:
    """One factor of starts. A number of requests beside a rate sets how long it takes."""
    per_s = learned.requests / learned.span_s
    if found.model.turns != learned.turns or found.dials.output_tokens != Length():
        before = replace(found, model=learned, dials=Dials())
        per_s *= len(_trial(found, seed)) / max(1, len(_trial(before, seed)))
    factor, duration_s = wishes.scale or 1.0, wishes.duration_s
    if wishes.users is not None:
        under_way = _mean_under_way(found, seed)
        factor = wishes.users / under_way
        found.notes.append(f"{under_way:.3g} sessions are under way on average as learned, {wishes.users:g} are wanted")
    elif wishes.requests_per_s is not None:
        factor = wishes.requests_per_s / per_s
    if wishes.requests is not None and (wishes.users or wishes.requests_per_s) and duration_s is None:
        duration_s = wishes.requests / (factor * per_s)
    elif wishes.requests is not None:
        factor = wishes.requests / (per_s * max(learned.span_s, duration_s or 0.0))
    found.amount = Amount(rate_factor=factor, duration_s=duration_s)


def _set_sharing(found: Dialed, target: float, kv_tokens: int | None, seed: int) -> None:
    """`kv_tokens` None: an endless cache."""
    plain = found.dials
    longest = max(2.0, float(_trial(found, seed).input_tokens.max()) / found.model.block_tokens)

    def at(setting: float) -> Dials:
        """0 to 1: that part of what is shared; 1 to 2: all of it, and longer prefixes."""
        more = longest ** (setting - 1) - 1 if setting > 1 else 0.0
        return replace(plain, shared_part=min(setting, 1.0), more_shared=more)

    def rate(setting: float) -> float:
        curve = _curve(replace(found, dials=at(setting)), seed)
        return curve.hit_rate_infinite if kv_tokens is None else curve.hit_rate_at(kv_tokens // BASE_BLOCK_TOKENS)

    tried, is_met = closest(SETTINGS, target, rate)
    setting, met = min(tried, key=lambda one: abs(one[1] - target))
    what = "prefix share" if kv_tokens is None else f"hit rate at {kv_tokens:,} tokens of KV"
    if not is_met and abs(met - target) > TOLERANCE / 2:
        raise _infeasible(found.model, what, target, [one for _, one in tried])
    found.dials = at(setting)
    how = f"{found.dials.shared_part:.1%} of what is shared in the trace"
    if found.dials.more_shared:
        how = f"prefixes that are {found.dials.more_shared * found.model.block_tokens:,.0f} tokens longer, in prompts as long"
    found.notes.append(f"{what} {met:.3f} (wanted {target:g}) with {how}")
    if abs(met - target) > TOLERANCE:
        found.notes.append(f"the {what} is off by more than 0.02: it moves in steps here")


def _infeasible(model: Model, what: str, target: float, rates: list[float]) -> TraceError:
    least, most = min(rates), max(rates)
    if target < least:
        why = (
            f"Sessions that repeat their own history give {least:.3f} even where nothing else is shared. Ask for fewer turns, "
            "longer new input (--input-tokens), or, of a hit rate, a smaller KV size, longer think times or a higher rate"
        )
    else:
        why = (
            "Even where all prompts begin alike they end in tokens of their own, and what is pushed out of the cache is lost. "
            "Ask for fewer new tokens (--input-tokens), or, of a hit rate, a larger KV size, shorter think times or a lower rate"
        )
        if model.block_tokens > BASE_BLOCK_TOKENS:
            why += f"; only whole blocks of {model.block_tokens} tokens are shared in this model"
    return TraceError(
        f"this model cannot have such a {what}", seen=f"{target:g}", wanted=f"{least:.3f} to {most:.3f}", next_step=why
    )


def _curve(found: Dialed, seed: int) -> HitCurve:
    """Of the trace that will be drawn, or its first millions of blocks."""
    tables, blocks = [], 0
    for table in draw(found.model, found.amount, np.random.default_rng(seed), Totals(), found.dials):
        tables.append(table)
        blocks += len(table["input_blocks"].combine_chunks().values)
        if blocks > TRIAL_BLOCKS:
            break
    whole = pa.concat_tables(tables)
    for name, kind in (("input_tail_id", pa.int32()), ("output_blocks", pa.list_(pa.int32()))):
        if name not in whole.column_names:
            whole = whole.append_column(name, pa.nulls(len(whole), kind))
    footer = Footer(block_tokens=found.model.block_tokens, tail_rule=found.model.tail_rule)
    return hit_curve(touches_as_engine(whole, footer))


def _trial(found: Dialed, seed: int, starts: int = TRIAL_STARTS) -> Drawn:
    """Requests of some thousand starts, in no order, over the time that will be drawn (of a longer one, the first span)."""
    model, duration_s = found.model, found.amount.duration_s
    factor = min(starts / max(1, sum(model.starts.counts)), TRIAL_REQUESTS / model.requests)
    amount = Amount(rate_factor=factor, duration_s=None if duration_s is None else min(duration_s, model.span_s))
    parts = [rows for rows, _ in drawn(model, amount, np.random.default_rng([seed, 1]), found.dials, MAX_STARTS)]
    if not parts:
        raise TraceError("no request arrives in this time", seen=f"{duration_s} s", next_step="Raise --duration")
    return Drawn.joined(parts)


def _mean_turns(rows: Drawn) -> float:
    return len(rows) / len(np.unique(rows.family))


def _mean_think_s(rows: Drawn) -> float:
    think = rows.think_ns[(rows.kind == TURN) & (rows.think_ns >= 0)]
    return float(think.mean()) / NS if len(think) else 0.0


def _mean_under_way(found: Dialed, seed: int) -> float:
    """Sessions from first arrival to last known end, at the learned number of starts."""
    rows = _trial(found, seed)
    names, inverse = np.unique(rows.family, return_inverse=True)
    begin, end = np.full(len(names), 2**62), np.zeros(len(names), dtype=np.int64)
    np.minimum.at(begin, inverse, rows.arrival_ns)
    np.maximum.at(end, inverse, rows.arrival_ns + np.maximum(rows.end_ns, 0))
    span_ns = min(found.amount.duration_s or found.model.span_s, found.model.span_s) * NS
    busy = float((np.minimum(end, span_ns) - begin).sum()) / span_ns
    if not busy > 0:
        raise TraceError("--users does not apply to this model", seen="no session takes any time in it", next_step="Give --rate")
    starts = int((rows.kind == START).sum())
    return busy * _starts_in(found.model, span_ns / NS) / starts


def _starts_in(model: Model, duration_s: float) -> float:
    """Learned starts before this time."""
    counts, window_s = model.starts.counts, model.starts.window_s
    return float(np.interp(duration_s, np.arange(len(counts) + 1) * window_s, np.concatenate([[0], np.cumsum(counts)])))
