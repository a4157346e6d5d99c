"""Laws of a fitted model's dials: each changes one thing and keeps the rest, or is refused with the reason."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.arrivals import NS
from synth.dialing import Dialed, Wishes, _curve, dialed
from synth.dials import Dial, Dials, Length, gaps_cv, with_turns
from synth.drawing import Amount, draw, drawn
from synth.fit import COLUMNS, fit
from synth.generate import Totals
from synth.generating import generate_from_model, generate_trace
from synth.learned import Model, to_json
from synth.model import Distribution, load_workload
from tests.synth.test_dials import ks, spearman
from tests.synth.test_group_bootstrap import assert_lawful, rows_of
from tests.synth.test_hit_rate import analyzed
from tracer.errors import TraceError
from tracer.tracefile import read_footer, read_table


def learned(folder: Path, without: tuple[str, ...] = (), **overrides: Any) -> Model:
    path = folder / "source.parquet"
    generate_trace(load_workload(preset="chat", overrides={"requests": 1000, "system_prompts.count": 3} | overrides), 1, path)
    table = read_table(path, COLUMNS)
    for name in without:
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(place), pa.nulls(len(table), table.schema.field(place).type))
    return fit(table, read_footer(path), "chat")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return learned(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """No sessions: what goes on is told by blocks."""
    return learned(tmp_path_factory.mktemp("plain"), ("session_id", "parent_request_id", "think_ns", "end_ns"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Lengths and arrivals only."""
    left_out = ("session_id", "parent_request_id", "think_ns", "end_ns", "input_blocks", "input_tail_id", "output_blocks")
    return learned(tmp_path_factory.mktemp("bare"), left_out)


def rows(found: Dialed, seed: int = 0) -> pa.Table:
    return pa.concat_tables(draw(found.model, found.amount, np.random.default_rng(seed), Totals(), found.dials))


def same(first: pa.Table, second: pa.Table, names: str) -> bool:
    return first.select(names.split()).equals(second.select(names.split()))


FACTORS = {name: Dial(value=1.0, is_factor=True) for name in ("burstiness", "turns", "think_s")}
LENGTHS = st.one_of(
    st.builds(Length, factor=st.floats(0.1, 8)),
    st.builds(lambda p50, ratio: Length(law=Distribution(p50=p50, p99=p50 * ratio)), st.floats(40, 2000), st.floats(1.5, 40)),
)


@pytest.mark.parametrize("seed", [0, 7])
def test_times_one_is_the_same_trace_row_by_row(chat: Model, seed: int) -> None:
    wishes = Wishes(**FACTORS, input_tokens=Length(factor=1.0), output_tokens=Length(factor=1.0))

    assert rows(dialed(chat, wishes, seed), seed).equals(rows(dialed(chat, Wishes(), seed), seed))


@given(setting=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 400)), min_size=1, max_size=3), name=st.sampled_from(["c", "p"]))
@settings(max_examples=5, deadline=None)
def test_sharing_grows_with_its_dial_and_nothing_else_moves(
    chat: Model, plain: Model, setting: list[tuple[float, float]], name: str
) -> None:
    model = chat if name == "c" else plain
    amount = Amount(rate_factor=0.2)
    whole = rows(Dialed(model=model, amount=amount, dials=Dials()))
    parts = [{"shared_part": part} for part in sorted(part for part, _ in setting)]
    longer = [{"more_shared": more} for more in sorted(more for _, more in setting)]
    shares = []

    for dials in [*parts, {}, *longer]:
        found = Dialed(model=model, amount=amount, dials=Dials(**dials))
        shares.append(_curve(found, 0).hit_rate_infinite)
        columns = "request_id arrival_ns input_tokens output_tokens" + (" session_id turn" if model is chat else "")
        assert same(rows(found), whole, columns)

    assert (np.diff(shares) >= 0).all()


@given(
    length=LENGTHS,
    output=LENGTHS,
    part=st.floats(0, 1),
    more=st.sampled_from([0.0, 3.3, 50.0]),
    odds=st.floats(0.05, 4),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=8, deadline=None)
def test_no_session_is_split_whatever_is_dialed(
    tmp_path_factory: pytest.TempPathFactory,
    chat: Model,
    length: Length,
    output: Length,
    part: float,
    more: float,
    odds: float,
    seed: int,
) -> None:
    dials = Dials(input_tokens=length, output_tokens=output, shared_part=1.0 if more else part, more_shared=more)
    totals = Totals()
    amount = Amount(rate_factor=0.25)
    table = pa.concat_tables(draw(with_turns(chat, odds), amount, np.random.default_rng(seed), totals, dials))
    found = table.to_pylist()

    assert_lawful(found)
    turns: dict[int, list[int]] = {}
    for row in found:
        turns.setdefault(row["session_id"], []).append(row["turn"])
        assert len(row["input_blocks"]) == row["input_tokens"] // 16
        if row["turn"]:
            before = found[row["parent_request_id"]]
            assert row["arrival_ns"] == before["arrival_ns"] + before["end_ns"] + row["think_ns"]
            assert row["input_blocks"][: len(before["input_blocks"])] == before["input_blocks"]
    assert all(one == list(range(len(one))) for one in turns.values())


