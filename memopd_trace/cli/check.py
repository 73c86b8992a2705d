"""Commands that judge a trace or say what is judged: `schema`, `validate`, `explain`, `codes`."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path

import typer

from memopd_trace import rules
from memopd_trace.cli.console import ESCAPE, OutputFormat
from memopd_trace.disk import atomic_file, is_node, regular_target
from memopd_trace.errors import UsageError
from memopd_trace.rules.registry import Rule
from memopd_trace.schema import Table, arrow_schema, to_json, to_markdown
from memopd_trace.validate import MAX_FINDINGS, validate


class TableName(StrEnum):
    """A table of the format."""

    trace = "trace"
    scores = "scores"


class SchemaFormat(StrEnum):
    """A rendering of the schema."""

    arrow = "arrow"
    markdown = "markdown"
    json = "json"


class Profile(StrEnum):
    """What must be present."""

    core = "core"
    lineage = "lineage"
    policy = "policy"
    train = "train"


class FailOn(StrEnum):
    """The least severity that fails."""

    error = "error"
    warning = "warning"


def schema(
    table: TableName = typer.Argument(TableName.trace),
    format: SchemaFormat = typer.Option(SchemaFormat.markdown, "--format"),
) -> None:
    """Print the columns of a table.

    Example: memopd-trace schema trace --format json
    """
    name: Table = "trace" if table is TableName.trace else "scores"
    if format is SchemaFormat.json:
        print(json.dumps(to_json(name), indent=1))
    elif format is SchemaFormat.arrow:
        for field in arrow_schema(name):
            print(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}")
    else:
        print(to_markdown(name), end="")


def check(
    paths: list[Path] = typer.Argument(..., metavar="PATH...", readable=False, help="Traces: files or folders."),
    profile: Profile = typer.Option(Profile.core, help="What must be present; what is wrong is found under each."),
    select: list[str] = typer.Option([], metavar="CODE", help="Judge only these codes (a glob is fine)."),
    ignore: list[str] = typer.Option([], metavar="CODE", help="Do not judge these codes (a glob is fine)."),
    fail_on: FailOn = typer.Option(FailOn.error, help="The least severity that gives exit code 1."),
    max_findings: int = typer.Option(MAX_FINDINGS, min=0, help="Findings shown per code; counts stay true."),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
    output: Path | None = typer.Option(None, "--output", "-o", readable=False, help="Write the report to this file."),
    exit_zero: bool = typer.Option(False, "--exit-zero", help="Exit 0 in spite of findings (not of a refusal)."),
) -> None:
    """Check traces against the rules of a profile.

    Exit code 0: no findings; 1: findings; 3: an input is missing, unreadable or refused.

    Example: memopd-trace validate run/ --profile train --format json -o report.json
    """
    if output is not None:
        _check_output(output, paths)
    report = validate(paths, profile.value, select=select, ignore=ignore, max_findings=max_findings)
    text = report.to_json() if format is OutputFormat.json else report.to_text()
    if output is None:
        sys.stdout.write(text)
    else:
        with atomic_file(output) as out:
            out.write(text.encode(errors=ESCAPE))
    raise typer.Exit(report.exit_code(fail_on.value, exit_zero=exit_zero))


def _check_output(output: Path, inputs: list[Path]) -> None:
    """Raises:
    UsageError: the report would replace an input or a file in it, or cannot be a file.
    """
    if is_node(output):
        return
    target = regular_target(output)
    for path in inputs:
        real = Path(os.path.realpath(path))
        same = target.exists() and real.exists() and target.samefile(real)
        if same or real == target or real in target.parents:
            raise UsageError(f"--output {output}: is the input {path} or lies in it", hint="write the report elsewhere")


def explain(code: str = typer.Argument(..., help="A code of the list that `codes` prints.")) -> None:
    """Print the page of a rule: what it wants, why, and the way out.

    Example: memopd-trace explain E-DISCONTINUITY
    """
    rule = rules.find(code)
    print(rule.page)
    print(f"{rule.clause}\nProfiles: {', '.join(rule.profiles)}. Severity: {rule.severity}.")


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


def _only(rule: Rule) -> str:
    return "" if "core" in rule.profiles else f"  [{', '.join(rule.profiles)}]"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(schema)
    app.command("validate")(check)
    app.command()(explain)
    app.command()(codes)
