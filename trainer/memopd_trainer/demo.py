"""The whole pipeline on a small real model, on a CPU: rollouts, validate, score, audit, train, measure again.

A memory agent reads short documents part by part and rewrites one memory a call. The teacher is SmolLM2-135M-Instruct,
the student the same model with half of its layers. What is left in the folder is what a real run leaves: models,
traces, scores, checkpoints, and `report.json` with the numbers of the table. Run again, it keeps what is
there (models, rollouts, finished shards, checkpoints) and measures the audit anew.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoConfig, AutoTokenizer

from memopd_scorer.auditing import audit
from memopd_scorer.scoring import score
from memopd_scorer.teacher import load, load_model
from memopd_trace.disk import atomic_file
from memopd_trace.errors import InputError, UsageError, first_line
from memopd_trace.invocation import Sampling
from memopd_trace.storage import TraceReader
from memopd_trace.validate import require_valid
from memopd_trace.views import PERSISTENT_HISTORY
from memopd_trainer.config import parse_config
from memopd_trainer.environments.reading import ReadingEnvironment, Split, reading_tasks
from memopd_trainer.models import drop_layers, export_gguf, find_demo_gguf
from memopd_trainer.rollout import collect
from memopd_trainer.train import train

TRAIN_TASKS, HELD_OUT_TASKS = 6, 3
TRAIN_ROLLOUTS, HELD_OUT_ROLLOUTS = 4, 2
MAX_NEW_TOKENS = 40
STEPS = 6
LEARNING_RATE = 1e-4
MAX_TOKENS = 2048
SEED = 0
REPORT = "report.json"

OnStage = Callable[[str, float | None], None]


@dataclass(slots=True)
class DemoReport:
    """The demo's numbers: `rows` in the order of the table (name -> value), `seconds` a stage."""

    folder: Path
    rows: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, on_stage: OnStage) -> Iterator[None]:
        """Time one stage, and tell of its begin (`None` seconds) and its end."""
        on_stage(name, None)
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began
        on_stage(name, self.seconds[name])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"report_version": "1", "rows": self.rows, "seconds": self.seconds}


