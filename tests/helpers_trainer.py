"""A small run: rollouts of a tiny student, a tiny teacher's scores, and the configuration that joins them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_scorer import SIZE, compute_in_float64, memory_episode, metadata_for, save_model, tiny_model
from transformers import PreTrainedModel

from memopd_scorer.attention import states_at_rows
from memopd_scorer.head import head_of
from memopd_scorer.plan import plan
from memopd_scorer.scoring import score
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace.errors import InputError, TraceError
from memopd_trace.invocation import Episode, Invocation, Sampling
from memopd_trace.storage import write
from memopd_trainer.batch import load_rollouts
from memopd_trainer.config import TrainConfig, parse_config

NOISE = 0.01  # how far the student has moved from the weights that sampled the rollouts


@dataclass
class Setup:
    """Everything a run needs, on disk; `episodes` are the recorded ones."""

    root: Path
    student: Path
    teacher: Path
    trace: Path
    scores: Path
    episodes: list[Episode]
    base: dict[str, Any] = field(default_factory=dict)

    def config(self, **changes: Any) -> TrainConfig:
        """The configuration with changes; `__` stands for the dot of a nested key."""
        data: dict[str, Any] = {
            "student": str(self.student),
            "trace": str(self.trace),
            "scores": str(self.scores),
            "output": str(self.root / "run"),
            "steps": 2,
            "lr": 1e-3,
            **self.base,
        }
        for key, value in changes.items():
            place = data
            *outer, last = key.split("__")
            for part in outer:
                place[part] = dict(place.get(part) or {})
                place = place[part]
            place[last] = value
        return parse_config(data)


def make_setup(
    root: Path,
    episodes: list[Episode] | None = None,
    *,
    kind: str = "llama",
    dtype: str = "float64",
    noise: float = NOISE,
    behaviour: str = "raw",
    same_teacher: bool = False,
    features: tuple[str, ...] = (),
) -> Setup:
    """Save student and teacher, record `episodes` (default: `rewarded_groups`) with the behaviour
    log-probabilities of the student before it moved by `noise`, and score them."""
    torch_dtype = getattr(torch, dtype)
    sampler = tiny_model(kind, torch_dtype, seed=1)
    student = tiny_model(kind, torch_dtype, seed=1)
    move(student, noise)
    teacher = student if same_teacher else tiny_model(kind, torch_dtype, seed=2)
    folders = [save_model(m, root / name) for m, name in ((student, "student"), (teacher, "teacher"))]
    episodes = rewarded_groups() if episodes is None else episodes
    episodes = with_behaviour(sampler, episodes, behaviour)
    write(root / "trace.parquet", metadata_for(folders[0], features), [i for e in episodes for i in e])
    score(root / "trace.parquet", folders[1], root / "scores", dtype=dtype)
    base = {"dtype": dtype}
    return Setup(root, *folders, root / "trace.parquet", root / "scores", episodes, base)


def rewarded_groups(groups: int = 2, per_group: int = 2, calls: int = 2, seed: int = 0) -> list[Episode]:
    """Memory-rewriting rollouts; the first of each group has reward 1, the others 0."""
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        for e in range(per_group):
            rows = list(memory_episode(rng, f"g{g}e{e}", calls, group=f"group{g}"))
            rows[-1] = rows[-1].replace(reward=float(e == 0), terminated=True)
            made.append(Episode(f"g{g}e{e}", tuple(rows)))
    return made


def move(model: PreTrainedModel, noise: float, seed: int = 9) -> None:
    """Add Gaussian noise to all weights."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=g, dtype=parameter.dtype)


@torch.no_grad()
def with_behaviour(model: PreTrainedModel, episodes: list[Episode], behaviour: str = "raw") -> list[Episode]:
    """The episodes with log-probabilities of `model`: `raw` (sampled at temperature 0.7 all the same),
    `tempered` at 0.7, or `processed` at 0.7 over a kept set whose log mass is drawn at random."""
    head = head_of(model, SIZE)
    degree = 1.0 if behaviour == "raw" else 0.7
    logprobs = {}
    for pack in plan(episodes, layout="single"):
        hidden = states_at_rows(model, pack, backend="native" if pack.is_plain else "eager")
        z = head.logits(hidden).double()[torch.from_numpy(pack.target_row_M.astype(np.int64))] / degree
        ids = torch.from_numpy(pack.target_ids_M.astype(np.int64))
        state = pack.states[0]
        row = np.ma.masked_all(len(state.ids), np.float64)
        row[pack.target_output_M] = z.log_softmax(1).gather(1, ids[:, None])[:, 0].numpy()
        logprobs[state.episode_id, state.invocation_index] = row
    rng = np.random.default_rng(4)

    def recorded(invocation: Invocation) -> Invocation:
        values = logprobs[invocation.key][: len(invocation.output_ids)]
        mass = rng.uniform(-0.3, -0.05, len(values)) if behaviour == "processed" else None
        return invocation.replace(
            output_logprobs=(values if mass is None else values - mass).astype(np.float32),
            output_kept_logmass=None if mass is None else np.ma.masked_array(mass.astype(np.float32)),
            logprob_kind=behaviour,
            policy_version=0,
            sampling=Sampling(temperature=0.7, top_p=0.9 if behaviour == "processed" else None),
        )

    return [Episode(e.episode_id, tuple(recorded(i) for i in e)) for e in episodes]


def exact(folder: Path | str) -> LoadedModel:
    """A model that computes in float64 throughout (Transformers' RMS norms round to float32 otherwise)."""
    loaded = load(folder, dtype="float64")
    compute_in_float64(loaded.model)
    return loaded


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def equal_weights(a: Path, b: Path) -> bool:
    """Bit for bit."""
    left, right = weights_of(a), weights_of(b)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def code_of(trace: Path, scores: Path | None, *, policy: bool = True) -> str:
    """The code with which rollouts are refused."""
    with pytest.raises(TraceError) as caught:
        load_rollouts(trace, scores, policy=policy)
    assert isinstance(caught.value, InputError) and caught.value.code is not None
    return caught.value.code