@given(length=LENGTHS, output=LENGTHS)
@settings(max_examples=8, deadline=None)
def test_lengths_keep_their_rank_correlation_and_leave_the_rest_alone(chat: Model, length: Length, output: Length) -> None:
    def new_and_output(dials: Dials) -> tuple[np.ndarray, ...]:
        ((one, _),) = drawn(chat, Amount(), np.random.default_rng(2), dials, 10**6)
        return one.input_tokens - one.based * 16, one.output_tokens, one.depth, one.arrival_ns

    new, answers, depth, arrival = new_and_output(Dials())
    longer, same_answers, same_depth, same_arrival = new_and_output(Dials(input_tokens=length))
    same_new, other_answers, first_depth, first_arrival = new_and_output(Dials(output_tokens=output))

    for one, other in ((answers, same_answers), (depth, same_depth), (arrival, same_arrival)):
        assert (one == other).all()
    first, others = depth == 0, first_depth == 0
    assert (new[first] == same_new[others]).all() and (arrival[first] == first_arrival[others]).all()
    wanted = spearman(new[first], answers[first])
    assert spearman(longer[first], answers[first]) == pytest.approx(wanted, abs=0.03)
    assert spearman(new[first], other_answers[others]) == pytest.approx(wanted, abs=0.03)
    if length.law is None:
        assert np.abs(longer - np.maximum(new * length.factor, 1)).max() <= length.factor / 2 + 1


def test_lengths_given_as_percentiles_have_them(chat: Model) -> None:
    ((one, _),) = drawn(chat, Amount(), np.random.default_rng(2), Dials(input_tokens=Length(law=LONG)), 10**6)
    new = one.input_tokens - one.based * 16

    assert np.median(new) == pytest.approx(500, rel=0.1)
    assert np.quantile(new, 0.99) == pytest.approx(4000, rel=0.2)


LONG = Distribution(p50=500, p99=4000)


@pytest.mark.parametrize("target", [1.0, 4.0])
def test_turns_are_met_on_average_and_starts_stay(chat: Model, target: float) -> None:
    found = dialed(chat, Wishes(turns=Dial(value=target)), 3)
    table, before = rows(found, 3), rows(dialed(chat, Wishes(), 3), 3)

    assert len(table) / len(np.unique(table["session_id"])) == pytest.approx(target, rel=0.06)
    first = [one.filter(pa.compute.equal(one["turn"], 0)) for one in (table, before)]
    assert same(*first, "arrival_ns input_tokens output_tokens")


def test_think_times_are_scaled_and_kept_in_shape(chat: Model) -> None:
    plain, given_mean, double = (
        rows(dialed(chat, Wishes(think_s=dial), 3), 3)["think_ns"].drop_null().to_numpy() / NS
        for dial in (None, Dial(value=8.0), Dial(value=2.0, is_factor=True))
    )

    assert given_mean.mean() == pytest.approx(8, rel=0.12)
    assert ks(given_mean / given_mean.mean(), plain / plain.mean()) < 0.06
    assert np.quantile(double, 0.2) == pytest.approx(2 * np.quantile(plain, 0.2), rel=0.15)  # long ones meet the trace's end


def test_so_many_users_are_under_way(chat: Model) -> None:
    table = rows(dialed(chat, Wishes(users=150.0), 3), 3)

    session = table["session_id"].to_numpy()
    begin, end = np.full(session.max() + 1, 2**62), np.zeros(session.max() + 1, dtype=np.int64)
    np.minimum.at(begin, session, table["arrival_ns"].to_numpy())
    np.maximum.at(end, session, table["arrival_ns"].to_numpy() + table["end_ns"].to_numpy())
    assert (np.minimum(end, chat.span_s * NS) - begin).sum() / NS / chat.span_s == pytest.approx(150, rel=0.08)


def test_a_rate_is_met_with_more_turns_too_and_a_number_of_requests_sets_how_long(chat: Model) -> None:
    fast = rows(dialed(chat, Wishes(requests_per_s=6.0, turns=Dial(value=2.0, is_factor=True)), 3), 3)
    few = rows(dialed(chat, Wishes(requests_per_s=6.0, requests=600), 3), 3)

    assert len(fast) / chat.span_s == pytest.approx(6, rel=0.08)
    assert few["arrival_ns"][-1].as_py() / NS == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("cv", [0.3, 3.0])
