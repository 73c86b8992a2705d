"""`python -m memopd_trace.convert.formats docs/converters.md`: render the table of formats into a page."""

from __future__ import annotations

import sys
from pathlib import Path

from memopd_trace.convert.format import EXACTNESS
from memopd_trace.convert.formats import FORMATS

BEGIN, END = "<!-- formats: begin -->\n", "<!-- formats: end -->\n"


def table() -> str:
    """The table of formats, as Markdown."""
    lines = ["| format | logs of | holds | cannot tell | note |", "|---|---|---|---|---|"]
    for f in FORMATS:
        unsaid = ", ".join(f"`{code}`" for code in f.unsaid)
        lines.append(f"| `{f.name}` | {f.title} | {EXACTNESS[f.exactness]} | {unsaid} | {f.note} |")
    return "\n".join(lines) + "\n"


def rendered(page: str) -> str:
    """The page with its table as it is now."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{table()}{END}{tail}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
