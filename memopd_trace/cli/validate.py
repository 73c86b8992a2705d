"""The command that judges traces: `validate`."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path

import typer

from memopd_trace.cli.console import ESCAPE, Profile, notice, settings
from memopd_trace.disk import atomic_file, is_node, regular_target
from memopd_trace.errors import UsageError
from memopd_trace.limits import MEMORY, memory_cap
from memopd_trace.report.locations import current_folder
from memopd_trace.settings import MAX_MEMORY, Config, find_config, load_config
from memopd_trace.validate import MAX_FINDINGS, validate


class FailOn(StrEnum):
    """The least severity that fails."""

    error = "error"
    warning = "warning"


class ReportFormat(StrEnum):
    """How the report is written."""

    text = "text"
    json = "json"
    junit = "junit"
    sarif = "sarif"
    github = "github"


def _configure(ctx: typer.Context, path: Path | None) -> Path | None:
    """Let a configuration give the defaults of this call; eager, so that it is there before they are asked for."""
    if ctx.resilient_parsing:  # a shell completing a line
        return path
    config = None
    if path is not None:
        config = load_config(path)
    elif not ctx.params.get("no_config") and (here := current_folder()) is not None:
        config = find_config(here)
    if config is not None:
        ctx.default_map = config.options
    ctx.obj = config
    return path


def check(
    ctx: typer.Context,
    paths: list[Path] = typer.Argument(..., metavar="PATH...", readable=False, help="Traces: files or folders."),
    profile: Profile = typer.Option(Profile.core, help="What must be present; what is wrong is found under each."),
    select: list[str] = typer.Option([], metavar="CODE", help="Judge only these codes (a glob is fine)."),
    ignore: list[str] = typer.Option([], metavar="CODE", help="Do not judge these codes (a glob is fine)."),
    fail_on: FailOn = typer.Option(FailOn.error, help="The least severity that gives exit code 1."),
    max_findings: int = typer.Option(MAX_FINDINGS, min=0, help="Findings shown per code; counts stay true."),
    format: ReportFormat = typer.Option(ReportFormat.text, "--format"),
    output: Path | None = typer.Option(None, "--output", "-o", readable=False, help="Write the report to this file."),
    tokenizer: Path | None = typer.Option(
        None, metavar="DIR", readable=False, help="Folder with a tokenizer.json, for the rules that read text."
    ),
    scores: list[Path] = typer.Option(
        [], metavar="DIR", readable=False, help="A scores folder of the trace (of two, the second is compared)."
    ),
    views: Path | None = typer.Option(None, metavar="FILE", readable=False, help="A views file of the trace."),
    sample: int | None = typer.Option(
        None, min=1, metavar="N", help="Look at N episodes of each trace; what needs all rows is not run."
    ),
    jobs: int | None = typer.Option(
        None, "--jobs", "-j", min=1, metavar="N", help="Traces checked at once. Default: by processors and sizes."
    ),
    exit_zero: bool = typer.Option(False, "--exit-zero", help="Exit 0 in spite of findings (not of a refusal)."),
    no_config: bool = typer.Option(False, "--no-config", is_eager=True, help="Look for no configuration."),
    config: Path | None = typer.Option(
        None, is_eager=True, callback=_configure, help="Configuration file. Default: the nearest one, upward."
    ),
    max_memory: float = typer.Option(
        MEMORY / 2**30,
        min=0,
        max=MAX_MEMORY,
        metavar="GIB",
        help="Memory that the check may take; an input that needs more is refused.",
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No notices on stderr."),
) -> None:
    r"""Check traces against the rules of a profile.

    Exit code 0: no findings; 1: findings; 2: a wrong call or configuration; 3: an input is missing, unreadable or
    refused.

    Defaults come from the table \[validate] of memopd-trace.toml, else \[tool.memopd-trace.validate] of pyproject.toml.

    Example: memopd-trace validate run/ --profile train --format json -o report.json
    """
    if no_config and config is not None:
        raise UsageError("--config and --no-config exclude each other")
    settings.quiet = settings.quiet or quiet
    found: Config | None = ctx.obj
    if found is not None:
        notice(f"configured by {found.path}")
    if output is not None:
        _check_output(output, [*paths, *scores, *([views] if views is not None else [])])
    with memory_cap(int(max_memory * 2**30)):
        report = validate(
            paths,
            profile.value,
            select=select,
            ignore=ignore,
            max_findings=max_findings,
            per_file_ignores=found.per_file_ignores if found else None,
            tokenizer=tokenizer,
            views=views,
            scores=scores,
            sample=sample,
            jobs=jobs,
        )
    text = report.render(format.value, fail_on=fail_on.value)
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


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("validate")(check)
