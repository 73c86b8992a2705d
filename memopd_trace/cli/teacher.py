"""Commands that run a model over a trace: `plan` (what it will cost), `score`, `audit`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from memopd_trace.cli.console import OutputFormat, notice, progress, require
from memopd_trace.storage import TraceReader
from memopd_trace.validate import require_valid

KEPT_BYTES = 4 * 2**30
_KEPT_HELP = "Keys and values that a history beyond --max-tokens may hold, in bytes; 0 = none: prefixes are run again."


class LayoutName(StrEnum):
    """How invocations are packed."""

    tree = "tree"
    packed = "packed"
    single = "single"


class TierName(StrEnum):
    """How the teacher's states are stored."""

    exact = "exact"
    float16 = "float16"
    int8 = "int8"


class AttentionName(StrEnum):
    """An attention backend."""

    auto = "auto"
    sdpa = "sdpa"
    flex = "flex"
    flash = "flash"
    eager = "eager"


class EngineName(StrEnum):
    """Who scores."""

    local = "local"
    torchrun = "torchrun"
    ray = "ray"


HEADLINE = (  # comes first in text
    "scores", "logical_tokens", "executed_tokens", "sharing", "estimated_flops", "sampled_bytes",
    "hidden_bytes_bfloat16", "hidden_bytes_float32", "bytes_per_target",
)  # fmt: skip
_LAYOUT = "tree: shared prefixes once. packed: several invocations in a forward, nothing shared. single: one by one."
_MAX_TOKENS = "Packed tokens in a forward; a longer pack runs in passes of as many, as far as --kept-bytes reaches."
_VIEW = "The prompt to score under: recorded, persistent-history (built here), or one of --views."
_VIEWS = "The views file that holds --view."
_ENGINE = "local: this process. ray: --workers actors of a Ray cluster. torchrun: torchrun … -m memopd_scorer sets it."
_ATTENTION = (
    "auto: by device and dtype. sdpa: anywhere. flex: FlexAttention. flash: CUDA, half precision, no recorded "
    "visibility. eager: dense masks, for tests."
)


