"""Load a causal LM to score, audit or train with, and probe what it can do before anything is scored.

Shape legend: R prediction rows, D model width.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from memopd_scorer.attention import Backend, Choice, choose, states_at_rows
from memopd_scorer.plan import Layout, Pack
from memopd_scorer.probing import Capability, probe
from memopd_scorer.signals import Head, head_of
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

    @property
    def backend(self) -> Backend:
        """The attention backend of packs without recorded visibility."""
        return self.attention.backend if self.capability.layout == "tree" else "native"

    def describe_attention(self) -> str:
        """The backend, and why it."""
        reason = self.attention.reason if self.capability.layout == "tree" else "one invocation at a time"
        return f"{self.backend} ({reason})"

    def states(self, pack: Pack) -> Tensor:
        """hidden_RD at a pack's prediction rows, in the model's dtype; differentiable.

        Raises:
            UsageError: the model is in training mode (dropout would be on).
            InputError: `E-MODEL-UNSUPPORTED` for a pack that the model cannot run exactly.
        """
        if any(m.training for m in self.model.modules()):
            raise UsageError(f"{self.name}: the model is in training mode", hint="call model.eval() first")
        self._check_reach(pack)
        if self.capability.layout == "tree":
            is_causal = all(s.causal for s in pack.spans)
            return states_at_rows(self.model, pack, backend=self.attention.for_pack(is_causal))
        if not pack.is_plain:
            raise InputError(
                f"{self.name} cannot run recorded positions or visibility: {self.capability.reason}",
                code="E-MODEL-UNSUPPORTED",
                hint="these rows need a model with plain attention",
            )
        return states_at_rows(self.model, pack, backend="native")

    def layout(self, wanted: Layout) -> Layout:
        """The layout that will be used: the wanted one, or `single` where the model is exact in no other."""
        return wanted if self.capability.layout == "tree" else "single"

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
) -> LoadedModel:
    """Load, probe and describe a model (a local folder, a `.gguf` file or a hub name).

    Raises:
        InputError: `E-MODEL-LOAD`, `E-MODEL-UNSUPPORTED` or `E-TOKENIZER-MISMATCH`.
        UsageError: an unknown dtype, backend or device.
    """
    model = load_model(path, dtype=dtype, device=device)
    choices = choose(backend, model.device, model.dtype)
    tokenizer = load_tokenizer(path, vocab_size=model.get_input_embeddings().weight.shape[0])
    head = head_of(model, tokenizer.size)
    for choice in choices:
        capability = probe(model, head, backend=choice.backend)
        if capability.layout == "tree":
            break
    return LoadedModel(Path(path).name, model, head, tokenizer, choice, capability)


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


def load_model(path: str | os.PathLike[str], *, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """A causal LM in eval mode; weights come from safetensors (or GGUF) only, and no remote code is run.

    Raises:
        InputError: `E-MODEL-LOAD` naming the path and the first line of the cause.
        UsageError: an unknown dtype or device.
    """
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype '{dtype}'", hint=f"one of {', '.join(DTYPES)}")
    with _load_errors(path):
        where, extra = _location(path)
        model, loaded = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **extra,
        )
        _check_complete(loaded)
    try:
        return model.to(torch.device(device)).eval()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device '{device}': {first_line(error)}") from None


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
    with _load_errors(path):
        where, extra = _location(path)
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **extra)
    return tokenizer_metadata(tokenizer, vocab_size=vocab_size)


def _location(path: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """(where, extra arguments) for from_pretrained; a path that is not there is not taken for a hub name."""
    text = os.fspath(path)
    if text.endswith(".gguf"):
        return str(Path(text).parent), {"gguf_file": Path(text).name}
    looks_local = text.startswith((".", "/", "~")) or text.count("/") != 1 or Path(text).parent.is_dir()
    if not Path(text).exists() and looks_local:
        raise FileNotFoundError(f"no such folder: {text}")
    return text, {}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep Transformers' notices and progress bars off the terminal; what goes wrong is raised all the same."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # some of its bars know no switch
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


@contextmanager
def _load_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """One clear line for whatever Transformers raises while loading."""
    try:
        with quiet_transformers():
            yield
    except Exception as error:  # parsers of files that nobody vouches for: whatever they raise, the model is at fault
        raise InputError(
            f"model '{os.fspath(path)}' cannot be loaded: {first_line(error)}",
            code="E-MODEL-LOAD",
            hint="give a Transformers folder with safetensors and tokenizer files",
        ) from None
