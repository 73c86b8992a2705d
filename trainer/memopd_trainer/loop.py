"""The loop: rollouts of the newest policy, validated, scored, trained on; and again with what came of it.

Everything is on disk, and what is there is not made again:

    output/loop.json                  the configuration that the folder was made with
    output/iter-000/rollouts/         episodes as recorded, and those that an environment failed in
                    trace/            what validated (accepted.parquet), what did not, and why
                    scores/           the teacher's, where the training takes any
                    policy/step-…/    the next policy
                    iteration.json    what came of it, once it is finished

A stage's result has its final name only when it is whole; scoring and training go on from their own shards and
checkpoints. So a loop that was killed, however and wherever, goes on when it is run again, and ends with the same
policy as one that was not (on the CPU). Iteration i trains on rollouts of policy version i alone, and makes version
i + 1; the optimiser, the critic and the numbers of steps go on from one to the next.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from memopd_scorer.scoring import score
from memopd_scorer.teacher import load_model
from memopd_trace.disk import atomic_file, atomic_folder, exclusive, remove_leftovers
from memopd_trace.errors import CheckFailed, InputError, UsageError, first_line, printable
from memopd_trace.invocation import Sampling
from memopd_trace.scorefolder import open_scores
from memopd_trace.storage import TraceReader, TraceWriter
from memopd_trainer.checkpoint import FREE_KEYS
from memopd_trainer.config import TrainConfig
from memopd_trainer.environments.suites import open_suite
from memopd_trainer.eviction import Window
from memopd_trainer.loop_config import LoopConfig
from memopd_trainer.metrics import METRICS
from memopd_trainer.quarantine import (
    ACCEPTED,
    QUARANTINED,
    REASONS,
    BadEpisode,
    read_reasons,
    separate,
    write_reasons,
)
from memopd_trainer.recipes.drawing import draw_groups
from memopd_trainer.rollout import collect
from memopd_trainer.train import train

LOOP, ITERATION, MODEL = "loop.json", "iteration.json", "policy"
SIGNALS = {"hidden": ("sampled", "hidden"), "topk": ("sampled", "topk"), "sampled": ("sampled",)}
FREE = frozenset({"output", "iterations"})

OnStage = Callable[[int, str, str], None]


@dataclass(frozen=True, slots=True)
class LoopResult:
    """`iterations`: what is in each `iteration.json`; `made`: how many of them this call finished."""

    folder: Path
    policy: Path
    iterations: tuple[dict[str, Any], ...]
    made: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"policy": str(self.policy), "made": self.made, "iterations": list(self.iterations)}


def loop(config: LoopConfig, *, on_stage: OnStage = lambda iteration, stage, text: None) -> LoopResult:
    """Run, or go on with, the loop that `config` describes; `on_stage(iteration, stage, text)` follows what is done.

    Raises:
        UsageError: the folder holds another loop, or another process works in it; a configuration that does not fit.
        InputError: what a stage refuses: a model that cannot be loaded, say.
        CheckFailed: bad episodes (`memopd_trainer.quarantine.separate`), or a loss that is not finite.
    """
    output = Path(config.output)
    with exclusive(output, "looping in"):
        _claim(output, config)
        student, made, reports = config.student, 0, []
        for number in range(config.iterations):
            iteration = _Iteration(config, number, student, on_stage)
            report = iteration.report()
            if report is None:
                report, made = iteration.run(), made + 1
            reports.append(report)
            student = str(iteration.folder / report["policy"])
        return LoopResult(output, Path(student), tuple(reports), made)


def _claim(output: Path, config: LoopConfig) -> None:
    """Note in a new folder which loop it is of; refuse one of another."""
    remove_leftovers(output)
    mine, file = _identity(config), output / LOOP
    if not file.exists():
        with atomic_file(file) as out:
            out.write(json.dumps(mine, indent=1).encode())
        return
    try:
        theirs = dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{file}: cannot be read: {first_line(error)}", hint="loop in another folder") from None
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            raise UsageError(
                f"{output}: holds a loop with {printable(key)} = {printable(repr(theirs.get(key)))}, "
                f"not {mine.get(key)!r}",
                hint="loop in another folder, or give the same value",
            )


def _identity(config: LoopConfig) -> dict[str, Any]:
    """What must stay the same for a loop to go on, as JSON has it."""
    values = {k: v for k, v in config.model_dump(mode="json").items() if k not in FREE}
    free = FREE_KEYS - {"steps"}
    values["train"] = {k: v for k, v in config.train.items() if k not in free}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


class _Iteration:
    """One iteration, whose student is policy version `number`."""

    def __init__(self, config: LoopConfig, number: int, student: str, on_stage: OnStage) -> None:
        self.config, self.number, self.student = config, number, student
        self.folder = Path(config.output) / f"iter-{number:03d}"
        self.rollouts, self.trace = self.folder / "rollouts", self.folder / "trace"
        self.scores, self.policy = self.folder / "scores", self.folder / "policy"
        self._on_stage = on_stage

    def report(self) -> dict[str, Any] | None:
        """What came of it, if it is finished.

        Raises:
            InputError: what is there is no report.
        """
        file = self.folder / ITERATION
        if not file.exists():
            return None
        try:
            found = dict(json.loads(file.read_bytes()))
            if not (self.folder / found["policy"]).is_dir():
                raise KeyError(f"no folder '{found['policy']}'")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{file}: cannot be read: {printable(first_line(error))}") from None
        return found

    def run(self) -> dict[str, Any]:
        """Every stage that is not done yet."""
        self.folder.mkdir(exist_ok=True)
        for unfinished in (*self.folder.glob(".rollouts.*.tmp"), *self.folder.glob(".trace.*.tmp")):
            shutil.rmtree(unfinished)
        remove_leftovers(self.folder)
        if not self.rollouts.exists():
            self._tell("rollouts")
            self._collect()
        if not self.trace.exists():
            self._tell("validate")
            separate(self.rollouts, self.trace, go_on=self.config.on_bad == "quarantine")
        if self.config.has_scores and not _is_scored(self.scores):
            self._tell("score")
            self._score()
        self._tell("train")
        report = self._summary(self._train())
        with atomic_file(self.folder / ITERATION) as out:
            out.write(json.dumps(report, indent=1).encode())
        return report

    @property
    def _training(self) -> TrainConfig:
        scores = str(self.scores) if self.config.has_scores else None
        return self.config.training(self.number, self.student, str(self.trace / ACCEPTED), scores, str(self.policy))

    def _collect(self) -> None:
        how, training = self.config.rollouts, self._training
        model = load_model(self.student, dtype=training.dtype, device=training.device)
        tokenizer = AutoTokenizer.from_pretrained(self.student)
        suite = open_suite(how.environment, tokenizer, how.options)
        wanted = min(how.tasks or len(suite.tasks), len(suite.tasks))
        tasks = [suite.tasks[n] for n in draw_groups(len(suite.tasks), wanted, self.number + 1, self.config.seed)]
        bad: list[BadEpisode] = []
        with atomic_folder(self.rollouts) as made:
            collect(
                model,
                tokenizer,
                suite.make_environment,
                tasks,
                out_path=made / ACCEPTED,
                rollouts_per_task=how.per_task,
                sampling=Sampling(temperature=how.temperature, top_k=how.top_k, top_p=how.top_p),
                max_new_tokens=how.max_new_tokens,
                batch_size=how.batch_size,
                seed=_seed(self.config.seed, self.number),
                policy_version=self.number,
                model_name=MODEL,
                eviction=None if how.eviction is None else Window(how.eviction.first, how.eviction.latest),
                on_calls=lambda new: self._tell("rollouts", f"{new} more calls"),
                on_bad=bad.append if self.config.on_bad == "quarantine" else _stop,
            )
            write_reasons(made / REASONS, [each.reason for each in bad])
            if any(each.rows for each in bad):
                with TraceWriter(made / QUARANTINED, TraceReader(made / ACCEPTED).metadata) as writer:
                    for row in (row for each in bad for row in each.rows):
                        writer.write(row)

    def _score(self) -> None:
        how, training = self.config.score, self._training
        assert how is not None  # `parse_loop_config` has seen to it
        score(
            self.trace / ACCEPTED,
            how.teacher,
            self.scores,
            signals=SIGNALS[training.divergence.signal],
            topk=how.topk,
            states=how.states,
            dtype=how.dtype,
            device=how.device,
            max_tokens=how.max_tokens,
            view=training.view,
            on_pack=lambda done, total: self._tell("score", f"pack {done} of {total}"),
        )

    def _train(self) -> Path:
        return train(
            self._training, on_step=lambda m: self._tell("train", f"step {m.step}, loss {m.loss:.4f}")
        ).checkpoint

    def _summary(self, checkpoint: Path) -> dict[str, Any]:
        """Plain values that a run which was killed gives as well."""
        episodes = list(TraceReader(self.trace / ACCEPTED).iter_episodes())
        lines = [json.loads(line) for line in (self.policy / METRICS).read_bytes().splitlines()]
        steps = [line for line in lines if "loss" in line]
        held_out = [line["held_out"] for line in lines if "held_out" in line]
        parts = [e.invocations[-1].rewards or {} for e in episodes]
        return {
            "iteration": self.number,
            "policy": str(checkpoint.relative_to(self.folder)),
            "episodes": len(episodes),
            "calls": sum(map(len, episodes)),
            "quarantined": len({r.episode_id for r in read_reasons(self.trace / REASONS)}),
            "mean_reward": float(np.mean([e.episode_return or 0.0 for e in episodes])),
            "rewards": {
                name: float(np.mean([p.get(name, 0.0) for p in parts])) for name in sorted(set().union(*parts))
            },
            "loss": [steps[0]["loss"], steps[-1]["loss"]],
            "held_out": held_out[-1] if held_out else None,
        }

    def _tell(self, stage: str, text: str = "") -> None:
        self._on_stage(self.number, stage, text)


def _stop(bad: BadEpisode) -> None:
    raise CheckFailed(
        f"episode '{printable(bad.reason.episode_id)}' failed after {len(bad.rows)} calls: {bad.reason.message}",
        code=bad.reason.code,
        hint="on_bad: quarantine leaves such episodes out and goes on; --debug shows where it failed",
    )


def _is_scored(folder: Path) -> bool:
    try:
        open_scores(folder)
    except InputError as error:
        if error.code in ("E-NO-INPUT", "E-INCOMPLETE"):
            return False
        raise
    return True


def _seed(seed: int, iteration: int) -> int:
    """Rollouts of one iteration are not those of another."""
    return int(np.random.SeedSequence(seed, spawn_key=(iteration,)).generate_state(1, np.uint64)[0])
