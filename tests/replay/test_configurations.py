"""The file of a grid: what it launches comes out as written, and what is wrong in it is said with its line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.configurations import arguments, filled, parse_grid, placeholders
from replay.errors import PlanError

GOOD = """
command = ["serve", "--port", "{port}", "--seqs={seqs}", "{flags}"]
cheapest = "seqs"

[grid]
seqs = [16, 64]
flags = [["--eager"], []]

[[skip]]
seqs = 64
flags = ["--eager"]
"""


def test_configurations_are_all_combinations_but_those_skipped_and_fill_the_command() -> None:
    grid = parse_grid(GOOD, "grid.toml", is_launched=True)

    commands = [arguments(grid.command, one | {"port": 9}) for one in grid.configurations()]

    assert commands == [
        ["serve", "--port", "9", "--seqs=16", "--eager"],
        ["serve", "--port", "9", "--seqs=16"],
        ["serve", "--port", "9", "--seqs=64"],
    ]
    assert (grid.cheapest, grid.ready, grid.target) == (("seqs",), "http://127.0.0.1:{port}/health", "http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[16, 64]", "[]", "grid.toml:6: seqs has no values"),
        ("[16, 64]", "[16, 16]", "grid.toml:6: seqs has a value twice"),
        ("[16, 64]", "16", "grid.toml:6: seqs has no values"),
        ("[16, 64]", "[16, 6", "no TOML file"),
        ("{seqs}", "{seq}", "grid.toml:2: unknown placeholder; saw {seq}"),
        ("{seqs}", "8", "grid.toml:6: seqs changes nothing"),
        ("{port}", "80", "the command takes no port"),
        ("cheapest", "cheepest", "Did you mean cheapest"),
        ('cheapest = "seqs"', 'cheapest = "flags"', "grid.toml:3: of flags none is the least"),
        ("seqs = 64\n", "seqs = 65\n", "skip names a value of seqs that is not tried"),
        ("seqs = 64\nflags = [", "seqs = [16, 64]\n#", "every configuration is skipped"),
        ("[grid]", "[grids]", "unknown setting"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(old: str, new: str, said: str) -> None:
    assert old in GOOD

    with pytest.raises(PlanError) as refused:
        parse_grid(GOOD.replace(old, new, 1), "grid.toml", is_launched=True)

    assert said in str(refused.value)


def test_a_simulated_engine_has_its_own_keys() -> None:
    assert parse_grid("[grid]\nkv_tokens = [1000, 2000]", "g", is_launched=False).configurations()[1] == {"kv_tokens": 2000}
    with pytest.raises(PlanError, match="the simulated engine has no such key"):
        parse_grid("[grid]\nseqs = [1000, 2000]", "g", is_launched=False)
    with pytest.raises(PlanError, match="kv_tokens cannot be so"):
        parse_grid("[grid]\nkv_tokens = [0]", "g", is_launched=False)


@given(st.lists(st.sampled_from(["{a}", "{{", "}}", "x", '{"json": 1}', " "])), st.integers(0, 99))
def test_braces_are_kept_and_placeholders_filled(parts: list[str], value: int) -> None:
    text = "".join(parts)

    found = filled(text, {"a": value})

    assert list(placeholders(text)) == ["a"] * parts.count("{a}") or "{{" in text or "}}" in text
    plain = {"{a}": str(value), "{{": "{", "}}": "}"}
    if not any(one in text.replace("{a}", "") for one in ("{{{", "}}}")) and "{{a}" not in text and "{a}}" not in text:
        assert found == "".join(plain.get(one, one) for one in parts)
