"""The workload file: presets, layers, and what a mistake in it looks like."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synth.model import Distribution, load_workload, presets, workload_from_table, workload_json
from tracer.errors import TraceError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "workload.toml"
    path.write_text(text)
    return path


def test_every_preset_is_a_valid_workload_that_survives_json() -> None:
    for name in presets():
        workload = load_workload(preset=name)

        again = workload_from_table(msgspec.json.decode(workload_json(workload)))

        assert again == workload
        assert workload.name == name


def test_layers_lie_on_top_of_each_other_and_distributions_are_replaced_whole(tmp_path: Path) -> None:
    path = written(tmp_path, 'preset = "chat"\nduration_s = 60\n[output_tokens]\nmean = 40\ncv = 0.5\n')

    workload = load_workload(path, overrides={"arrivals.requests_per_s": 7.0, "turns": 3, "model": None})

    assert workload.output_tokens == Distribution(mean=40, cv=0.5)
    assert (workload.duration_s, workload.requests) == (60, None)
    assert (workload.arrivals.requests_per_s, workload.arrivals.sessions_per_s) == (7.0, None)
    assert workload.turns == Distribution(constant=3)
    assert workload.input_tokens == load_workload(preset="chat").input_tokens


def test_an_argument_wins_over_the_preset_of_the_file_and_a_new_process_drops_the_old_ones_cv(tmp_path: Path) -> None:
    path = written(tmp_path, 'preset = "chat"\n')

    workload = load_workload(path, preset="few-shot", overrides={"arrivals.process": "poisson"})

    assert workload.name == "few-shot"
    assert workload.arrivals.cv is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("reqests = 5", ("unknown key `reqests`", "reqests = 5", "Did you mean `requests`?")),
        ("requests = 5\n[arrivals]\nsesions_per_s = 2", ("`arrivals.sesions_per_s`", "Did you mean `sessions_per_s`?")),
        ("requests = 5\n[output_tokens]\np5 = 2", ("`output_tokens.p5`", "Did you mean `p50`?")),
        ("requests = 'many'", ("`requests`", "'many'", "int")),
        ("requests = 0", ("`requests`", "saw 0", "wanted 1 to")),
        ("requests = 5\n[arrivals]\nsessions_per_s = nan", ("`arrivals.sessions_per_s`", "nan")),
        ("requests = 5\nprefix_share = 1.5", ("`prefix_share`", "1.5", "0 to 1")),
        ("requests = 5\n[arrivals]\nprocess = 'uniform'\nsessions_per_s = 1", ("`arrivals.process`", "uniform")),
        ("requests = 5\n[arrivals]\nprocess = 'gamma'\nsessions_per_s = 1", ("`arrivals.cv`",)),
        ("requests = 5\n[arrivals]\nprocess = 'recorded'", ("`arrivals.trace`",)),
        ("requests = 5\n[arrivals]\nsessions_per_s = 1\ncv = 2", ("`arrivals.cv`", 'Set process = "gamma"')),
        ("requests = 5\n[arrivals]\nsessions_per_s = 1\nrequests_per_s = 2", ("one of sessions_per_s",)),
        ("requests = 5\n[input_tokens]\np50 = 9", ("`input_tokens`", "p50 and p99")),
        ("requests = 5\n[input_tokens]\np50 = 9\np99 = 3", ("`input_tokens`", "0 < p50 <= p99")),
        ("requests = 5\ninput_tokens = []", ("`input_tokens.values`",)),
        ("requests = 5\n[turns]\nvalues = [1, 2]\nweights = [1]", ("`turns.weights`", "as many as values")),
        ("requests = 5\noutput_tokens = 0", ("`output_tokens.constant`", "1 to")),
        ("requests = 5\n[input_tokens]\nmin = 9\nmax = 3", ("`input_tokens`", "min <= max")),
        ("model = 'm'", ("Set requests or duration_s",)),
        ("preset = 'chatt'", ("no such preset", "Did you mean `chat`?")),
        ("requests = ", ("not a TOML file",)),
    ],
)
def test_a_mistake_names_the_key_what_was_seen_and_what_was_wanted(tmp_path: Path, text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(TraceError) as caught:
        load_workload(written(tmp_path, text))

    message = str(caught.value)
    assert all(part in message for part in parts), message


def test_a_missing_file_points_at_the_presets(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no such file.*few-shot"):
        load_workload(tmp_path / "none.toml")


@given(
    st.dictionaries(
        st.sampled_from(["requests", "turns", "arrivals", "documents", "input_tokens", "preset", "model", "stream"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["p50", "mean"]), inner),
            max_leaves=4,
        ),
    )
)
@settings(max_examples=150, deadline=None)
def test_no_table_at_all_fails_otherwise_than_by_a_trace_error(table: dict[str, object]) -> None:
    try:
        workload_from_table(table)
    except TraceError as error:
        assert str(error)
