"""The configuration of a training run: one YAML or JSON file, and `key=value` overrides.

Every key is declared here with its default; a key that is not is refused with the nearest one that is.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from memopd_scorer.plan import Layout
from memopd_trace.errors import InputError, UsageError, printable
from memopd_trace.metadata import first_error
from memopd_trace.schema import RECORDED
from memopd_trainer.divergences import DivergenceKind, Kind, SampledKind
from memopd_trainer.recipes import preset, with_defaults
from memopd_trainer.recipes.sections import (
    Count,
    OneShotConfig,
    Place,
    PruneConfig,
    ReopdConfig,
    Section,
    TcodConfig,
)

SectionType = TypeVar("SectionType", bound=BaseModel)
MAX_CONFIG_BYTES = 2**20
# What PyYAML raises for text that it does not take: its own error, or whatever a converter of a scalar met.
_YAML_FAULTS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


Beta = Annotated[float, Field(ge=0, lt=1)]
TeacherSignal = Literal["hidden", "topk", "sampled"]
StudentView = Literal["recorded", "persistent-history"]


class DivergenceConfig(Section):
    """The distillation term; `weight` is lambda, 0 = no teacher.

    `signal` is what of the scores it is taken from: the teacher's states, which give the whole vocabulary, its top-k
    with the rest as one outcome, or the sampled token alone. `importance_clip` c weighs each token with
    min(pi / behaviour, c), without gradient, for tokens that an older policy sampled; null = weight 1. The kind
    `advantage` adds weight * (log teacher - log behaviour) to the advantage of the clipped policy term.
    """

    signal: TeacherSignal = "hidden"
    kind: Kind = "reverse_kl"
    beta: float = Field(0.5, ge=0, le=1)
    weight: float = Field(1.0, ge=0)
    importance_clip: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _kind_fits_signal(self) -> DivergenceConfig:
        kinds = get_args(SampledKind if self.signal == "sampled" else DivergenceKind)
        if self.kind == "advantage" and self.importance_clip is not None:
            raise ValueError("the kind 'advantage' is clipped with the policy term (ppo.clip), not by importance_clip")
        if self.kind not in kinds:
            raise ValueError(f"kind '{self.kind}' is not taken from the signal '{self.signal}': {', '.join(kinds)}")
        return self


class CriticConfig(Section):
    """The value head and how it gives credit (`memopd_trainer.critic`). `lr` is its own; `weight` is that of its loss;
    with `shared` that loss also trains the student's layers."""

    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    lr: float = Field(1e-5, ge=0)
    weight: float = Field(1.0, gt=0)
    shared: bool = False


class PolicyConfig(Section):
    """The clipped policy term; `weight` 0 = no reward is used. Ratios are clipped to 1 - `clip` and 1 + `clip_high`
    (null = `clip`).

    `advantage`: `group` compares the returns of a group's episodes, `gae` takes a critic's values token by token.
    `normalise_std` divides by the standard deviation: of the group's returns, or of the step's advantages.
    """

    weight: float = Field(1.0, ge=0)
    clip: float = Field(0.2, gt=0, lt=1)
    clip_high: float | None = Field(None, gt=0)
    advantage: Literal["group", "gae"] = "group"
    normalise_std: bool = False
    critic: CriticConfig = CriticConfig()

    @property
    def has_critic(self) -> bool:
        """Whether a value head is trained."""
        return self.weight > 0 and self.advantage == "gae"


class HeldOut(Section):
    """Rollouts that are only measured, before and after, the student under the recorded states; `view` null = that
    of the configuration."""

    trace: Place
    scores: Place
    view: str | None = None


