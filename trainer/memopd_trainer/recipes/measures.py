"""What recipes measure beside the loss, once a step; it goes to `metrics.jsonl` under `measured`.

tcod        turns             k of the step
prune_opd   overlap           mean share of common ids, teacher_weight: mean w + w_base
            effective_length  mean tokens of an output whose w is above 0
            length, length_misses   the controller's budget for the next rollouts, and its misses in a row
one_shot    teacher_gap       d: mean |log p_student - log p_teacher| of the trained tokens, nats
            absorption        (d_before - d) / d_before, d_before that of the step before
            coverage          share of the reference's clusters reached so far (with `reference`)
            reached           which these are
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memopd_trace.errors import UsageError
from memopd_trainer.batch import Group, Rollouts
from memopd_trainer.config import TrainConfig
from memopd_trainer.metrics import StepSums
from memopd_trainer.recipes.coverage import Coverage
from memopd_trainer.recipes.drawing import chosen_turns, curriculum_depth
from memopd_trainer.recipes.pruning import Length, next_length


class Measures:
    """What is measured, and what of it the next step goes on from."""

    def __init__(self, config: TrainConfig, rollouts: Rollouts) -> None:
        self.config, self.rollouts = config, rollouts
        self.length = None if config.prune_opd is None else Length(config.prune_opd.length.initial)
        self.gap: float | None = None
        self.coverage: Coverage | None = None
        if config.one_shot is not None and config.one_shot.reference is not None:
            if rollouts.scores is None:
                raise UsageError("one_shot.reference: state coverage is that of scores, and there are none")
            self.coverage = Coverage(config.one_shot, rollouts.scores, config.seed)

    def resume(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Go on after the steps of which `lines` are the metrics."""
        measured: Mapping[str, Any] = next((line["measured"] for line in reversed(lines) if line.get("measured")), {})
        if self.length is not None and "length" in measured:
            self.length = Length(int(measured["length"]), int(measured["length_misses"]))
        self.gap = measured.get("teacher_gap")
        if self.coverage is not None:
            self.coverage.reached = set(measured.get("reached", ()))

    def measure(self, step: int, groups: Sequence[Group], sums: StepSums) -> dict[str, Any]:
        """The values of a step that was made."""
        found: dict[str, Any] = {}
        if self.config.tcod is not None:
            found["turns"] = curriculum_depth(step, self.config.tcod)
        if self.config.prune_opd is not None and self.length is not None:
            assert sums.overlap is not None and sums.teacher_weight is not None
            self.length = next_length(self.length, sums.effective, self.config.prune_opd.length)
            mean = sum(sums.effective) / len(sums.effective)
            found |= {"overlap": sums.overlap, "teacher_weight": sums.teacher_weight, "effective_length": mean}
            found |= {"length": self.length.tokens, "length_misses": self.length.misses}
        if self.config.one_shot is not None and sums.teacher_gap is not None:
            found["teacher_gap"] = sums.teacher_gap
            if self.gap:
                found["absorption"] = (self.gap - sums.teacher_gap) / self.gap
            self.gap = sums.teacher_gap
        if self.coverage is not None:
            chosen = chosen_turns(groups, step, self.config)
            calls = (i for group in groups for e in group for i in e)
            found["coverage"] = self.coverage.add(i for i in calls if chosen is None or i.key in chosen)
            found["reached"] = sorted(self.coverage.reached)
        return found