def plan(
    trace: Path = typer.Argument(..., readable=False, help="A trace file or folder."),
    max_tokens: int = typer.Option(8192, min=1, help=_MAX_TOKENS),
    layout: LayoutName = typer.Option(LayoutName.tree, help=_LAYOUT),
    teacher: Path | None = typer.Option(None, help="Local model folder; its config.json gives FLOPs and bytes."),
    dtype: str = typer.Option("float32", help="What the model will run in: float32, bfloat16, float16 or float64."),
    kept_bytes: int = typer.Option(KEPT_BYTES, min=0, help=_KEPT_HELP),
    topk: int = typer.Option(64, min=1, help="k of the signal topk."),
    view: str = typer.Option("recorded", metavar="NAME", help=_VIEW),
    views: Path | None = typer.Option(None, metavar="FILE", readable=False, help=_VIEWS),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """Say what scoring a trace will cost. Needs no torch. docs/scoring.md explains every word of the result.

    Example: memopd-trace plan runs/today.parquet --teacher models/teacher
    """
    from memopd_scorer.cost import ModelCost, bytes_of
    from memopd_scorer.deep import Deep
    from memopd_scorer.plan import plan_states
    from memopd_scorer.summary import PlanSummary
    from memopd_scorer.views import iter_states, open_views

    value_bytes = bytes_of(dtype)
    cost = None if teacher is None else ModelCost.read(teacher)
    opened = open_views(view, views)
    require_valid(trace, views=views)
    reader = TraceReader(trace)
    size = min(model.tokenizer.size for model in reader.metadata.models.values())
    summary = PlanSummary(layout.value, max_tokens, cost, value_bytes, topk=topk, size=size)
    deep = Deep(cost, value_bytes, kept_bytes) if kept_bytes else None
    states = iter_states(reader, view, opened, vocabulary=size)
    for pack in plan_states(states, layout=layout.value, max_tokens=max_tokens, deep=deep):
        summary.add(pack)
    _print(summary.to_json(), format)


def score(
    trace: Path = typer.Argument(..., readable=False, help="A trace file or folder."),
    teacher: str = typer.Option(..., help="Model folder, .gguf file or hub name."),
    output: Path = typer.Option(..., "--output", "-o", help="Scores folder; an existing one is continued."),
    signal: str = typer.Option("sampled,hidden", help="Comma-separated: sampled, topk, hidden, full."),
    topk: int = typer.Option(64, min=1, help="k of the signal topk."),
    topk_of: str | None = typer.Option(
        None, metavar="STUDENT", help="Take the best ids of this model in place of the teacher's."
    ),
    states: TierName = typer.Option(
        TierName.exact,
        help="How the signal hidden is stored; what float16 or int8 cost (KL) is measured.",
    ),
    layout: LayoutName = typer.Option(LayoutName.tree, help=_LAYOUT),
    attention: AttentionName = typer.Option(AttentionName.auto, help=_ATTENTION),
    dtype: str = typer.Option("float32", help="float32, bfloat16, float16 or float64."),
    device: str = typer.Option("cpu", help="A torch device, e.g. cuda:0."),
    max_tokens: int = typer.Option(8192, min=1, help=_MAX_TOKENS),
    kept_bytes: int = typer.Option(KEPT_BYTES, min=0, help=_KEPT_HELP),
    shard_tokens: int = typer.Option(2**18, min=1, help="Packed tokens in a shard: what a kill can lose."),
    view: str = typer.Option("recorded", metavar="NAME", help=_VIEW),
    views: Path | None = typer.Option(None, metavar="FILE", readable=False, help=_VIEWS),
    repair: bool = typer.Option(False, help="Score damaged shards again instead of refusing."),
    engine: EngineName = typer.Option(EngineName.local, help=_ENGINE),
    workers: int | None = typer.Option(None, min=1, help="Actors of --engine ray, each with a teacher; default 1."),
    gpus: float | None = typer.Option(None, min=0, help="Per worker; default: 1 on a CUDA --device, else 0."),
    device_map: str | None = typer.Option(
        None, help="A teacher larger than a device, by layers on several: auto, balanced, sequential…"
    ),
    tp_plan: str | None = typer.Option(None, help="auto: a part of every layer on each rank of torchrun."),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """Score every sampled token of a trace with a teacher; running it again continues a killed run.

    To go on, give the same options; only --repair, --engine, --workers, --gpus, --device-map, --tp-plan and --format
    may change, and --device where --attention stays the same. docs/scoring.md explains every word of the result.

    Example: memopd-trace score runs/today.parquet --teacher models/teacher -o scores/today
    """
    module = require("memopd_scorer.scoring", "score", "this command")
    with progress("scoring") as bar:
        result = module.score(
            trace,
            teacher,
            output,
            signals=tuple(s.strip() for s in signal.split(",") if s.strip()),
            topk=topk,
            student=topk_of,
            states=states.value,
            layout=layout.value,
            attention=attention.value,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            kept_bytes=kept_bytes,
            shard_tokens=shard_tokens,
            view=view,
            views=views,
            repair=repair,
            engine=engine.value,
            workers=workers,
            gpus_per_worker=gpus,
            device_map=device_map,
            tp_plan=tp_plan,
            on_notice=notice,
            on_pack=lambda done, total: bar.update(bar.task_ids[0], completed=done, total=total),
        )
    if result.plan.layout != layout.value:
        notice(f"layout single instead of {layout.value}: {result.probe}")
    _print(
        {
            "scores": str(result.folder),
            "view": view,
            "layout": result.plan.layout,
            "probe": result.probe,
            "attention": result.attention,
            "invocations": result.plan.invocations,
            "targets": result.plan.targets,
            "left_out": result.plan.left_out,
            "logical_tokens": result.plan.logical_tokens,
            "executed_tokens": result.plan.executed_tokens,
            "sharing": round(result.plan.sharing, 4),
            "deep_packs": result.plan.deep_packs,
            "shards": result.shards,
            "shards_scored_now": result.shards_scored,
            "padded_vocabulary_mass": result.padded_mass,
            "bytes_per_target": result.bytes_per_target,
            **{f"state_kl_{name}": value for name, value in (result.hidden_kl or {}).items()},
        },
        format,
    )


def audit(
    trace: Path = typer.Argument(..., readable=False, help="A trace file or folder."),
    model: str = typer.Option(..., help="The model that sampled the trace: folder, .gguf file or hub name."),
    against: str | None = typer.Option(None, help="Also score under this view: persistent-history."),
    model_id: str | None = typer.Option(None, help="Which of the trace's models it is, where there are several."),
    max_abs: float | None = typer.Option(None, min=0, help="Fail (exit 1) when any |difference| is larger, in nats."),
    max_p99: float | None = typer.Option(None, min=0, help="Fail when the 99th percentile is larger, in nats."),
    max_false_clips: float | None = typer.Option(None, min=0, max=1, help="Fail when more tokens are clipped (share)."),
    epsilon: float = typer.Option(0.2, min=0, help="A false clip: |ratio - 1| above this at identical weights."),
    worst: int = typer.Option(10, min=0, help="How many of the worst tokens to name."),
    plot: Path | None = typer.Option(None, help="Also draw the differences (.png or .svg; needs the extra plot)."),
    attention: AttentionName = typer.Option(AttentionName.auto, help=_ATTENTION),
    dtype: str = typer.Option("float32", help="float32, bfloat16, float16 or float64."),
    device: str = typer.Option("cpu", help="A torch device, e.g. cuda:0."),
    max_tokens: int = typer.Option(8192, min=1, help="Packed tokens in one forward."),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """Check that the recorded state is the true one, by recomputing the behaviour log-probabilities.

    Example: memopd-trace audit runs/today.parquet --model models/student --against persistent-history --max-abs 1e-3
    """
    module = require("memopd_scorer.auditing", "score", "this command")
    if plot is not None:
        drawing = require("memopd_scorer.audit_plot", "plot", "--plot")
        drawing.check_format(plot)
    with progress("auditing") as bar:
        report = module.audit(
            trace,
            model,
            against=against,
            model_id=model_id,
            epsilon=epsilon,
            limits=module.Limits(max_abs, max_p99, max_false_clips),
            worst=worst,
            attention=attention.value,
            dtype=dtype,
            device=device,
            max_tokens=max_tokens,
            on_pack=lambda done: bar.update(bar.task_ids[0], completed=done),
        )
    if format is OutputFormat.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        from rich.console import Console

        from memopd_scorer.audit_text import print_audit

        print_audit(report, Console())
    if plot is not None:
        drawing.plot(report, plot)
    if report.weights == "other":
        notice(f"{model}: not the weights that the trace records for '{report.model_id}' (their digests differ)")
    if report.lag:
        notice(f"the recorded log-probabilities fit best when shifted by {report.lag}: an off-by-one in the log")
    for failed in report.failed:
        option = failed["limit"].replace("_", "-")
        notice(f"failed: --{option} {failed['at_most']:g}, and it is {failed['value']:.6g}")
    if report.failed:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(plan)
    app.command()(score)
    app.command()(audit)


def _print(rows: dict[str, Any], format: OutputFormat) -> None:
    if format is OutputFormat.json:
        print(json.dumps(rows, indent=1))
        return
    width = max(len(name) for name in rows)
    first = [name for name in HEADLINE if name in rows]
    for name in dict.fromkeys([*first, *rows]):
        value = rows[name]
        if isinstance(value, float) and value >= 1e6:
            shown = f"{value:.3g}"
        else:
            shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        unit = " nats" if name.startswith("state_kl") else ""
        print(f"{name.replace('_', ' '):<{width}}  {shown}{unit}")
