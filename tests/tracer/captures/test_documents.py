"""Files of JSON values, whole and damaged."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracer.captures.documents import values

ENTRIES = [{"a": 1}, {"b": [1, {"c": "]}"}]}, {"d": "ü,[\n"}]


def read(data: bytes):
    rejected = []
    return list(values(io.BytesIO(data), rejected.append)), rejected


@pytest.mark.parametrize(
    "data",
    [
        "\n".join(json.dumps(entry) for entry in ENTRIES),
        "\n\n" + "\n\n".join(json.dumps(entry) for entry in ENTRIES) + "\n",
        json.dumps(ENTRIES),
        json.dumps(ENTRIES, indent=2),
        "\ufeff" + json.dumps(ENTRIES, ensure_ascii=False),
    ],
)
def test_lines_and_arrays_hold_the_same_values(data) -> None:
    found, rejected = read(data.encode())

    assert [value for _, value in found] == ENTRIES
    assert rejected == []


def test_one_value_over_many_lines_is_one() -> None:
    assert read(json.dumps(ENTRIES[1], indent=2).encode()) == ([("document", ENTRIES[1])], [])


def test_damaged_lines_cost_themselves_only_even_the_first() -> None:
    found, rejected = read(b'{"cut\n{"a": 1}\n5\n{"b": 2}\n{"c')

    assert found == [("line 2", {"a": 1}), ("line 4", {"b": 2})]
    assert [one.place for one in rejected] == ["line 1", "line 3", "line 5"]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, len(json.dumps(ENTRIES)) - 1))
def test_an_array_that_is_cut_gives_its_whole_members_and_one_loss(size) -> None:
    data = json.dumps(ENTRIES).encode()[:size]

    found, rejected = read(data)

    assert [value for _, value in found] == ENTRIES[: len(found)]
    assert [one.counted_as for one in rejected] == ["torn_captures"]


def test_deep_nesting_is_damage_not_a_crash() -> None:
    found, rejected = read(b'{"a": ' + b"[" * 200_000)

    assert (found, len(rejected)) == ([], 1)
