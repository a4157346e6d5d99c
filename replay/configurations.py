"""The file of `chatreel tune --grid`: how a server is launched, and which configurations are tried. No I/O but reading it."""

import difflib
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from replay.errors import PlanError

Value = bool | int | float | str | tuple[str, ...]  # the last: several arguments, or none
Values = Mapping[str, Value]

READY_S, GRACE_S = 600.0, 30.0
ENGINE_KEYS = ("kv_tokens", "max_num_seqs", "max_num_batched_tokens")
_SETTINGS = {
    "command": 'a list of arguments or one string, e.g. ["vllm", "serve", "MODEL", "--port", "{port}"]',
    "ready": 'a URL that answers 200 once the server is ready, e.g. "http://127.0.0.1:{port}/health"',
    "ready_timeout_s": "seconds above 0",
    "target": 'the root URL of the server, e.g. "http://127.0.0.1:{port}"',
    "metrics": 'a list of URLs, e.g. ["http://127.0.0.1:{port}/metrics"]',
    "port": "a port number; without one a free one is taken for each launch",
    "cwd": "a folder",
    "grace_s": "seconds of 0 or more, from SIGTERM to SIGKILL",
    "env": "a table of variables",
    "grid": "a table of lists, e.g. max_num_seqs = [16, 64]",
    "skip": "tables of values, e.g. [[skip]] and below it max_num_seqs = 64",
    "cheapest": "a list of keys of the grid; of configurations that are alike the one with the least of them is taken",
}
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")  # JSON in an argument is none: its names are quoted
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    path: str
    lists: Mapping[str, tuple[Value, ...]]
    skip: Sequence[Mapping[str, tuple[Value, ...]]] = ()
    cheapest: tuple[str, ...] = ()
    command: tuple[str, ...] = ()  # empty: nothing is launched
    ready: str = "http://127.0.0.1:{port}/health"
    ready_timeout_s: float = READY_S
    target: str = "http://127.0.0.1:{port}"
    metrics: tuple[str, ...] = ()
    port: int | None = None
    cwd: str | None = None
    grace_s: float = GRACE_S
    env: Mapping[str, str] = field(default_factory=dict)

    def configurations(self) -> list[dict[str, Value]]:
        """Every combination that is not skipped, the last key changing fastest."""
        combined = (dict(zip(self.lists, values, strict=True)) for values in product(*self.lists.values()))
        return [one for one in combined if not any(_is_skipped(one, skip) for skip in self.skip)]


def _is_skipped(values: Values, skip: Mapping[str, tuple[Value, ...]]) -> bool:
    return all(values[key] in any_of for key, any_of in skip.items())


