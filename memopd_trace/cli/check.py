"""Commands that look at a trace: `schema` (and the validator's)."""

from __future__ import annotations

import json
from enum import StrEnum

import typer

from memopd_trace.schema import arrow_schema, to_json, to_markdown


class TableName(StrEnum):
    """A table of the format."""

    trace = "trace"
    scores = "scores"


class SchemaFormat(StrEnum):
    """A rendering of the schema."""

    arrow = "arrow"
    markdown = "markdown"
    json = "json"


def schema(
    table: TableName = typer.Argument(TableName.trace),
    format: SchemaFormat = typer.Option(SchemaFormat.markdown, "--format"),
) -> None:
    """Print the columns of a table.

    Example: memopd-trace schema trace --format json
    """
    name = table.value
    if format is SchemaFormat.json:
        print(json.dumps(to_json(name), indent=1))
    elif format is SchemaFormat.arrow:
        print(arrow_schema(name).to_string(truncate_metadata=False))
    else:
        print(to_markdown(name), end="")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(schema)
