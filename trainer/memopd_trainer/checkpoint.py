"""Checkpoints: `step-000010/`, a Transformers folder that also holds what a run needs to go on from it.

A checkpoint is written under a temporary name, synced and renamed, so a folder under its final name is whole.
Its `checkpoint.json` lists the SHA-256 of each file, and a run goes on only from files that are what was written.
Only the newest one keeps the optimiser's state (twice the model's size); the others remain usable as models.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from memopd_scorer.teacher import quiet_transformers
from memopd_trace.disk import atomic_folder
from memopd_trace.errors import CheckFailed, InputError, UsageError, first_line, printable
from memopd_trace.places import file_sha256
from memopd_trainer.critic import ValueHead

STATE = "trainer_state.pt"
CRITIC = "critic.safetensors"
MANIFEST = "checkpoint.json"
ANOTHER_FOLDER = "train into another folder, with an older checkpoint as the student, or start again"
MOMENTS = ("exp_avg", "exp_avg_sq")
# What may differ when a run goes on: none of these changes a step that was made.
FREE_KEYS = frozenset(
    {"output", "trace", "scores", "held_out", "steps", "save_every", "device", "gradient_checkpointing"}
)
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_NAME = re.compile(r"step-([0-9]{6,})")


def latest_checkpoint(output: Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest checkpoint of a run, every file of it checked, or `None`.

    Raises:
        InputError: a folder has a checkpoint's name but is none, or a file of the newest one is not what was written.
    """
    found = [(int(m[1]), f) for f in output.glob("step-*") if (m := _NAME.fullmatch(f.name))]
    for step, folder in found:
        if folder.name != checkpoint_name(step) or not (folder / MANIFEST).is_file():
            raise InputError(
                f"{folder}: is no checkpoint (it has no {MANIFEST})", hint="move it out of the output folder"
            )
    newest = max(found, default=None)
    if newest is not None:
        _verify(newest[1], newest[0])
    return newest


def checkpoint_at(folder: Path) -> int:
    """The step of a checkpoint in any place, every file of it checked.

    Raises:
        InputError: it is none, or a file is not what was written.
    """
    match = _NAME.fullmatch(folder.name)
    if match is None or not (folder / MANIFEST).is_file():
        raise InputError(f"{folder}: is no checkpoint", hint="continues=true goes on from a checkpoint of another run")
    _verify(folder, int(match[1]))
    return int(match[1])


def write_manifest(folder: Path, step: int) -> None:
    """List what is in a checkpoint's folder: path -> hex SHA-256."""
    files = {name: file_sha256(folder / name) for name in sorted(_files(folder))}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1) + "\n")


