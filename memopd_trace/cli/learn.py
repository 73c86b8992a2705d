"""The commands that train: `train`, the list of its `recipes`, a view that one of them needs: `peers`, and `loop`."""

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

    `recipe: NAME` in the file takes its defaults from a method of the field: `memopd-trace recipes` lists them.

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


def recipes(
    name: str | None = typer.Argument(None, help="One of them: print its values."),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """List the recipes of `train`, or print the values that one of them gives a configuration.

    Example: memopd-trace recipes tcod
    """
    module = require("memopd_trainer.recipes", "train", "this command")
    if name is not None:
        print(
            json.dumps(module.preset(name), indent=1) if format is OutputFormat.json else module.source(name).rstrip()
        )
        return
    found = module.recipes()
    if format is OutputFormat.json:
        print(json.dumps(found, indent=1))
        return
    width = max(map(len, found))
    for key, title in found.items():
        print(f"{key:<{width}}  {title}")


def peers(
    trace: Path = typer.Argument(..., readable=False, help="Rollouts; those of one task are compared."),
    output: Path = typer.Option(..., "--output", "-o", help="The views file, .parquet or .arrow."),
    model: Path = typer.Option(..., help="A folder with the tokenizer of the trace."),
    threshold: float = typer.Option(1.0, help="A rollout with this return or more is a success."),
) -> None:
    """Write the view `successful-peer`: each prompt with what a successful rollout of the same task did.

    The recipe `sdpo` trains on scores under it; calls without such a peer have no view.

    Example: memopd-trace peers train.parquet --model models/student -o peers.parquet
    """
    module = require("memopd_trainer.recipes.peers", "train", "this command")
    tokenizer = require("memopd_scorer.teacher", "train", "this command").tokenizer_of(model)
    written, alone = module.write_peer_view(trace, output, tokenizer, threshold=threshold)
    print(f"{written} calls with a successful peer, {alone} without")


def loop(
    config: Path = typer.Argument(..., help="A YAML or JSON file."),
    override: list[str] | None = typer.Argument(
        None, metavar="KEY=VALUE", help="Other values for its keys; dots for nesting."
    ),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """Collect rollouts, validate, score and train, again and again; running it again goes on where it stopped.

    Example: memopd-trace loop loop.yaml iterations=20 rollouts.per_task=8
    """
    settings = require("memopd_trainer.loop_config", "train", "this command").load_loop_config(config, override or ())
    module = require("memopd_trainer.loop", "train", "this command")
    if settings.score is not None and not settings.has_scores:
        notice("the teacher is not used: train.divergence.weight is 0")
    with progress("looping", settings.iterations) as bar:
        task = bar.task_ids[0]

        def show(iteration: int, stage: str, text: str) -> None:
            bar.update(task, completed=iteration, description=f"iteration {iteration}: {stage} {text}")

        result = module.loop(settings, on_stage=show)
    if format is OutputFormat.json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        _print_iterations(result)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(train)
    app.command()(recipes)
    app.command()(peers)
    app.command()(loop)


def _print_iterations(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("iteration", "episodes", "quarantined", "calls", "mean reward", "loss", box=None)
    for each in result.iterations:
        counts = (str(each[name]) for name in ("iteration", "episodes", "quarantined", "calls"))
        first, last = each["loss"]
        table.add_row(*counts, f"{each['mean_reward']:.4f}", f"{first:.4f} -> {last:.4f}")
    console.print(table)
    console.print(f"{result.made} iterations made")
    console.print(f"policy: {printable(str(result.policy), limit=None)}", soft_wrap=True, markup=False)


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
