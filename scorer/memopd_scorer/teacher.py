"""Load a causal LM to score, audit or train with, and probe what it can do before anything is scored.

Shape legend: R prediction rows, D model width.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from memopd_scorer.attention import Choice, choose, iter_states_at_rows
from memopd_scorer.cost import ModelCost
from memopd_scorer.deep import Deep
from memopd_scorer.head import Head, head_of
from memopd_scorer.placement import DeviceMap, load_arguments, put, runs_on
from memopd_scorer.plan import Layout, Pack
from memopd_scorer.probing import Capability, probe
from memopd_scorer.states import State
from memopd_trace.errors import InputError, UsageError, first_line
from memopd_trace.metadata import Tokenizer, TraceMetadata
from memopd_trace.record.fingerprint import tokenizer_metadata

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A causal LM that was probed: a teacher to score with, a student to audit or train."""

    name: str
    model: PreTrainedModel
    head: Head
    tokenizer: Tokenizer
    attention: Choice
    capability: Capability

    def backends(self, *, with_visibility: bool) -> str:
        """What runs a trace's packs, as the scores' metadata states it: `flash+sdpa` is flash, and sdpa for the packs
        with recorded visibility, if there are any (`with_visibility`)."""
        if self.capability.layout == "single":
            return "native"
        used = [self.attention.for_pack(is_causal=True)]
        if with_visibility:
            used.append(self.attention.for_pack(is_causal=False))
        return "+".join(dict.fromkeys(used))

    def describe_attention(self) -> str:
        """The backends, and why they."""
        reason = self.attention.reason if self.capability.layout == "tree" else "one invocation at a time"
        return f"{self.backends(with_visibility=True)} ({reason})"

    def states(self, pack: Pack) -> Tensor:
        """hidden_RD at a pack's prediction rows, in the model's dtype; differentiable. For what is raised, see
        `iter_states`."""
        (hidden_RD,) = self.iter_states(pack, None)
        return hidden_RD

    def iter_states(self, pack: Pack, pass_tokens: int | None) -> Iterator[Tensor]:
        """hidden_RD part by part, run in passes of at most `pass_tokens` tokens (`None` = one pass). A model that is
        exact in no tree runs a pack in one.

        Raises:
            UsageError: the model is in training mode (dropout would be on).
            InputError: `E-MODEL-UNSUPPORTED` for a pack that the model cannot run exactly.
        """
        if any(m.training for m in self.model.modules()):
            raise UsageError(f"{self.name}: the model is in training mode", hint="call model.eval() first")
        self._check_reach(pack)
        if self.capability.layout == "tree":
            backend = self.attention.for_pack(pack.is_causal)
            return iter_states_at_rows(self.model, pack, backend=backend, pass_tokens=pass_tokens)
        if not pack.is_plain:
            raise InputError(
                f"{self.name} cannot run recorded positions or visibility: {self.capability.reason}",
                code="E-MODEL-UNSUPPORTED",
                hint="these rows need a model with plain attention",
            )
        return iter_states_at_rows(self.model, pack, backend="native")

    def layout(self, wanted: Layout) -> Layout:
        """The layout that will be used: the wanted one, or `single` where the model is exact in no other."""
        return wanted if self.capability.layout == "tree" else "single"

    def deep(self, max_bytes: int) -> Deep | None:
        """What deep packs may take on this model; `None` where it runs none, or 0 bytes are allowed."""
        cost = cost_of(self.model.config)
        if self.capability.layout == "single" or not max_bytes or cost is None:
            return None
        return Deep(cost, self.head.weight_VD.element_size(), max_bytes)

    def _check_reach(self, pack: Pack) -> None:
        """Refuse positions and ids that the model was not made for."""
        config = self.model.config.get_text_config()
        limits = {
            "position": (pack.positions_T, getattr(config, "max_position_embeddings", None)),
            "token id": (pack.token_ids_T, self.model.get_input_embeddings().weight.shape[0]),
        }
        for what, (values, limit) in limits.items():
            if limit is not None and len(values) and int(values.max()) >= limit:
                state = next(s for s in pack.states if len(s) and _reaches(s, what, limit))
                raise InputError(
                    f"{self.name} has {limit} {what}s, episode '{state.episode_id}', invocation "
                    f"{state.invocation_index} needs {what} {int(values.max())}",
                    code="E-MODEL-UNSUPPORTED",
                    hint="another model, or a larger limit in its config.json if it was trained for it",
                )


def _reaches(state: State, what: str, limit: int) -> bool:
    if what == "token id":
        return int(state.ids.max()) >= limit
    return (len(state) - 1 if state.positions is None else int(state.positions.max())) >= limit


def load(
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    device: str = "cpu",
    backend: str = "auto",
    device_map: DeviceMap | None = None,
    tp_plan: str | None = None,
) -> LoadedModel:
    """Load, probe and describe a model (a local folder, a `.gguf` file or a hub name).

    One that is larger than a device: see `memopd_scorer.placement`. With `tp_plan` all ranks call this.

    Raises:
        InputError: `E-MODEL-LOAD`, `E-MODEL-UNSUPPORTED` or `E-TOKENIZER-MISMATCH`.
        UsageError: an unknown dtype, backend, device or plan.
    """
    model = load_model(path, dtype=dtype, device=device, device_map=device_map, tp_plan=tp_plan)
    choices = choose(backend, runs_on(model.get_input_embeddings()), model.dtype)
    tokenizer = load_tokenizer(path, vocab_size=model.get_input_embeddings().weight.shape[0])
    head = head_of(model, tokenizer.size)
    for choice in choices:
        capability = probe(model, head, backend=choice.backend)
        if capability.layout == "tree":
            break
    return LoadedModel(Path(path).name, model, head, tokenizer, choice, capability)


