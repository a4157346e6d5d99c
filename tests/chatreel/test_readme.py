"""What the README tells people to type is what the command takes."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from chatreel.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = sorted(
    {line for page in PAGES for line in re.findall(r"^    (chatreel .+)$|`(chatreel [a-z]+ [^`]*)`", page.read_text(), re.M)}
)
LINKS = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]


@pytest.mark.parametrize("command", [a or b for a, b in COMMANDS if "NAME" not in b])
def test_commands_in_the_pages_parse(command: str) -> None:
    _, name, *arguments = shlex.split(command)

    context = get_command(app).commands[name].make_context(name, arguments)

    assert context.params


@pytest.mark.parametrize(("page", "link"), LINKS, ids=lambda value: getattr(value, "name", value))
def test_links_lead_to_files(page: Path, link: str) -> None:
    assert (page.parent / link).exists()


def test_python_block_of_the_readme_runs() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block is not None

    exec(compile(block[1], "README.md", "exec"), {})
