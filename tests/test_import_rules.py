"""The folder tree is the data path: who may import whom, and which rooms may touch clock, randomness or I/O."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "tracer": set(),
    "synth": {"tracer"},
    "replay": {"tracer"},
    "chatreel": {"tracer", "synth", "replay"},
}
PURE = [
    "replay/plan",
    "replay/judge",
    "tracer/wire",
    "tracer/captures",
    "tracer/formats",
    "tracer/analysis",
    "replay/sim/engine.py",
    "synth",
]
SIDE_EFFECTS = {"time", "socket", "asyncio", "httpx", "aiohttp", "random", "threading", "multiprocessing"}
FILES = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_what_their_row_allows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]

    siblings = {name.split(".")[0] for name in imports(path)} & MAY_IMPORT.keys() - {room}

    assert siblings <= MAY_IMPORT[room]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_mitmproxy_stays_at_the_edge_and_pure_rooms_have_no_side_effects(path: Path) -> None:
    relative = str(path.relative_to(ROOT))

    roots = {name.split(".")[0] for name in imports(path)}

    assert "mitmproxy" not in roots or relative == "tracer/record/addon.py"
    if relative.startswith(tuple(PURE)):
        assert not roots & SIDE_EFFECTS
