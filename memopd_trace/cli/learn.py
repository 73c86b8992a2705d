"""The command that trains: `train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from memopd_trace.cli.console import OutputFormat, notice, progress, require
from memopd_trace.errors import printable


def train(
    config: Path = typer.Argument(..., help="A YAML or JSON file."),
    override: list[str] | None = typer.Argument(
        None, metavar="KEY=VALUE", help="Other values for its keys; dots for nesting."
    ),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """Train a student on a trace and its scores; running it again continues an interrupted run.

    Example: memopd-trace train run.yaml lr=1e-5 ppo.clip=0.1 divergence.kind=jsd
    """
    trainer = require("memopd_trainer", "train", "this command")
    settings = trainer.load_config(config, override or ())
    if settings.scores is not None and settings.divergence.weight == 0:
        notice("the scores are not used: divergence.weight is 0")
    with progress("training", settings.steps) as bar:
        task = bar.task_ids[0]

        def show(metrics: Any) -> None:
            bar.update(task, completed=metrics.step, description=f"training, loss {metrics.loss:.4f}")

        result = trainer.train(settings, on_step=show)
    if result.layout != settings.layout:
        notice(f"layout {result.layout} instead of {settings.layout}: {result.layout_reason}")
    if result.episodes_alone:
        notice(f"{result.episodes_alone} episodes had no other in their group: their advantage is 0")
    if format is OutputFormat.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        _print_summary(result)


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(train)


def _print_summary(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if result.first is None:
        console.print(f"nothing to do: the run is at step {result.steps}")
    else:
        steps = [result.first] if result.first.step == result.last.step else [result.first, result.last]
        table = Table("", *(f"step {m.step}" for m in steps), box=None)
        for name in ("loss", "divergence", "ppo", "ratio", "clip_fraction", "entropy", "grad_norm"):
            values = [getattr(m, name) for m in steps]
            if None not in values:
                table.add_row(name.replace("_", " "), *(f"{v:.4f}" for v in values))
        for name in ("trained_tokens", "logical_tokens", "executed_tokens"):
            row = [f"{getattr(m, name):,}" for m in steps]
            table.add_row(name.replace("_", " "), *row)
        console.print(table)
    before, after = result.held_out_before, result.held_out_after
    if before is not None and after is not None:
        for name in ("reverse_kl", "forward_kl"):
            change = f"{before[name]:.4f} -> {after[name]:.4f} nats a token"
            console.print(f"held out {name.replace('_', ' ')}: {change}", soft_wrap=True)
    console.print(f"{result.groups} groups, {result.episodes} episodes, {result.seconds:.1f} s")
    checkpoint = printable(str(result.checkpoint), limit=None)
    console.print(f"checkpoint: {checkpoint}", soft_wrap=True, markup=False)
