"""Which clause of the specification states a rule: read from its texts, carried by the package as `clauses.json`.

The texts are the source: each clause ends in its code. `make spec` renders the file, so that an installed package,
which has no `spec/`, can name the place: `python -m memopd_trace.rules.clauses spec/*.md` prints it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

# a list item that begins with an anchor, up to the next item, paragraph or heading; its last word is the code
_CLAUSE = re.compile(r'^- <a id="([a-z0-9-]+)"></a>(.*?)(?=^- |^\S|\Z)', re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([EW]-[A-Z0-9-]+)`\.?\s*\Z")


def clauses_json(texts: Iterable[Path]) -> str:
    """The text of `clauses.json`: code -> `spec/<text>#<anchor>`, in the order of the texts."""
    found: dict[str, str] = {}
    for path in texts:
        for anchor, clause in _CLAUSE.findall(path.read_text(encoding="utf-8")):
            code = _CODE.search(clause)
            if code is not None:
                found.setdefault(code[1], f"spec/{path.name}#{anchor}")
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    print(clauses_json(Path(name) for name in sorted(sys.argv[1:])), end="")
