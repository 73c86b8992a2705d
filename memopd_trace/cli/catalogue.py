"""Commands that say what is judged, and by what: `schema`, `explain`, `codes`."""

from __future__ import annotations

import difflib
import json
from enum import StrEnum
from typing import get_args

import typer

from memopd_trace import rules
from memopd_trace.cli.console import OutputFormat, Profile
from memopd_trace.errors import UsageError
from memopd_trace.rules.registry import Rule
from memopd_trace.schema import Table, arrow_schema
from memopd_trace.schema_text import to_json, to_markdown

TABLES: tuple[Table, ...] = get_args(Table)


class SchemaFormat(StrEnum):
    """A rendering of the schema."""

    arrow = "arrow"
    markdown = "markdown"
    json = "json"


def schema(
    table: str = typer.Argument(
        "trace", help=f"One of {', '.join(TABLES)}.", autocompletion=lambda: list(TABLES), show_default=True
    ),
    format: SchemaFormat = typer.Option(SchemaFormat.markdown, "--format"),
) -> None:
    """Print the columns of a table.

    Example: memopd-trace schema trace --format json
    """
    name = _table(table)
    if format is SchemaFormat.json:
        print(json.dumps(to_json(name), indent=1))
    elif format is SchemaFormat.arrow:
        for field in arrow_schema(name):
            print(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}")
    else:
        print(to_markdown(name), end="")


def explain(code: str = typer.Argument(..., help="A code of the list that `codes` prints.")) -> None:
    """Print the page of a rule: what it wants, why, and the way out.

    Example: memopd-trace explain E-DISCONTINUITY
    """
    rule = rules.find(code)
    clause = rule.clause + (f" ({rule.clause_url})" if rule.clause_url else "")
    facts = f"Profiles: {', '.join(rule.profiles) or 'none'}. Severity: {rule.severity}."
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        from rich.markdown import Markdown  # here: its parser and highlighter would slow every command's start

        console.print(Markdown(f"{rule.page}\n---\n{clause}\n\n{facts}", hyperlinks=False))
    else:
        print(f"{rule.page}\n{clause}\n{facts}")


def codes(
    profile: Profile | None = typer.Option(None, help="Only the codes that this profile turns on."),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """List the codes of all rules.

    Example: memopd-trace codes --profile train
    """
    chosen = [r for r in rules.RULES.values() if profile is None or profile.value in r.profiles]
    if format is OutputFormat.json:
        print(rules.codes_json(chosen), end="")
        return
    width = max(len(r.code) for r in chosen)
    for rule in chosen:
        print(f"{rule.code:<{width}}  {rule.title}{_only(rule)}")


def _table(name: str) -> Table:
    for table in TABLES:
        if name == table:
            return table
    near = difflib.get_close_matches(name, TABLES, n=1)
    raise UsageError(f"no table '{name}'", hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(TABLES)}")


def _only(rule: Rule) -> str:
    return "" if "core" in rule.profiles else f"  [{', '.join(rule.profiles)}]"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(schema)
    app.command()(explain)
    app.command()(codes)
