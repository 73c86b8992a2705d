"""Checkpoints: `step-000010/`, a Transformers folder that also holds what a run needs to go on from it.

A checkpoint is written under a temporary name, synced and renamed, so a folder under its final name is whole.
Only the newest one keeps the optimiser's state (twice the model's size); the others remain usable as models.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel

from memopd_scorer.teacher import quiet_transformers
from memopd_trace.disk import atomic_folder
from memopd_trace.errors import InputError, UsageError, first_line

STATE = "trainer_state.pt"
# What may differ when a run goes on: none of these changes a step that was made.
FREE_KEYS = frozenset({"output", "trace", "scores", "held_out", "steps", "save_every", "device"})
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_NAME = re.compile(r"step-(\d{6,})")


def latest_checkpoint(output: Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest whole checkpoint of a run, or `None`."""
    found = [(int(m[1]), f) for f in output.glob("step-*") if (m := _NAME.fullmatch(f.name)) and f.is_dir()]
    return max(found, default=None)


def remove_unfinished(output: Path) -> None:
    """Remove what a process that was killed while it wrote a checkpoint left; the caller holds the folder."""
    for folder in output.glob(".step-*.tmp"):
        shutil.rmtree(folder)


def save_checkpoint(
    output: Path,
    step: int,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, Any],
    *,
    student: str,
) -> Path:
    """Write `output/step-<step>` and return it.

    `student` is the folder or hub name that the run began with: what is there beside weights (tokenizer, templates)
    goes into each checkpoint.

    Raises:
        InputError: the weights cannot be written (a full disk, say); nothing is left under the final name.
    """
    folder = output / f"step-{step:06d}"
    try:
        with atomic_folder(folder) as temporary:
            with quiet_transformers():
                model.save_pretrained(temporary)
            if Path(student).is_dir():
                copy_all_but_weights(Path(student), temporary)
            else:
                AutoTokenizer.from_pretrained(student, trust_remote_code=False).save_pretrained(temporary)
            state = {"step": step, "identity": dict(identity), "optimizer": optimizer.state_dict()}
            torch.save(state, temporary / STATE)
    except (SafetensorError, RuntimeError) as error:  # what safetensors and torch.save make of a full disk
        raise InputError(f"{folder}: cannot be written: {first_line(error)}") from None
    for older in output.glob(f"step-*/{STATE}"):
        if older.parent != folder:
            older.unlink()
    return folder


def copy_all_but_weights(model_dir: Path, folder: Path) -> None:
    """Copy the files of a model folder byte for byte, but for weights and what is in `folder` already.

    Which files make up a tokenizer differs from model to model, so no list of names decides.
    """
    for file in (*model_dir.iterdir(), *model_dir.glob("additional_chat_templates/*")):
        target = folder / file.relative_to(model_dir)
        if file.is_file() and not file.name.endswith(WEIGHT_FILES) and not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def restore_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, identity: Mapping[str, Any], data: Mapping[str, str | None]
) -> None:
    """Load the optimiser's state of a checkpoint of the same run. `data` gives the place of what an identity key is the
    digest of.

    Raises:
        InputError: the state is missing or damaged.
        UsageError: the checkpoint is of a run with another configuration or other data, naming what differs.
    """
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        theirs, values = state["identity"], state["optimizer"]
    except (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise InputError(
            f"{folder / STATE}: cannot be read: {first_line(error)}",
            hint="train into another folder, with a checkpoint of this one as the student",
        ) from None
    for key in sorted(identity.keys() | theirs.keys()):
        there, here = theirs.get(key), identity.get(key)
        if there != here and key in data:
            raise UsageError(
                f"{folder.parent}: holds a run on other data than {data[key]} (the {key} was {there}, now {here})",
                hint="train into another folder, or on the same data",
            )
        if there != here:
            raise UsageError(
                f"{folder.parent}: holds a run with {key} = {there!r}, not {here!r}",
                hint="train into another folder, or give the same value",
            )
    optimizer.load_state_dict(values)
