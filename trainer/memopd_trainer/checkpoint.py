"""Checkpoints: `step-000010/`, a Transformers folder that also holds what a run needs to go on from it.

A checkpoint is written under a temporary name, synced and renamed, so a folder under its final name is whole.
Only the newest one keeps the optimiser's state (twice the model's size); the others remain usable as models.
"""

from __future__ import annotations

import os
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
from memopd_trace.errors import InputError, UsageError
from memopd_trace.storage import sync_folder

STATE = "trainer_state.pt"
# What may differ when a run goes on: none of these changes a step that was made.
FREE_KEYS = frozenset({"output", "trace", "scores", "held_out", "steps", "save_every", "device"})
_NAME = re.compile(r"step-(\d{6,})")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
)


def latest_checkpoint(output: Path) -> tuple[int, Path] | None:
    """(step, folder) of the newest whole checkpoint of a run, or `None`."""
    found = [(int(m[1]), f) for f in output.glob("step-*") if (m := _NAME.fullmatch(f.name)) and f.is_dir()]
    return max(found, default=None)


def save_checkpoint(
    output: Path,
    step: int,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, Any],
    *,
    tokenizer_from: str,
) -> Path:
    """Write `output/step-<step>` and return it.

    `tokenizer_from` is the student's folder (its tokenizer files are copied byte for byte) or hub name.

    Raises:
        InputError: the weights cannot be written (a full disk, say); nothing is left under the final name.
    """
    folder = output / f"step-{step:06d}"
    temporary = output / f".{folder.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with quiet_transformers():
            model.save_pretrained(temporary)
        _save_tokenizer(tokenizer_from, temporary)
        state = {"step": step, "identity": dict(identity), "optimizer": optimizer.state_dict()}
        torch.save(state, temporary / STATE)
        for file in temporary.iterdir():
            _sync(file)
        temporary.replace(folder)
        sync_folder(output)
    except (SafetensorError, RuntimeError) as error:  # what safetensors and torch.save make of a full disk
        raise InputError(f"{folder}: cannot be written: {str(error).splitlines()[0]}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for older in output.glob(f"step-*/{STATE}"):
        if older.parent != folder:
            older.unlink()
    return folder


def restore_optimizer(folder: Path, optimizer: torch.optim.Optimizer, identity: Mapping[str, Any]) -> None:
    """Load the optimiser's state of a checkpoint of the same run.

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
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{folder / STATE}: cannot be read: {line}",
            hint="train into another folder, with a checkpoint of this one as the student",
        ) from None
    for key in sorted(identity.keys() | theirs.keys()):
        if theirs.get(key) != identity.get(key):
            raise UsageError(
                f"{folder.parent}: holds a run with {key} = {theirs.get(key)!r}, not {identity.get(key)!r}",
                hint="train into another folder, or give the same value",
            )
    optimizer.load_state_dict(values)


def _save_tokenizer(source: str, folder: Path) -> None:
    if Path(source).is_dir():
        for name in _TOKENIZER_FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
    else:
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)


def _sync(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