def demo(
    folder: str | os.PathLike[str],
    *,
    gguf: str | os.PathLike[str] | None = None,
    on_stage: OnStage = lambda name, seconds: None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> DemoReport:
    """Run every stage and write `report.json`; `gguf` is another instruct model to start from.

    Raises:
        MissingExtraError: the demo's model is not installed.
        InputError, UsageError: what the stages refuse; a recorded trace that is not valid, say.
    """
    out = Path(folder)
    report = DemoReport(out)
    teacher_dir, student_dir = out / "models" / "teacher", out / "models" / "student"
    with report.stage("models", on_stage):
        if gguf is not None and teacher_dir.exists():
            raise UsageError(f"{teacher_dir}: a model is there already", hint="take another folder for another model")
        if not teacher_dir.exists():
            on_progress("unpacking the model")
            export_gguf(gguf or find_demo_gguf(), teacher_dir)
        if not student_dir.exists():
            _check_model(teacher_dir)
            drop_layers(teacher_dir, _layer_count(teacher_dir) // 2, student_dir)
        for model_dir in (teacher_dir, student_dir):
            _check_model(model_dir)
    with report.stage("rollouts", on_stage):
        rollouts = {split: _rollouts(out, student_dir, split, on_progress) for split in ("train", "held_out")}
    with report.stage("validate", on_stage):
        for path in rollouts.values():
            require_valid(path, "train")
    with report.stage("score", on_stage):
        teacher = load(teacher_dir)
        for split, path in rollouts.items():
            result = score(
                path,
                teacher,
                out / "scores" / split,
                signals=("sampled", "topk", "hidden"),
                max_tokens=MAX_TOKENS,
                on_pack=lambda done, total, split=split: on_progress(f"scoring {split}: pack {done} of {total}"),  # type: ignore[misc]
            )
            if split == "train":
                _tell_plan(report, result.plan, path)
        del teacher
    with report.stage("audit", on_stage):
        on_progress("recomputing the behaviour log-probabilities")
        _tell_audit(report, rollouts["train"], student_dir)
    with report.stage("train", on_stage):
        _train(report, out, student_dir, on_progress)
    with atomic_file(out / REPORT) as sink:
        sink.write(json.dumps(report.to_json(), indent=1).encode())
    return report


def _check_model(folder: Path) -> None:
    """Refuse a folder that something else than the demo has made or emptied."""
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: holds no model (no config.json)", hint="remove the folder and run the demo again")


def _layer_count(folder: Path) -> int:
    try:
        return int(AutoConfig.from_pretrained(folder).num_hidden_layers)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: cannot be loaded: {first_line(error)}", code="E-MODEL-LOAD") from None


def _rollouts(out: Path, student_dir: Path, split: Split, on_progress: Callable[[str], None]) -> Path:
    """The student's rollouts on a split's questions, recorded."""
    path = out / f"{split}.parquet"
    if path.exists():
        return path
    training = split == "train"
    tasks = reading_tasks(split)[: TRAIN_TASKS if training else HELD_OUT_TASKS]
    count = TRAIN_ROLLOUTS if training else HELD_OUT_ROLLOUTS
    tokenizer = AutoTokenizer.from_pretrained(student_dir)
    calls = [0]

    def tell(new: int) -> None:
        calls[0] += new
        on_progress(f"rollouts {split}: {calls[0]} calls")

    collect(
        load_model(student_dir),
        tokenizer,
        lambda: ReadingEnvironment(tokenizer),
        tasks,
        out_path=path,
        rollouts_per_task=count,
        sampling=Sampling(temperature=1.0),
        max_new_tokens=MAX_NEW_TOKENS,
        seed=SEED,
        model_name="student",
        on_calls=tell,
    )
    return path


def _tell_plan(report: DemoReport, plan: Any, path: Path) -> None:
    returns = [e.episode_return or 0.0 for e in TraceReader(path).iter_episodes()]
    report.rows.update(
        {
            "rollouts": len(returns),
            "model calls": plan.invocations,
            "mean reward (token F1)": sum(returns) / len(returns),
            "tokens logical": plan.logical_tokens,
            "tokens executed": plan.executed_tokens,
            "sharing (logical / executed)": plan.sharing,
            "sampled tokens scored": plan.targets,
        }
    )


def _tell_audit(report: DemoReport, trace: Path, student_dir: Path) -> None:
    found = audit(trace, student_dir, against=PERSISTENT_HISTORY, max_tokens=MAX_TOKENS)
    assert found.against is not None
    for name, c in (("recorded state", found.recorded), ("persistent history", found.against)):
        report.rows[f"audit, {name}: max |Δ logprob|"] = c.max_abs
        report.rows[f"audit, {name}: p99 |Δ logprob|"] = c.p99_abs
        report.rows[f"audit, {name}: false-clip rate"] = c.false_clip_rate
    report.rows["top-1 flips under persistent history"] = found.top1_flips


def _train(report: DemoReport, out: Path, student_dir: Path, on_progress: Callable[[str], None]) -> None:
    settings = {
        "student": str(student_dir),
        "trace": str(out / "train.parquet"),
        "scores": str(out / "scores" / "train"),
        "output": str(out / "policy"),
        "steps": STEPS,
        "groups_per_step": 2,
        "lr": LEARNING_RATE,
        "max_tokens": MAX_TOKENS,
        "held_out": {"trace": str(out / "held_out.parquet"), "scores": str(out / "scores" / "held_out")},
    }
    with atomic_file(out / "train.yaml") as sink:  # `memopd-trace train demo-out/train.yaml steps=12` goes on from here
        sink.write(yaml.safe_dump(settings, sort_keys=False).encode())
    config = parse_config(settings)
    result = train(config, on_step=lambda m: on_progress(f"training: step {m.step} of {STEPS}, loss {m.loss:.3f}"))
    for name in ("reverse_kl", "forward_kl"):
        label = name.replace("_kl", " KL")
        assert result.held_out_before is not None and result.held_out_after is not None
        report.rows[f"held-out {label} before (nats a token)"] = result.held_out_before[name]
        report.rows[f"held-out {label} after {STEPS} steps"] = result.held_out_after[name]
    report.rows["checkpoint"] = str(result.checkpoint)