def read_grid(path: Path, *, is_launched: bool) -> Grid:
    """`is_launched`: False for a simulated engine, whose grid needs no command and has its own keys."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise PlanError(f"cannot be read: {why}", path=str(path), next_step="Give the TOML file of a grid by --grid") from error
    return parse_grid(text, str(path), is_launched=is_launched)


def parse_grid(text: str, path: str, *, is_launched: bool) -> Grid:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError("no TOML file", path=path, seen=str(error), wanted="[grid] and the command to launch") from error
    reading = _Reading(text, path)
    for key in found.keys() - _SETTINGS.keys():
        near = difflib.get_close_matches(key, _SETTINGS, 1)
        step = f"Did you mean {near[0]}?" if near else "Parameters of the server go into the table [grid]"
        raise reading.error(key, "unknown setting", key, ", ".join(_SETTINGS), step)
    lists = reading.lists(found)
    grid = Grid(
        path=path,
        lists=lists,
        skip=reading.skips(found, lists),
        cheapest=reading.cheapest(found, lists),
        command=reading.command(found),
        port=reading.port(found),
        metrics=tuple(reading.texts(found, "metrics")),
        env=reading.env(found),
        **reading.plain(found),
    )
    if is_launched:
        _check_placeholders(grid, reading)
    else:
        _check_engine_keys(grid, reading)
    if not grid.configurations():
        raise reading.error("skip", "every configuration is skipped", f"{len(grid.skip)} skip tables", "one that is left")
    return grid


@dataclass(frozen=True, slots=True)
class _Reading:
    """Each part of the file checked, its errors with the line it stands in."""

    text: str
    path: str

    def error(self, key: str, problem: str, seen: object, wanted: str, next_step: str | None = None) -> PlanError:
        pattern = re.compile(rf"\s*(\[+\s*)?[\"']?{re.escape(key)}[\"']?\s*[=\].]")
        line = next((number for number, line in enumerate(self.text.splitlines(), 1) if pattern.match(line)), None)
        seen = seen if isinstance(seen, str) else repr(seen)
        return PlanError(problem, path=self.path, line=line, seen=seen, wanted=wanted, next_step=next_step)

    def wrong(self, key: str, value: object) -> PlanError:
        return self.error(key, f"{key} cannot be so", value, _SETTINGS[key])

    def plain(self, found: dict[str, Any]) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for key in ("ready", "target", "cwd"):
            if key in found:
                if not isinstance(found[key], str) or not found[key]:
                    raise self.wrong(key, found[key])
                given[key] = found[key].rstrip("/") if key == "target" else found[key]
        for key, least in (("ready_timeout_s", 1e-3), ("grace_s", 0)):
            if key in found:
                if not _is_number(found[key]) or not least <= found[key] < 1e9:
                    raise self.wrong(key, found[key])
                given[key] = float(found[key])
        if "target" in given and "ready" not in given:
            given["ready"] = given["target"] + "/health"
        return given

    def command(self, found: dict[str, Any]) -> tuple[str, ...]:
        command = found.get("command", [])
        if isinstance(command, str):
            try:
                return tuple(shlex.split(command))
            except ValueError as error:
                raise self.error("command", "command cannot be split", str(error), "quotes that are closed") from error
        return tuple(self.texts(found, "command"))

    def texts(self, found: dict[str, Any], key: str) -> list[str]:
        texts = found.get(key, [])
        if not isinstance(texts, list) or not all(isinstance(one, str | int) and not isinstance(one, bool) for one in texts):
            raise self.wrong(key, texts)
        return [str(one) for one in texts]

    def port(self, found: dict[str, Any]) -> int | None:
        port = found.get("port")
        if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536):
            raise self.wrong("port", port)
        return port

    def env(self, found: dict[str, Any]) -> dict[str, str]:
        env = found.get("env", {})
        if not isinstance(env, dict) or any(isinstance(one, list | dict) for one in env.values()):
            raise self.wrong("env", env)
        return {key: shown(value) for key, value in env.items()}

    def lists(self, found: dict[str, Any]) -> dict[str, tuple[Value, ...]]:
        table = found.get("grid")
        if not isinstance(table, dict) or not table:
            raise self.error("grid", "no grid", "nothing" if table is None else table, _SETTINGS["grid"], "Add a table [grid]")
        return {key: self._list(key, values) for key, values in table.items()}

    def _list(self, key: str, values: object) -> tuple[Value, ...]:
        if not _NAME.match(key) or key == "port":
            raise self.error(key, "no key of a grid", key, "letters, digits and _; `port` is taken")
        if not isinstance(values, list) or not values:
            raise self.error(key, f"{key} has no values", values, f"a list with one value or more, e.g. {key} = [16, 64]")
        read = tuple(self._value(key, one) for one in values)
        if len({(shown(one), isinstance(one, tuple)) for one in read}) < len(read):
            raise self.error(key, f"{key} has a value twice", values, "each value once")
        return read

    def _value(self, key: str, value: object) -> Value:
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        if isinstance(value, bool | str) or (_is_number(value) and abs(value) < float("inf")):  # type: ignore[arg-type]
            return value  # type: ignore[return-value]
        raise self.error(key, f"{key} has a value that cannot be", value, "numbers, texts, booleans or lists of arguments")

    def skips(self, found: dict[str, Any], lists: Mapping[str, tuple[Value, ...]]) -> list[dict[str, tuple[Value, ...]]]:
        tables = found.get("skip", [])
        if not isinstance(tables, list) or not all(isinstance(one, dict) and one for one in tables):
            raise self.wrong("skip", tables)
        skips = []
        for table in tables:
            skip = {}
            for key, value in table.items():
                if key not in lists:
                    raise self.error(key, "skip names no key of the grid", key, ", ".join(lists))
                any_of = self._any_of(key, value, lists[key])
                unknown = [one for one in any_of if one not in lists[key]]
                if unknown:
                    raise self.error("skip", f"skip names a value of {key} that is not tried", unknown[0], _listed(lists[key]))
                skip[key] = any_of
            skips.append(skip)
        return skips

    def _any_of(self, key: str, value: object, tried: tuple[Value, ...]) -> tuple[Value, ...]:
        """A list is several values, unless the grid's values are lists themselves."""
        if isinstance(value, list) and not any(isinstance(one, tuple) for one in tried):
            return tuple(self._value(key, one) for one in value)
        return (self._value(key, value),)

    def cheapest(self, found: dict[str, Any], lists: Mapping[str, tuple[Value, ...]]) -> tuple[str, ...]:
        keys = [found["cheapest"]] if isinstance(found.get("cheapest"), str) else found.get("cheapest", [])
        if not isinstance(keys, list):
            raise self.wrong("cheapest", keys)
        for key in keys:
            if key not in lists:
                raise self.error("cheapest", "cheapest names no key of the grid", key, ", ".join(lists))
            if not all(_is_number(one) for one in lists[key]):
                raise self.error("cheapest", f"of {key} none is the least", _listed(lists[key]), "a key with numbers")
        return tuple(keys)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _listed(values: Sequence[Value]) -> str:
    return ", ".join(map(shown, values))


