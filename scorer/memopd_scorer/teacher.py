"""Load a causal LM to score, audit or train with, and find out what it can do before anything is scored.

The probe runs three short forked random sequences through the packed backend and, alone, through the model's own
attention. A model that differs beyond rounding (recurrent or convolutional state, position tricks, capacity
across samples) is scored one invocation at a time, which is always right, and the reason is said. A head that
is not the linear layer it seems to be is refused.

Shape legend: R prediction rows, M targets, D model width, V vocabulary.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from memopd_scorer.attention import Backend, states_at_rows
from memopd_scorer.plan import Layout, Pack, plan_states
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
# Largest |difference| of states, relative to the largest |state|, that rounding explains.
PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
_PROBE_WINDOW = 8
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Capability:
    """What the probe found: the best layout the model is exact in, and why not `tree`.

    `error` and `tolerance` are relative to the largest state; `error` is `None` when nothing could be run.
    """

    layout: Literal["tree", "single"]
    reason: str
    error: float | None
    tolerance: float


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A causal LM that was probed: a teacher to score with, a student to audit or train."""

    name: str
    model: PreTrainedModel
    head: Head
    tokenizer: Tokenizer
    backend: Backend
    capability: Capability

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
            return states_at_rows(self.model, pack, backend=self.backend)
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
    backend: Literal["auto", "sdpa", "eager"] = "auto",
) -> LoadedModel:
    """Load, probe and describe a model (a local folder, a `.gguf` file or a hub name).

    Raises:
        InputError: `E-MODEL-LOAD`, `E-MODEL-UNSUPPORTED` or `E-TOKENIZER-MISMATCH`.
        UsageError: an unknown dtype, backend or device.
    """
    if backend not in ("auto", "sdpa", "eager"):
        raise UsageError(f"unknown attention backend '{backend}'", hint="one of auto, sdpa, eager")
    model = load_model(path, dtype=dtype, device=device)
    tokenizer = load_tokenizer(path, vocab_size=model.get_input_embeddings().weight.shape[0])
    head = head_of(model, tokenizer.size)
    chosen: Literal["sdpa", "eager"] = "sdpa" if backend == "auto" else backend
    return LoadedModel(Path(path).name, model, head, tokenizer, chosen, probe(model, head, backend=chosen))


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


@torch.no_grad()
def probe(model: PreTrainedModel, head: Head, *, backend: Literal["sdpa", "eager"] = "sdpa") -> Capability:
    """Compare forked random sequences packed and alone, and the head with the model's own logits.

    Sliding windows are shrunk while it runs, so that short sequences cross them.

    Raises:
        InputError: `E-MODEL-UNSUPPORTED` when the head does not give the model's logits.
    """
    dtype = next(model.parameters()).dtype
    tolerance = PROBE_TOLERANCE[dtype]
    reach = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 48
    unit = min(12, reach // 4)
    if unit < 3:
        return Capability("single", f"its {reach} positions are too few to be probed", None, tolerance)
    with _small_windows(model):
        states = _probe_states(head.size, unit)
        alone = [states_at_rows(model, p, backend="native") for p in plan_states([states], layout="single")]
        _check_head(model, head, states[0], alone[0], tolerance)
        reason = _static_reason(model)
        if reason is not None:
            return Capability("single", reason, None, tolerance)
        (pack,) = plan_states([states])
        (other,) = plan_states([_with_other_sibling(states, head.size, unit)])
        try:
            packed = states_at_rows(model, pack, backend=backend)
            changed = states_at_rows(model, other, backend=backend)
        except (InputError, TypeError, RuntimeError, ValueError) as fault:
            return Capability("single", first_line(fault), None, tolerance)
    scale = max(float(a.abs().max()) for a in alone)
    order = {s.invocation_index: i for i, s in enumerate(states)}
    error = max(
        float((packed[_targets(pack, s)] - alone[order[state.invocation_index]]).abs().max()) / scale
        for s, state in enumerate(pack.states)
    )
    untouched = next(s for s, state in enumerate(pack.states) if state.invocation_index == 1)
    leak = float((packed[_targets(pack, untouched)] - changed[_targets(other, untouched)]).abs().max()) / scale
    if not error <= tolerance:  # NaN is not within any tolerance
        return Capability("single", f"packed and alone differ by {error:.1e} (relative)", error, tolerance)
    if not leak <= 8 * torch.finfo(dtype).eps:
        return Capability("single", f"a branch changes by {leak:.1e} with its sibling", error, tolerance)
    return Capability("tree", "packed equals alone", error, tolerance)


def _targets(pack: Pack, state: int) -> Tensor:
    """Rows (indices into rows_R) of one state's targets."""
    return torch.from_numpy(pack.target_row_M[pack.target_state_M == state].astype(np.int64))


def _probe_states(size: int, unit: int) -> list[State]:
    """A fork (0 and 1 share a prefix of two units) and a continuation (2 extends 0), all after the first a target."""
    rng = np.random.default_rng(0)
    prefix, first, second, more = (rng.integers(0, size, n * unit) for n in (2, 1, 1, 1))
    second[0] = (first[0] + 1) % size  # the fork is at the end of the prefix, whatever was drawn
    sequences = [np.r_[prefix, first], np.r_[prefix, second], np.r_[prefix, first, more]]
    return [_probe_state(ids.astype(np.int32), i) for i, ids in enumerate(sequences)]


def _with_other_sibling(states: list[State], size: int, unit: int) -> list[State]:
    """The same with other tokens in the branch of 0 and 2, behind its first."""
    ids = [s.ids.copy() for s in states]
    for changed in (0, 2):
        ids[changed][2 * unit + 1 :] = (ids[changed][2 * unit + 1 :] + 1) % size
    return [_probe_state(i, n) for n, i in enumerate(ids)]


def _probe_state(ids: np.ndarray, index: int) -> State:
    rows = np.arange(len(ids) - 1, dtype=np.int32)
    return State("probe", index, b"", ids, None, None, None, rows, rows, ids[1:])


def _check_head(model: PreTrainedModel, head: Head, state: State, hidden: Tensor, tolerance: float) -> None:
    device = model.get_input_embeddings().weight.device
    ids = torch.from_numpy(state.ids.astype(np.int64)).to(device)[None]
    theirs = model(ids, use_cache=False).logits[0, :-1, : head.size].to(torch.float64)
    ours = head.logits(hidden).to(torch.float64)
    error = float((theirs - ours).abs().max() / theirs.abs().max())
    if not error <= tolerance:
        raise InputError(
            f"{type(model).__name__}: its logits are not its output head on its last state "
            f"(relative difference {error:.1e}, tolerance {tolerance:.0e})",
            code="E-MODEL-UNSUPPORTED",
        )


def _static_reason(model: PreTrainedModel) -> str | None:
    """Layers that a short probe could miss."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _PACKABLE_LAYERS
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))} carry state that a tree cannot fork"
    if getattr(config, "attention_chunk_size", None):
        return f"chunked attention (chunks of {config.attention_chunk_size} tokens)"
    return None


@contextmanager
def _small_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shrink every sliding window to a few tokens, and put it back."""
    owners: list[Any] = [model.config, model.config.get_text_config(), *model.modules()]
    saved = [(o, o.sliding_window) for o in owners if isinstance(getattr(o, "sliding_window", None), int)]
    try:
        for owner, window in saved:
            owner.sliding_window = min(window, _PROBE_WINDOW)
        yield
    finally:
        for owner, window in reversed(saved):
            owner.sliding_window = window


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
