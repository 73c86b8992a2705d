"""The settings of recipes that have some of their own; each is a section of the configuration, off where it is null."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _usable_path(value: str) -> str:
    """Refuse what no system call takes."""
    if "\0" in value:
        raise ValueError("a path holds no NUL character")
    os.fsencode(value)  # a lone surrogate raises
    return value


Place = Annotated[str, AfterValidator(_usable_path)]
Count = Annotated[int, Field(gt=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: no other keys, no change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TcodConfig(Section):
    """Train on k = `k_start` + floor(n / `eta`) turns of each episode, n = 0, 1… the steps made: the first k (`f2b`)
    or the last k (`b2f`). A turn is an invocation with a trained token."""

    order: Literal["f2b", "b2f"] = "f2b"
    k_start: Count = 1
    eta: Count = 2


class ReopdConfig(Section):
    """Train on one turn of each episode a step, turn t = 0, 1… drawn with a probability proportional to `kappa`^t."""

    kappa: float = Field(0.6, gt=0, le=1)


class LengthConfig(Section):
    """The controller of the next rollouts' length, in tokens (`memopd_trainer.recipes.pruning.next_length`)."""

    initial: Count = 2048
    minimum: Count = 1024
    maximum: Count = 12288
    step: Count = 100
    margin: int = Field(100, ge=0, lt=2**63)
    hit_ratio: Share = 0.1
    patience: Count = 3

    @model_validator(mode="after")
    def _in_order(self) -> LengthConfig:
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError("minimum <= initial <= maximum does not hold")
        return self


class PruneConfig(Section):
    """Weigh the teacher's term of each token by how student and teacher agreed up to it
    (`memopd_trainer.recipes.pruning`): on the share of their `k` likeliest ids that they have in common."""

    k: Count = 16
    gamma: Share = 0.7
    w_drop: Share = 0.01
    w_base: float = Field(0.5, ge=0)
    length: LengthConfig = LengthConfig()


class OneShotConfig(Section):
    """Train on one task: the group or task id `task` (null = the only one there is), `rollouts` of it a step (null =
    all). With `reference`, the scores folder of a run over many tasks, state coverage is measured against `clusters`
    clusters of its states, reduced to `components` principal components."""

    task: str | None = None
    rollouts: Count | None = 64
    reference: Place | None = None
    clusters: Count = 200
    components: Count = 64
