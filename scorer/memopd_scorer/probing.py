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

from memopd_scorer.attention import Backend, iter_states_at_rows, states_at_rows
from memopd_scorer.head import Head
from memopd_scorer.placement import runs_on
from memopd_scorer.plan import Pack, plan_states
from memopd_scorer.precision import HALF, dtype_name, in_float32
from memopd_scorer.states import State
from memopd_trace.errors import InputError, TraceError, first_line

# Largest |difference| of states, relative to the largest |state|, that rounding explains. In half precision it explains
# too much to find a leak: there it only serves where a model cannot be run in float32, which is not packed.
PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
# How much larger the median row's error may be packed than alone in half precision. It is 0.8 to 1.4 times as large,
# and mostly 1.0, in all architectures that are exact in float32 (tests/scorer/test_probe_half.py).
HALF_RATIO = 2.0
_LEAST_LOSS = 1e-6  # relative; what is exact to this is not compared further
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

    A model in half precision is compared in float32 (`memopd_scorer.precision`), where rounding hides nothing, and then
    held to be no less exact packed than alone in its own. Sliding windows are shrunk all the while, so that short
    sequences cross them.

    Raises:
        InputError: `E-MODEL-UNSUPPORTED` when the model cannot be run on text alone, looks ahead, does not
            repeat itself, or its head does not give its logits.
    """
    dtype = next(model.parameters()).dtype
    tolerance = PROBE_TOLERANCE[torch.promote_types(dtype, torch.float32)]
    reach = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _LONG
    reach = reach if reach > 0 else _LONG  # some write -1 for no limit
    if reach < 2:
        raise InputError(
            f"{type(model).__name__} has 1 position, so that nothing can follow a token", code="E-MODEL-UNSUPPORTED"
        )
    with _small_windows(model):
        try:
            with in_float32(model):
                _alone(model, [_long_state(head.size, reach)])
        except InputError as fault:
            _check_model(model, head.size, reach, PROBE_TOLERANCE[dtype])
            return Capability("single", f"{fault.message} (in float32, to be compared)", None, tolerance)
        with in_float32(model):
            _check_model(model, head.size, reach, tolerance)
            unit = min(12, reach // 4)
            if unit < 3:
                return Capability("single", f"its {reach} positions are too few to be probed", None, tolerance)
            states = _probe_states(head.size, unit)
            exact = _alone(model, states)
            _check_head(model, head, states[0], exact[0], tolerance)
            reason = _static_reason(model)
            if reason is not None:
                return Capability("single", reason, None, tolerance)
            # flash knows no float32; what it computes in half precision is compared below
            wide = "sdpa" if backend == "flash" and dtype in HALF else backend
            found = _compare(model, head.size, states, exact, wide)
        if found.layout == "tree" and dtype in HALF:
            return _compare_in_half(model, states, exact, backend, found)
        return found


def _compare(
    model: PreTrainedModel, size: int, states: list[State], alone: list[Tensor], backend: Backend
) -> Capability:
    """What running the states packed, in three passes, and beside other siblings, shows against each alone."""
    tolerance = PROBE_TOLERANCE[alone[0].dtype]
    (pack,) = plan_states([states])
    (other,) = plan_states([_with_other_sibling(states, size)])
    try:
        packed = states_at_rows(model, pack, backend=backend)
        passes = torch.cat([*iter_states_at_rows(model, pack, backend=backend, pass_tokens=len(pack) // 3)])
        changed = states_at_rows(model, other, backend=backend)
    except Exception as fault:  # modelling code of any kind: whatever it trips over, it cannot run a pack
        return Capability("single", _message(fault), None, tolerance)
    return _judge(alone, (pack, packed), passes, (other, changed), tolerance)


def _compare_in_half(
    model: PreTrainedModel, states: list[State], exact: list[Tensor], backend: Backend, found: Capability
) -> Capability:
    """What was `found` in float32, unless half precision makes larger errors packed than alone."""
    (pack,) = plan_states([states])
    try:
        packed = states_at_rows(model, pack, backend=backend)
    except Exception as fault:  # as above
        return Capability("single", _message(fault), None, found.tolerance)
    ours, theirs = _losses(_by_state(pack, packed), exact), _losses(_alone(model, states), exact)
    ratio = max(a / max(b, _LEAST_LOSS) for a, b in zip(ours, theirs, strict=True))
    if not ratio <= HALF_RATIO:
        what = f"packed in {dtype_name(packed.dtype)}, its error is {ratio:.1f} times that of alone"
        return Capability("single", what, found.error, found.tolerance)
    return found


def _losses(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The median row's error, relative to its length, before and behind the fork: a token that an expert router sends
    elsewhere for a tie does not count."""
    fork = (len(exact[0]) + 1) // 3 * 2
    rows = [(f.to(e) - e).norm(dim=1) / e.norm(dim=1) for f, e in zip(found, exact, strict=True)]
    return [float(torch.cat(part).median()) for part in ([r[:fork] for r in rows], [r[fork:] for r in rows])]