def cost_of(config: PreTrainedConfig) -> ModelCost | None:
    """The cost of a model, read from its folder as `memopd-trace plan` does; `None` where its config says none."""
    try:
        if config.name_or_path:
            return ModelCost.read(Path(config.name_or_path))
    except InputError:  # a hub name, a .gguf file: no folder
        pass
    try:
        return ModelCost.of(config.to_dict())
    except (ArithmeticError, LookupError, ValueError, TypeError, AttributeError):
        return None


def check_trace(metadata: TraceMetadata, model: LoadedModel) -> None:
    """A model reads a trace's ids only if its tokenizer is the very one they come from, and they are all it needs.

    Raises:
        InputError: `E-TOKENIZER-MISMATCH`, naming both fingerprints; `E-MODEL-UNSUPPORTED` for a trace with media.
    """
    for model_id, described in metadata.models.items():
        theirs = described.tokenizer
        if theirs.fingerprint != model.tokenizer.fingerprint or theirs.size != model.tokenizer.size:
            raise InputError(
                f"'{model.name}' has tokenizer {model.tokenizer.fingerprint[:16]} ({model.tokenizer.size} ids), the "
                f"trace's model '{model_id}' has {theirs.fingerprint[:16]} ({theirs.size} ids)",
                code="E-TOKENIZER-MISMATCH",
                hint="the ids would mean other text to this model",
            )
    if "media" in metadata.required_features:
        raise InputError(
            "the trace holds media, which are not fed to models yet: only text states can be run exactly",
            code="E-MODEL-UNSUPPORTED",
        )


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    device: str = "cpu",
    device_map: DeviceMap | None = None,
    tp_plan: str | None = None,
) -> PreTrainedModel:
    """A causal LM in eval mode; weights come from safetensors (or GGUF) only, and no remote code is run.

    Raises:
        InputError: `E-MODEL-LOAD` naming the path and the first line of the cause.
        UsageError: an unknown dtype, device or plan.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype '{dtype}'", hint=f"one of {', '.join(DTYPES)}")
    placed = load_arguments(device_map, tp_plan)
    with _load_errors(path):
        where, extra = _location(path)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **extra,
            **placed,
        )
        _check_complete(loaded)
    return put(model, device, device_map, tp_plan).eval()


def _check_complete(loaded: dict[str, Any]) -> None:
    """Weights that the file lacks would be random, and weights that the config does not know would be dropped."""
    for kind, what in (
        ("missing_keys", "the file has no weights for"),
        ("mismatched_keys", "the file has weights of another shape for"),
        ("unexpected_keys", "the config has no place for"),
    ):
        keys = sorted(str(k[0] if isinstance(k, tuple) else k) for k in loaded.get(kind) or ())
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ValueError(f"{what} '{keys[0]}'{more}")


def load_tokenizer(path: str | os.PathLike[str], *, vocab_size: int) -> Tokenizer:
    """What a model folder's tokenizer is, for comparison with the trace's.

    Raises:
        InputError: `E-MODEL-LOAD` when there is none.
    """
    return tokenizer_metadata(tokenizer_of(path), vocab_size=vocab_size)


def tokenizer_of(path: str | os.PathLike[str]) -> Any:
    """The tokenizer of a model folder, a `.gguf` file or a hub name.

    Raises:
        InputError: `E-MODEL-LOAD` when there is none.
    """
    with _load_errors(path):
        where, extra = _location(path)
        return AutoTokenizer.from_pretrained(where, trust_remote_code=False, **extra)


def _location(path: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """(where, extra arguments) for from_pretrained; a path that is not there is not taken for a hub name."""
    text = os.fspath(path)
    if text.endswith(".gguf"):
        return str(Path(text).parent), {"gguf_file": Path(text).name}
    if not Path(text).exists() and not _is_hub_name(text):
        raise FileNotFoundError(f"no such folder: {text}")
    return text, {}


def _is_hub_name(text: str) -> bool:
    """Whether it is nothing here, and nothing that only a path looks like."""
    looks_local = text.startswith((".", "/", "~")) or text.count("/") != 1 or Path(text).parent.is_dir()
    return not Path(text).exists() and not looks_local


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep Transformers' and the hub's notices and progress bars off the terminal; what goes wrong is raised all the
    same."""
    verbosity, hub_verbosity = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity(logging.CRITICAL)  # it warns of every attempt to reach the hub
    try:
        with redirect_stderr(io.StringIO()):  # some of its bars know no switch
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        transformers_logging.enable_progress_bar()


@contextmanager
def _load_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """One clear line for whatever Transformers raises while loading."""
    try:
        with quiet_transformers():
            yield
    except Exception as error:  # parsers of files that nobody vouches for: whatever they raise, the model is at fault
        where = "no such folder is here, and from the hub: " if _is_hub_name(os.fspath(path)) else ""
        raise InputError(
            f"model '{os.fspath(path)}' cannot be loaded: {where}{first_line(error)}",
            code="E-MODEL-LOAD",
            hint="give a Transformers folder with safetensors and tokenizer files",
        ) from None