class TrainConfig(Section):
    """One run. `student` is a local folder or a hub name; paths are relative to the working directory.

    `recipe` names where the values that are not given come from (`memopd_trainer.recipes`), before the defaults here.
    `view` is what the scores must be of: `recorded`, or the name given to `score --view`. `student_view` is what the
    student itself is run under, its ratio to the behaviour included; `persistent-history` is the flattened history, as
    a comparison. `leave_out_unscored` trains only rows that have a score, as where a view is not of every row; else one
    without is refused. `tcod`, `reopd`, `prune_opd` and `one_shot` are off where they are null.
    `groups_per_step` null = every group of the trace in each step. `layout` is what the scorer's plan uses;
    `tree` and `packed` turn to `single` where the student's architecture cannot be packed. `dtype` is that of
    the weights: with bfloat16 a learning rate of 1e-6 is lost in rounding. `gradient_checkpointing` keeps the inputs
    of layers alone and runs them again in the backward pass: the same bits for less memory. `save_every` null = at
    the end.

    Learning rates rise over `warmup_steps`, and with `decay_steps` fall from there to 0 at that step, as `lr_decay`
    says; null = they stay. `betas` are AdamW's. `continues`: the student is a checkpoint of a run on other data, whose
    optimiser, critic and step numbers go on.
    `policy_version` is that of the student; null = the newest of the trace. Tokens that a policy more than
    `max_staleness` versions older sampled are refused, unless `divergence.importance_clip` weighs them; null = any.
    """

    recipe: str | None = None
    student: Place
    trace: Place
    scores: Place | None = None
    view: str = RECORDED
    student_view: StudentView = "recorded"
    leave_out_unscored: bool = False
    output: Place
    steps: Count
    groups_per_step: Count | None = None
    lr: float = Field(1e-6, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0, lt=2**63)
    decay_steps: Count | None = None
    lr_decay: Literal["linear", "cosine"] = "cosine"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    grad_clip: float = Field(1.0, gt=0)
    divergence: DivergenceConfig = DivergenceConfig()
    ppo: PolicyConfig = PolicyConfig()
    max_tokens: Count = 8192
    gradient_checkpointing: bool = False
    layout: Layout = "tree"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "cpu"
    seed: int = Field(0, ge=0, lt=2**64)
    save_every: Count | None = 50
    held_out: HeldOut | None = None
    continues: bool = False
    policy_version: int | None = Field(None, ge=0, lt=2**63)
    max_staleness: int | None = Field(None, ge=0, lt=2**63)
    tcod: TcodConfig | None = None
    reopd: ReopdConfig | None = None
    prune_opd: PruneConfig | None = None
    one_shot: OneShotConfig | None = None

    @property
    def needs_behaviour(self) -> bool:
        """Whether a term takes the ratio to the policy that sampled."""
        taught = self.divergence.weight > 0
        weighed = self.divergence.importance_clip is not None
        return self.ppo.weight > 0 or (taught and (weighed or self.divergence.kind == "advantage"))

    @property
    def allowed_staleness(self) -> int | None:
        """Versions that a trained token may be behind the student; `None` = any."""
        weighed = self.divergence.weight > 0 and self.divergence.importance_clip is not None
        return None if weighed else self.max_staleness

    @model_validator(mode="after")
    def _has_a_signal(self) -> TrainConfig:
        if self.divergence.weight > 0 and self.scores is None:
            raise ValueError("divergence.weight is above 0 but there are no scores (give them, or set the weight to 0)")
        if self.divergence.weight == 0 and self.ppo.weight == 0:
            raise ValueError("divergence.weight and ppo.weight are both 0: nothing to train on")
        return self

    def lr_factor(self, step: int) -> float:
        """What learning rates are multiplied by at step 1, 2…"""
        warm = min(1.0, step / max(1, self.warmup_steps))
        if self.decay_steps is None:
            return warm
        done = min(1.0, max(0, step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        return warm * ((1 - done) if self.lr_decay == "linear" else (1 + math.cos(math.pi * done)) / 2)

    @model_validator(mode="after")
    def _decay_follows_warm_up(self) -> TrainConfig:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps {self.decay_steps} end before warmup_steps {self.warmup_steps} are over")
        return self

    @model_validator(mode="after")
    def _sections_fit(self) -> TrainConfig:
        if self.tcod is not None and self.reopd is not None:
            raise ValueError("tcod and reopd both say which turns are trained: give one (null turns a recipe's off)")
        if self.prune_opd is not None and (self.divergence.weight == 0 or self.divergence.signal != "hidden"):
            raise ValueError("prune_opd compares with the teacher's states: divergence.signal hidden, weight above 0")
        if self.one_shot is not None and self.groups_per_step is not None:
            raise ValueError("one_shot draws rollouts of one task (one_shot.rollouts), groups_per_step is of no use")
        return self


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML or JSON file and apply `key=value` overrides (dots for nesting, values in YAML).

    Raises:
        InputError: the file cannot be read or is not a mapping.
        UsageError: an unknown key, a value that does not fit, an override that is not `key=value`.
    """
    return parse_config(read_settings(path, overrides), where=os.fspath(path))


def read_settings(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The keys and values of a file with its overrides, unchecked.

    Raises:
        InputError, UsageError: as `load_config`, but for keys and values.
    """
    file = Path(path)
    try:
        with file.open("rb") as source:
            raw = source.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"{file}: cannot be read: {_one_line(error)}") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise InputError(f"{file}: too large, a configuration has at most {MAX_CONFIG_BYTES} bytes")
    try:
        data = _read_yaml(raw.decode())
    except _YAML_FAULTS as error:
        raise InputError(f"{file}: not a YAML or JSON file: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise InputError(f"{file}: expected keys and values, got {type(data).__name__}")
    for override in overrides:
        _apply(data, override)
    return data


def parse_config(data: Mapping[str, Any], *, where: str = "configuration") -> TrainConfig:
    """Check a mapping; what its `recipe` says stands in for what it does not say itself.

    Raises:
        UsageError: an unknown key or recipe (naming the nearest known one), missing ones, or a value that does not fit.
    """
    refuse_unknown(data, TrainConfig, "", where)
    if data.get("recipe") is not None:
        data = with_defaults(data, preset(data["recipe"]))
    return parse_as(TrainConfig, data, where, hint="the README shows a whole configuration")


def parse_as(model: type[SectionType], data: Mapping[str, Any], where: str, hint: str) -> SectionType:
    """Check a mapping against a section; `hint` helps where keys are missing.

    Raises:
        UsageError: an unknown key (naming the nearest one), missing ones, or a value that does not fit.
    """
    refuse_unknown(data, model, "", where)
    missing = [name for name, field in model.model_fields.items() if field.is_required() and name not in data]
    if missing:
        raise UsageError(f"{where}: missing {', '.join(missing)}", hint=hint)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{where}: {_first_fault(error)}") from None
    except (TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{where}: a value does not fit: {_one_line(error)}") from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    shown = printable(override)
    if not equals or not all(parts):
        raise UsageError(f"'{shown}' is not key=value", hint="for example lr=1e-5 or ppo.clip=0.1")
    try:
        value = _read_yaml(text)
    except _YAML_FAULTS as error:
        raise UsageError(f"'{shown}': the value is not YAML: {_one_line(error)}") from None
    place: Any = data
    for part in parts[:-1]:
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise UsageError(f"'{shown}': '{printable(part)}' is a value, it has no keys below it")
    place[parts[-1]] = value


def refuse_unknown(data: Mapping[str, Any], model: type[BaseModel], prefix: str, where: str) -> None:
    """Raises:
    UsageError: a key that `model` does not have, naming the nearest one; `prefix` is what leads to it.
    """
    known = list(model.model_fields)
    for key, value in data.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean '{prefix}{near[0]}'?" if near else f"known: {', '.join(known)}"
            raise UsageError(f"{where}: unknown key '{printable(f'{prefix}{key}')}'", hint=hint)
        section = _section_of(model.model_fields[key].annotation)
        if section is not None and isinstance(value, Mapping):
            refuse_unknown(value, section, f"{prefix}{key}.", where)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a section (`Section`, or `Section | None`)."""
    kinds = (annotation, *get_args(annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


class _Loader(yaml.SafeLoader):
    """Safe YAML without aliases: ten levels of them make a value too large to look at."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "a configuration has no aliases (*name)", mark)
        return super().compose_node(parent, index)


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)


def _first_fault(error: ValidationError) -> str:
    """`first_error`, also where the value cannot be shown: an integer of too many digits, a list nested too deep."""
    try:
        return first_error(error)
    except (ValueError, RecursionError):
        fault = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg'].lower()}"


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()), 400)
