"""The columns as the specification prints them: a Markdown table, and plain data for readers in other languages."""

from __future__ import annotations

from typing import Any

from memopd_trace.schema import SPEC_VERSION, TABLES, Table, type_name


def to_markdown(table: Table = "trace") -> str:
    """The field table of the specification, one row a column."""
    lines = ["| column | type | required | length | unit | meaning |", "|---|---|---|---|---|---|"]
    for c in TABLES[table]:
        doc = c.doc + (" One of: " + ", ".join(f"`{v}`" for v in c.values) + "." if c.values else "")
        required = "yes" if c.required else ""
        lines.append(
            f"| `{c.name}` | `{type_name(c.type)}` | {required} | {c.length or ''} | {c.unit} | {doc} |".replace(
                "| null", "\\| null"
            )
        )
    return "\n".join(lines) + "\n"


def to_json(table: Table = "trace") -> dict[str, Any]:
    """The columns as plain data, for readers in other languages and for the frozen copies in `spec/versions/`."""
    return {
        "spec_version": SPEC_VERSION,
        "table": table,
        "columns": [
            {
                "name": c.name,
                "type": type_name(c.type),
                "required": c.required,
                "length": c.length,
                "unit": c.unit or None,
                "values": list(c.values) if c.values else None,
                "group": c.group,
                "doc": c.doc,
            }
            for c in TABLES[table]
        ],
    }
