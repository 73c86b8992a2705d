"""Find out what a model can do before anything is scored with it.

The probe runs three short forked random sequences through the packed backend and, alone, through the model's own
attention. A model that differs beyond rounding (recurrent or convolutional state, position tricks, capacity
across samples) is scored one invocation at a time, which is always right, and the reason is said. What a short
probe could not see (a rule that begins at some length) is either shrunk while it runs or named as the reason.
A model that looks ahead, or whose head is not the linear layer it seems to be, is refused.

Shape legend: R prediction rows, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from memopd_scorer.attention import Backend, states_at_rows
from memopd_scorer.plan import Pack, plan_states
from memopd_scorer.signals import Head
from memopd_scorer.states import State
from memopd_trace.errors import InputError, TraceError, first_line

# Largest |difference| of states, relative to the largest |state|, that rounding explains.
PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
_PROBE_WINDOW = 8
_LONG = 160  # tokens
_WINDOWS = ("sliding_window", "sliding_window_size")
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
# Rotary embeddings whose frequencies depend on the longest position of the whole pass.
_UNPACKABLE_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class Capability:
    """What the probe found: the best layout the model is exact in, and why not `tree`.

    `error` and `tolerance` are relative to the largest state; `error` is `None` when nothing could be run.
    """

    layout: Literal["tree", "single"]
    reason: str
    error: float | None
    tolerance: float


@torch.no_grad()
def probe(model: PreTrainedModel, head: Head, *, backend: Backend = "sdpa") -> Capability:
    """Compare forked random sequences packed and alone, and the head with the model's own logits.

    Sliding windows are shrunk while it runs, so that short sequences cross them.

    Raises:
        InputError: `E-MODEL-UNSUPPORTED` when the model cannot be run on text alone, looks ahead, does not
            repeat itself, or its head does not give its logits.
    """
    dtype = next(model.parameters()).dtype
    tolerance = PROBE_TOLERANCE[dtype]
    reach = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _LONG
    reach = reach if reach > 0 else _LONG  # some write -1 for no limit
    unit = min(12, reach // 4)
    with _small_windows(model):
        _check_model(model, head.size, reach, tolerance)
        if unit < 3:
            return Capability("single", f"its {reach} positions are too few to be probed", None, tolerance)
        states = _probe_states(head.size, unit)
        others = _with_other_sibling(states, head.size, unit)
        alone = _alone(model, states)
        _check_head(model, head, states[0], alone[0], tolerance)
        reason = _static_reason(model)
        if reason is not None:
            return Capability("single", reason, None, tolerance)
        (pack,) = plan_states([states])
        (other,) = plan_states([others])
        try:
            packed = states_at_rows(model, pack, backend=backend)
            changed = states_at_rows(model, other, backend=backend)
        except Exception as fault:  # modelling code of any kind: whatever it trips over, it cannot run a pack
            return Capability("single", _message(fault), None, tolerance)
    return _judge(states, alone, (pack, packed), (other, changed), tolerance)


def _judge(
    states: list[State],
    alone: list[Tensor],
    first: tuple[Pack, Tensor],
    second: tuple[Pack, Tensor],
    tolerance: float,
) -> Capability:
    """Packed against alone, and state 1 beside two different siblings."""
    (pack, packed), (other, changed) = first, second
    scale = max(float(a.abs().max()) for a in alone)
    order = {s.invocation_index: i for i, s in enumerate(states)}
    error = max(
        float((packed[_targets(pack, s)] - alone[order[state.invocation_index]]).abs().max()) / scale
        for s, state in enumerate(pack.states)
    )
    ours, theirs = (next(s for s, x in enumerate(p.states) if x.invocation_index == 1) for p in (pack, other))
    leak = float((packed[_targets(pack, ours)] - changed[_targets(other, theirs)]).abs().max()) / scale
    if not error <= tolerance:  # NaN is not within any tolerance
        return Capability("single", f"packed and alone differ by {error:.1e} (relative)", error, tolerance)
    if not leak <= 8 * torch.finfo(packed.dtype).eps:
        return Capability("single", f"a branch changes by {leak:.1e} with its sibling", error, tolerance)
    return Capability("tree", "packed equals alone", error, tolerance)


def _alone(model: PreTrainedModel, states: list[State]) -> list[Tensor]:
    try:
        return [states_at_rows(model, p, backend="native") for p in plan_states([states], layout="single")]
    except TraceError:
        raise
    except Exception as fault:  # as above, but even one plain sequence cannot be run
        raise InputError(
            f"{type(model).__name__} cannot be run on token ids alone: {_message(fault)}", code="E-MODEL-UNSUPPORTED"
        ) from fault


def _message(fault: Exception) -> str:
    return fault.message if isinstance(fault, TraceError) else f"{type(fault).__name__}: {first_line(fault)}"


def _check_model(model: PreTrainedModel, size: int, reach: int, tolerance: float) -> None:
    """Refuse a model that gives a prefix other states when only what follows it differs, or when nothing does.

    The sequence is longer than the others: some attention is hashed or cut into chunks from some length on.
    """
    ids = np.random.default_rng(1).integers(0, size, min(_LONG, reach)).astype(np.int32)
    other = ids.copy()
    same = len(ids) // 2
    other[same:] = (other[same:] + 1) % size
    once, ahead = _alone(model, [_probe_state(ids, 0), _probe_state(other, 1)])
    scale = float(once.abs().max())
    changes = float((once - ahead)[:same].abs().max()) / scale
    if changes <= tolerance:
        return
    (again,) = _alone(model, [_probe_state(ids, 0)])
    repeated = float((once - again).abs().max()) / scale
    if not repeated <= tolerance:
        reason = f"does not repeat itself: two runs of the same tokens differ by {repeated:.1e} (relative)"
        raise InputError(f"{type(model).__name__} {reason}", code="E-MODEL-UNSUPPORTED")
    raise InputError(
        f"{type(model).__name__} is not causal: a token's state changes by {changes:.1e} (relative) with the tokens "
        "after it",
        code="E-MODEL-UNSUPPORTED",
        hint="it would see what it is asked to predict; some configs need is_decoder",
    )


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
        return f"layers of type {', '.join(sorted(kinds))} are not plain attention, which is all that a tree can fork"
    if getattr(config, "attention_chunk_size", None):
        return f"chunked attention (chunks of {config.attention_chunk_size} tokens)"
    rope = _rope_types(getattr(config, "rope_parameters", None)) & _UNPACKABLE_ROPE
    if rope:
        return f"rotary embeddings of type {', '.join(sorted(rope))} depend on the longest sequence of a pass"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """The rope types of a config: one for all layers, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested: set[str] = set().union(*(_rope_types(v) for v in parameters.values()))
    kind = parameters.get("rope_type")
    return nested | ({kind} if isinstance(kind, str) else set())


@contextmanager
def _small_windows(model: PreTrainedModel) -> Iterator[None]:
    """Shrink every sliding window to a few tokens, and put it back."""
    owners: list[Any] = [model.config, model.config.get_text_config(), *model.modules()]
    saved = [(o, n, getattr(o, n)) for o in owners for n in _WINDOWS if type(getattr(o, n, None)) is int]
    try:
        for owner, name, window in saved:
            setattr(owner, name, min(window, _PROBE_WINDOW))
        yield
    finally:
        for owner, name, window in reversed(saved):
            setattr(owner, name, window)