def check_finite(model: nn.Module, step: int) -> None:
    """Raises:
    CheckFailed: a parameter holds a value that is no finite number.
    """
    for name, parameter in model.named_parameters():
        if not parameter.detach().isfinite().all():
            raise CheckFailed(
                f"step {step}: the weights are not finite ('{name}')",
                hint="no checkpoint was written for it; a lower lr or weight_decay may help",
            )


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Save a model; who may read its weights is who may read its other files (safetensors lets only the owner)."""
    with quiet_transformers():
        model.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode & 0o777)


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
    critic: ValueHead | None = None,
) -> Path:
    """Write `output/step-<step>` and return it.

    `student` is the folder or hub name that the run began with: what is there beside weights (tokenizer, templates)
    goes into each checkpoint.

    Raises:
        InputError: the weights cannot be written (a full disk, say); nothing is left under the final name.
        CheckFailed: they are not finite; nothing is written.
    """
    check_finite(model, step)
    if critic is not None:
        check_finite(critic, step)
    folder = output / checkpoint_name(step)
    try:
        with atomic_folder(folder) as temporary:
            save_weights(model, temporary)
            if Path(student).is_dir():
                copy_all_but_weights(Path(student), temporary)
            else:
                AutoTokenizer.from_pretrained(student, trust_remote_code=False).save_pretrained(temporary)
            if critic is not None:
                save_file(critic.state_dict(), temporary / CRITIC)
            state = {"step": step, "identity": dict(identity), "optimizer": optimizer.state_dict()}
            torch.save(state | {"shapes": _shapes(optimizer)}, temporary / STATE)
            write_manifest(temporary, step)
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
        if file.is_file() and not file.name.endswith((*WEIGHT_FILES, MANIFEST)) and not target.exists():
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def restore_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, identity: Mapping[str, Any] | None, data: Mapping[str, str | None]
) -> None:
    """Load the optimiser's state of a checkpoint of the same run; `identity` `None` = of any run. `data` gives the
    place of what an identity key is the digest of.

    Raises:
        InputError: the state is missing or damaged, or of a model with other parameters.
        UsageError: the checkpoint is of a run with another configuration or other data, naming what differs.
    """
    file = folder / STATE
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        theirs, shapes, moments = state["identity"], state["shapes"], state["optimizer"]["state"]
        json.dumps(theirs, sort_keys=True)  # plain values under plain keys, or it raises
        if not isinstance(theirs, dict) or not isinstance(moments, dict):
            raise TypeError("its parts are no mappings")
        same = shapes == _shapes(optimizer)
    except Exception as error:  # a parser of untrusted bytes: whatever it raises, the file is at fault
        raise InputError(f"{file}: cannot be read: {first_line(error)}", hint=ANOTHER_FOLDER) from None
    if identity is None:
        identity = theirs
    keys = identity.keys() | theirs.keys()
    for key in sorted(keys, key=lambda key: (key != "recipe", key)):  # other keys differ because the recipe does
        there, here = theirs.get(key), identity.get(key)
        if there != here and key in data:
            raise UsageError(
                f"{folder.parent}: holds a run on other data than {data[key]} (the {key} was {there}, now {here})",
                hint="train into another folder, or on the same data",
            )
        if there != here:
            raise UsageError(
                f"{folder.parent}: holds a run with {printable(key)} = {printable(repr(there))}, not {here!r}",
                hint="train into another folder, or give the same value",
            )
    if not same or not _moments_fit(moments, shapes):
        raise InputError(f"{file}: is not of the model beside it", hint=ANOTHER_FOLDER)
    # the groups are made of the configuration, which is the same
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})


def load_critic(folder: Path, critic: ValueHead) -> None:
    """Load the value head of a checkpoint, whose files were verified.

    Raises:
        InputError: it is of another width.
    """
    try:
        critic.load_state_dict(load_file(folder / CRITIC))
    except (SafetensorError, OSError, RuntimeError) as error:
        raise InputError(f"{folder / CRITIC}: cannot be read: {first_line(error)}", hint=ANOTHER_FOLDER) from None


def _moments_fit(moments: Mapping[Any, Any], shapes: list[list[int]]) -> bool:
    """Whether AdamW can go on from them. A parameter that never had a gradient has none."""
    for index, entry in moments.items():
        if type(index) is not int or not 0 <= index < len(shapes):
            return False
        if not isinstance(entry, dict) or entry.keys() != {"step", *MOMENTS}:
            return False
        for name, value in entry.items():
            wanted = shapes[index] if name in MOMENTS else []
            if not isinstance(value, torch.Tensor) or list(value.shape) != wanted:
                return False
            if value.layout != torch.strided or value.device.type != "cpu" or not value.is_floating_point():
                return False
            if value.isnan().any() or (name != "exp_avg" and (value < 0).any()):
                return False
    return True


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The shape of each parameter, in the order the optimiser counts them in."""
    return [list(p.shape) for group in optimizer.param_groups for p in group["params"]]


def _verify(folder: Path, step: int) -> None:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files, written = dict(manifest["files"]), manifest["step"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{folder / MANIFEST}: cannot be read: {first_line(error)}", hint=ANOTHER_FOLDER) from None
    if written != step:
        raise InputError(
            f"{folder}: was written at step {printable(repr(written))}", hint="give the folder its own name"
        )
    there = _files(folder)
    for name in sorted(there - files.keys()):
        raise InputError(f"{folder / name}: was not written with the checkpoint", hint="move it elsewhere")
    for name in sorted(files):
        if name not in there:
            raise InputError(f"{folder}: its file '{printable(name)}' is missing", hint=ANOTHER_FOLDER)
        digest = file_sha256(folder / name)
        if digest != files[name]:
            raise InputError(
                f"{folder / name}: is not what was written: SHA-256 {digest[:16]}…, "
                f"{MANIFEST} has {printable(str(files[name])[:16])}…",
                hint=ANOTHER_FOLDER,
            )


def _files(folder: Path) -> set[str]:
    """Paths of all files of a checkpoint, relative to its folder, but for the list of them."""
    return {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} - {MANIFEST}


def checkpoint_name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:06d}"
