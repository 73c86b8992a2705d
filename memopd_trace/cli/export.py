"""Commands that take traces out to other trainers: `export`, `exports`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from memopd_trace.cli.console import OutputFormat, progress

FEATURES = ("positions", "visibility", "slots", "media", "temperature")  # that `memopd_trace.export` knows


def _names() -> list[str]:
    """For a shell that completes a line."""
    from memopd_trace.export.formats import FORMATS  # where it is needed: other commands start without

    return [f.name for f in FORMATS]


def _features() -> list[str]:
    return list(FEATURES)


def export(
    format_name: str = typer.Argument(
        ..., metavar="FORMAT", help="A name that `exports` prints.", autocompletion=_names
    ),
    trace: str = typer.Argument(..., metavar="TRACE", help="A trace."),
    output: Path = typer.Option(..., "--output", "-o", readable=False, help="The file or folder to write."),
    scores: str | None = typer.Option(None, metavar="DIR", help="A teacher's scores of the trace."),
    drop: list[str] = typer.Option(
        [],
        metavar="FEATURE",
        help=f"Flatten a feature that is refused otherwise: {', '.join(FEATURES)}.",
        autocompletion=_features,
    ),
    strict: bool = typer.Option(False, "--strict", help="Write nothing if anything is not carried."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace what is there."),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format", help="How the table is printed."),
) -> None:
    """Write a trace's rows as another trainer takes them, and print what they could not carry.

    Exit code 0: written, whatever is in the table; 1: --strict and it is not empty, or the trace breaks a rule; 3: the
    trace or the scores are unreadable, or a state would be judged as another one.

    Example: memopd-trace export verl trace.parquet -o rollouts.parquet
    """
    from memopd_trace.export import export as run

    with progress("rows") as bar:
        task = bar.task_ids[0]
        result = run(
            format_name,
            trace,
            output,
            scores=scores,
            drop=drop,
            strict=strict,
            overwrite=overwrite,
            on_row=lambda number: bar.update(task, completed=number),
        )
    if format is OutputFormat.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        print(result.to_text(), end="")
    raise typer.Exit(result.exit_code())


def exports(
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """List the formats that `export` writes.

    Example: memopd-trace exports
    """
    from memopd_trace.export.formats import FORMATS

    if format is OutputFormat.json:
        print(json.dumps([f.to_json() for f in FORMATS], indent=1))
        return
    width = max(len(f.name) for f in FORMATS)
    for f in FORMATS:
        print(f"{f.name:<{width}}  {f.title}")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(export)
    app.command()(exports)
