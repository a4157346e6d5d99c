"""The summary as Markdown, for a pull request or a wiki: words, the table of every report, notes. Pure."""

from collections.abc import Sequence

from replay.judge.summary import Summary
from replay.report.text import figures, grouped_notes, labels, printable


def to_markdown(name: str, summary: Summary) -> str:
    lines = [f"## {_cell(name)}", "", f"{_cell(summary.trace)} on {_cell(summary.target)} ({_cell(summary.server)})", ""]
    lines += [f"- **{_cell(line)}**" for line in summary.headline]
    if summary.points:
        head = [f"by {summary.points[0].by}", *labels(summary.points)]
        lines += ["", _line(head), _line(["---", *["---:"] * len(summary.points)])]
        lines += [_line([label, *cells]) for section in figures(summary.points) for label, cells in section]
    notes = grouped_notes(summary)
    lines += ["", *(f"- {_cell(where)}: {_cell(note.seen)}. {_cell(note.action)}." for where, note in notes)] if notes else []
    return "\n".join([*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Servers' words may hold anything."""
    escaped = printable(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return escaped.replace("[", "\\[").replace("`", "\\`")
