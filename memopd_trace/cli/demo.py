"""The command that shows everything at once: `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from memopd_trace.cli.console import notice, require, settings, stderr
from memopd_trace.errors import printable


def demo(
    output: Path = typer.Option(Path("demo-out"), "--output", "-o", help="Folder for everything the demo makes."),
    model: Path | None = typer.Option(None, help="Another instruct model to start from (.gguf)."),
) -> None:
    """Run the whole pipeline on a small real model, on the CPU.

    Rollouts of a memory agent, trace, validate, score, audit, train, report. Running it again goes on where it stopped.

    Example: memopd-trace demo -o demo-out
    """
    from rich.console import Console
    from rich.table import Table

    module = require("memopd_trainer.demo", "demo", "the demo")
    status = stderr().status("models")
    with status:
        report = module.demo(
            output,
            gguf=model,
            on_stage=_tell,
            on_progress=lambda text: status.update(_plain(text)) if not settings.quiet else None,
        )
    table = Table("what", "value", box=None, title="memopd-trace demo", title_justify="left")
    for name, value in report.rows.items():
        table.add_row(_plain(name), _plain(_shown(value)))
    for name, seconds in report.seconds.items():
        table.add_row(f"seconds: {name}", f"{seconds:.1f}")
    table.add_row("seconds: all", f"{sum(report.seconds.values()):.1f}")
    Console().print(table)
    notice(f"next: look at the calls: memopd-trace show {output / 'train.parquet'}")
    notice(f"      or train on:       memopd-trace train {output / 'train.yaml'} steps=8")


def _tell(stage: str, seconds: float | None) -> None:
    notice(f"{stage:<9} …" if seconds is None else f"{stage:<9} {seconds:6.1f} s")


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(demo)


def _plain(text: str) -> str:
    """Text that may hold a path or a trace's string, for a console that reads markup."""
    from rich.markup import escape

    return escape(printable(text, limit=None))


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
    return str(value)