def test_gaps_get_the_burstiness_that_was_asked_for_in_the_same_windows(chat: Model, cv: float) -> None:
    even = msgspec.structs.replace(
        chat, starts=msgspec.structs.replace(chat.starts, counts=[4000] * 4, window_s=60.0), span_s=240
    )
    found = dialed(even, Wishes(burstiness=Dial(value=cv)), 3)
    table = rows(found, 3)

    begun = np.sort(table.filter(pa.compute.equal(table["turn"], 0))["arrival_ns"].to_numpy())
    gaps = np.diff(begun)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert np.bincount(begun // (60 * NS)).tolist() == pytest.approx([4000] * 4, abs=1)
    assert gaps_cv(found.model) == pytest.approx(cv, rel=1e-3)
    doubled = dialed(even, Wishes(burstiness=Dial(value=2.0, is_factor=True)), 3)
    assert gaps_cv(doubled.model) == pytest.approx(2 * gaps_cv(even), rel=1e-3)


@pytest.mark.parametrize("name", ["chat", "plain"])
@pytest.mark.parametrize("target", [0.1, 0.7, 0.95])
def test_a_hit_rate_is_met_within_two_points_or_refused_with_the_range(
    tmp_path: Path, chat: Model, plain: Model, name: str, target: float
) -> None:
    (tmp_path / "m.json").write_bytes(to_json(chat if name == "chat" else plain))
    wishes = Wishes(hit_rate=target, hit_rate_at_tokens=150_000)

    try:
        report = generate_from_model(tmp_path / "m.json", tmp_path / "t.parquet", 4, wishes)
    except TraceError as error:
        assert error.wanted is not None and error.next_step is not None
        low, high = map(float, error.wanted.split(" to "))
        assert not low <= target <= high
        assert ("repeat their own history" if target < low else "tokens of their own") in error.next_step
        return

    assert_lawful(rows_of(tmp_path / "t.parquet"))
    assert analyzed(tmp_path / "t.parquet").hit_rate_at(150_000 // 16) == pytest.approx(target, abs=0.02)
    assert report.requests > 800 and "hit rate at 150,000 tokens of KV" in report.notes[1]


def test_a_prefix_share_is_met(tmp_path: Path, chat: Model) -> None:
    (tmp_path / "m.json").write_bytes(to_json(chat))

    report = generate_from_model(tmp_path / "m.json", tmp_path / "t.parquet", 4, Wishes(prefix_share=0.8))

    assert report.prefix_share == pytest.approx(0.8, abs=0.01) and report.prefix_share_target == 0.8


@pytest.mark.parametrize(
    ("name", "wishes", "problem"),
    [
        ("plain", Wishes(turns=Dial(value=3.0)), "--turns does not apply.*names no sessions"),
        ("plain", Wishes(users=3.0), "--users does not apply.*names no sessions"),
        ("plain", Wishes(think_s=Dial(value=3.0)), "--think does not apply.*names no sessions"),
        ("bare", Wishes(hit_rate=0.5, hit_rate_at_tokens=1000), "--hit-rate does not apply.*names no prefix blocks"),
        ("bare", Wishes(prefix_share=0.5), "--prefix-share does not apply.*names no prefix blocks"),
        ("chat", Wishes(turns=Dial(value=3000.0)), r"gives so many turns; saw 3e\+03.*wanted 1 to"),
        ("chat", Wishes(think_s=Dial(value=5000.0)), "do not fit into the trace.*wanted less"),
        ("chat", Wishes(turns=Dial(value=0.5)), "`--turns`; saw 0.5, wanted 1 to"),
        ("chat", Wishes(burstiness=Dial(value=0.0)), "`--burstiness`; saw 0, wanted 0.01"),
        ("chat", Wishes(input_tokens=Length(factor=0.0)), "`--input-tokens`; saw x0"),
        ("chat", Wishes(prefix_share=1.2), "`--prefix-share`; saw 1.2"),
        ("chat", Wishes(prefix_share=0.5, hit_rate=0.5, hit_rate_at_tokens=1000), "Give one of them"),
        ("chat", Wishes(users=3.0, requests_per_s=1.0), "only one of these can set the rate"),
        ("chat", Wishes(requests_per_s=-1.0), "`requests_per_s`"),
    ],
)
def test_a_dial_that_cannot_apply_is_refused_with_the_reason(
    chat: Model, plain: Model, bare: Model, name: str, wishes: Wishes, problem: str
) -> None:
    model = {"chat": chat, "plain": plain, "bare": bare}[name]

    with pytest.raises(TraceError, match=problem):
        dialed(model, wishes, 0)


def test_think_times_need_the_ends_of_answers(tmp_path: Path) -> None:
    model = learned(tmp_path, ("end_ns", "think_ns"))

    with pytest.raises(TraceError, match=r"--think does not apply.*ends of answers"):
        dialed(model, Wishes(think_s=Dial(value=3.0)), 0)
