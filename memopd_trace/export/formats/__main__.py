"""`python -m memopd_trace.export.formats docs/exporters.md`: render the tables of formats into a page."""

from __future__ import annotations

import sys
from pathlib import Path

from memopd_trace.export.format import Format
from memopd_trace.export.formats import FORMATS
from memopd_trace.export.losses import IMPLIED, WHY, WHY_SCORES

BEGIN, END = "<!-- exports: begin -->\n", "<!-- exports: end -->\n"


def tables() -> str:
    """What each format holds, and what it has no place for, as Markdown."""
    return "\n".join(_section(f) for f in FORMATS)


def rendered(page: str) -> str:
    """The page with its tables as they are now."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{tables()}{END}{tail}"


def _section(chosen: Format) -> str:
    lines = [f"### `{chosen.name}`", "", f"{chosen.title}. {chosen.note}", ""]
    if chosen.lossless:
        return "\n".join([*lines, "All columns of the trace, under their own names.", "", ""])
    lines += ["| column | type | holds |", "|---|---|---|"]
    lines += [f"| `{f.name}` | `{f.type_name}` | {f.doc} |" for f in chosen.fields]
    lines += ["", f"Not carried: {_list([n for n in WHY if n not in IMPLIED and not chosen.carries(n)])}."]
    lines += [f"Of scores: {_list([n for n in WHY_SCORES if not chosen.carries_score(n)])}.", "", ""]
    return "\n".join(lines)


def _list(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
