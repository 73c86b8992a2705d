"""Commands that bring other frameworks' logs in: `convert`, `formats`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path

import typer

from memopd_trace.cli.console import OutputFormat, progress, require


class LogprobKind(StrEnum):
    """Under which distribution log-probabilities were taken."""

    raw = "raw"
    tempered = "tempered"
    processed = "processed"


def _names() -> list[str]:
    """For a shell that completes a line."""
    listed = require("memopd_trace.convert.formats", "convert", "this command")
    return [f.name for f in listed.FORMATS]


def convert(
    format_name: str = typer.Argument(
        ..., metavar="FORMAT", help="A name that `formats` prints.", autocompletion=_names
    ),
    inputs: list[Path] = typer.Argument(..., metavar="INPUT...", readable=False, help="Files, folders or globs."),
    output: Path = typer.Option(..., "--output", "-o", readable=False, help="The trace to write."),
    tokenizer: Path | None = typer.Option(
        None, metavar="DIR", readable=False, help="The model's tokenizer: text becomes ids by it."
    ),
    model_id: str | None = typer.Option(None, metavar="ID", help="The model of all calls, whatever the log calls it."),
    logprob_kind: LogprobKind | None = typer.Option(
        None, help="What the log-probabilities are, where the log does not say."
    ),
    strict: bool = typer.Option(False, "--strict", help="Stop at the first broken record, and write nothing."),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format", help="How the loss table is printed."),
) -> None:
    """Convert another framework's logs into a trace, and print what was lost on the way.

    Exit code 0: all converted or left out for a reason; 1: broken records (the rest is converted), or the trace breaks
    a rule and is kept as OUT.invalid; 2: the command is wrong, or OUT exists; 3: an input is missing, or nothing in it
    could be converted.

    Example: memopd-trace convert nemo-gym rollouts.jsonl -o trace.parquet

    Of text: memopd-trace convert openai requests.jsonl -o trace.parquet --tokenizer models/student
    """
    run = require("memopd_trace.convert", "convert", "this command")
    with progress("records") as bar:
        task = bar.task_ids[0]
        result = run.convert(
            format_name,
            inputs,
            output,
            tokenizer=tokenizer,
            model_id=model_id,
            logprob_kind=None if logprob_kind is None else logprob_kind.value,
            strict=strict,
            on_record=lambda number: bar.update(task, completed=number),
        )
    if format is OutputFormat.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        print(result.to_text(), end="")
    raise typer.Exit(result.exit_code())


def formats(
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """List the formats that `convert` takes, and whether their logs hold the engine's ids (`ids`), sometimes do
    (`some ids`), or hold text, which needs `--tokenizer` (`text`).

    Example: memopd-trace formats
    """
    listed = require("memopd_trace.convert.formats", "convert", "this command").FORMATS
    if format is OutputFormat.json:
        print(json.dumps([f.to_json() for f in listed], indent=1))
        return
    width = max(len(f.name) for f in listed)
    for f in listed:
        print(f"{f.name:<{width}}  {f.exactness:<8}  {f.title}")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(convert)
    app.command()(formats)