def _judge(
    alone: list[Tensor],
    first: tuple[Pack, Tensor],
    passes: Tensor,
    second: tuple[Pack, Tensor],
    tolerance: float,
) -> Capability:
    """Packed against alone and in passes, and state 1 beside two different siblings."""
    (pack, packed), (other, changed) = first, second
    scale = max(float(a.abs().max()) for a in alone)
    found, beside_others = _by_state(pack, packed), _by_state(other, changed)
    error = max(float((f - a).abs().max()) for f, a in zip(found, alone, strict=True)) / scale
    leak = float((found[1] - beside_others[1]).abs().max()) / scale
    if not error <= tolerance:  # NaN is not within any tolerance
        return Capability("single", f"packed and alone differ by {error:.1e} (relative)", error, tolerance)
    torn = float((passes - packed).abs().max()) / scale
    if not torn <= tolerance:
        return Capability("single", f"in one pass and in several differ by {torn:.1e} (relative)", error, tolerance)
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
    long = _long_state(size, reach)
    other = long.ids.copy()
    same = len(other) // 2
    other[same:] = (other[same:] + 1) % size
    once, ahead = _alone(model, [long, _probe_state(other, 1)])
    scale = float(once.abs().max())
    if scale == 0:
        raise InputError(f"{type(model).__name__}: all its states are 0", code="E-MODEL-UNSUPPORTED")
    changes = float((once - ahead)[:same].abs().max()) / scale
    if changes <= tolerance:
        return
    (again,) = _alone(model, [long])
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


def _by_state(pack: Pack, hidden_RD: Tensor) -> list[Tensor]:
    """The states at each probe state's targets, in the order of the probe's states."""
    found = {}
    for number, state in enumerate(pack.states):
        rows = torch.from_numpy(pack.target_row_M[pack.target_state_M == number].astype(np.int64))
        found[state.invocation_index] = hidden_RD[rows.to(hidden_RD.device)]
    return [found[index] for index in sorted(found)]


def _long_state(size: int, reach: int) -> State:
    return _probe_state(np.random.default_rng(1).integers(0, size, min(_LONG, reach)).astype(np.int32), 0)


def _probe_states(size: int, unit: int) -> list[State]:
    """A fork (0 and 1 share a prefix of two units) and a continuation (2 extends 0), all after the first a target."""
    rng = np.random.default_rng(0)
    prefix, first, second, more = (rng.integers(0, size, n * unit) for n in (2, 1, 1, 1))
    second[0] = (first[0] + 1) % size  # the fork is at the end of the prefix, whatever was drawn
    sequences = [np.r_[prefix, first], np.r_[prefix, second], np.r_[prefix, first, more]]
    return [_probe_state(ids.astype(np.int32), i) for i, ids in enumerate(sequences)]


def _with_other_sibling(states: list[State], size: int) -> list[State]:
    """The same with other tokens in the branch of 0 and 2, behind its first."""
    ids = [s.ids.copy() for s in states]
    behind = len(ids[0]) // 3 * 2 + 1
    for changed in (0, 2):
        ids[changed][behind:] = (ids[changed][behind:] + 1) % size
    return [_probe_state(i, n) for n, i in enumerate(ids)]


def _probe_state(ids: np.ndarray, index: int) -> State:
    rows = np.arange(len(ids) - 1, dtype=np.int32)
    return State("probe", index, b"", ids, None, None, None, rows, rows, ids[1:])


def _check_head(model: PreTrainedModel, head: Head, state: State, hidden: Tensor, tolerance: float) -> None:
    device = runs_on(model.get_input_embeddings())
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