def _check_placeholders(grid: Grid, reading: _Reading) -> None:
    """A key that no placeholder takes would launch the same server again and again."""
    if not grid.command:
        raise reading.error(
            "command", "nothing is launched", "no command", _SETTINGS["command"], "Or give --engine for a simulated engine"
        )
    known = (*grid.lists, "port")
    used = set()
    places = {"command": grid.command, "ready": (grid.ready,), "target": (grid.target,), "metrics": grid.metrics}
    places |= {"env": tuple(grid.env.values()), "cwd": (grid.cwd or "",)}
    for setting, texts in places.items():
        for name in (name for text in texts for name in placeholders(text)):
            if name not in known:
                wanted = ", ".join("{" + one + "}" for one in known)
                raise reading.error(setting, "unknown placeholder", "{" + name + "}", wanted, "Write {{ and }} for braces")
            used.add((name, setting in ("command", "env", "cwd")))
    for key in grid.lists:
        if (key, True) not in used:
            raise reading.error(
                key,
                f"{key} changes nothing: no argument takes it",
                shlex.join(grid.command),
                "{" + key + "} in command or env",
            )
    if grid.port is None and ("port", True) not in used:
        raise reading.error(
            "command", "the command takes no port", shlex.join(grid.command), "{port} in it, or port = NUMBER beside it"
        )


def _check_engine_keys(grid: Grid, reading: _Reading) -> None:
    for key, values in grid.lists.items():
        if key not in ENGINE_KEYS:
            raise reading.error(key, "the simulated engine has no such key", key, ", ".join(ENGINE_KEYS), "Use another grid")
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise reading.error(key, f"{key} cannot be so", value, "whole numbers of 1 or more")


def placeholders(text: str) -> Iterator[str]:
    return (one.group(1) for one in _PLACEHOLDER.finditer(text) if one.group(1))


def filled(text: str, values: Values) -> str:
    """`{key}` as its value; `{{` and `}}` are braces."""
    return _PLACEHOLDER.sub(lambda one: shown(values[one.group(1)]) if one.group(1) else one.group(0)[0], text)


def arguments(command: Sequence[str], values: Values) -> list[str]:
    """A list of arguments takes the whole place of its placeholder, an empty one leaves nothing."""
    found: list[str] = []
    for text in command:
        alone = _PLACEHOLDER.fullmatch(text)
        value = values.get(alone.group(1)) if alone and alone.group(1) else None
        found += value if isinstance(value, tuple) else [filled(text, values)]
    return found


def shown(value: Value) -> str:
    """As TOML and most servers write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return shlex.join(value) if isinstance(value, tuple) else str(value)


def named(values: Values) -> str:
    return ", ".join(f"{key} = {shown(value) or 'none'}" for key, value in values.items())
