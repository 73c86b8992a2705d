"""From states to signals: what the teacher says about each sampled token.

The output head runs on prediction rows only, a chunk of rows at a time with one upcast to float32, so that
[rows, vocabulary] never exists. Logits are cut to the tokenizer's real size *before* the softmax: the padded
part of the vocabulary carries no mass, and what it would have carried is reported.

    logprob[m]   = z[row(m), id(m)] - logsumexp[row(m)]         nats
    entropy[r]   = - sum_v p[r, v] log p[r, v]                   nats
    tail[r]      = log(1 - sum of the k chosen probabilities), computed from the rest, not by subtraction

Shape legend: R prediction rows, M targets, K chosen ids, V vocabulary (real ids), D model width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memopd_scorer.plan import Pack
from memopd_trace.errors import InputError, UsageError

SIGNALS = ("sampled", "topk", "hidden", "full")
CHUNK_CELLS = 2**24  # float32 logits in a chunk: 64 MiB


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """An output head: logits = softcap(scale * (weight h + bias)), cut to the tokenizer's `size` real ids."""

    weight_VD: Tensor
    bias_V: Tensor | None
    logit_scale: float
    softcap: float | None
    size: int

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, D] -> [R, size], float32 (float64 stays float64), differentiable."""
        return self._finish(
            hidden_RD, self.weight_VD[: self.size], None if self.bias_V is None else self.bias_V[: self.size]
        )

    def padded_mass(self, hidden_RD: Tensor, logsumexp_R: Tensor) -> Tensor:
        """[R]: probability that the padded ids would take from the real ones if they were kept."""
        if self.size >= self.weight_VD.shape[0]:
            return torch.zeros_like(logsumexp_R)
        bias = None if self.bias_V is None else self.bias_V[self.size :]
        padded = self._finish(hidden_RD, self.weight_VD[self.size :], bias).logsumexp(-1)
        return torch.sigmoid(padded - logsumexp_R)

    def digest(self) -> str:
        """Hex SHA-256 of weight, bias, scale, softcap and size."""
        h = hashlib.sha256(f"{self.logit_scale!r} {self.softcap!r} {self.size}".encode())
        for tensor in (self.weight_VD, self.bias_V):
            if tensor is not None:
                h.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                h.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return h.hexdigest()

    def _finish(self, hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        wide = torch.promote_types(hidden_RD.dtype, torch.float32)
        logits = hidden_RD.to(wide) @ weight_VD.to(wide).T
        if bias_V is not None:
            logits = logits + bias_V.to(wide)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def head_of(model: PreTrainedModel, size: int) -> Head:
    """The output head of a causal LM, on its live parameters (gradients flow into them).

    Raises:
        InputError: `E-MODEL-UNSUPPORTED` when the head is not one linear layer, or has fewer than `size` rows.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise InputError(
            f"{type(model).__name__}: the output head is {type(layer).__name__}, not one linear layer",
            code="E-MODEL-UNSUPPORTED",
        )
    if layer.weight.shape[0] < size:
        raise InputError(
            f"{type(model).__name__}: the head has {layer.weight.shape[0]} rows for {size} tokenizer ids",
            code="E-TOKENIZER-MISMATCH",
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, scale, float(softcap) if softcap else None, size)


@dataclass(slots=True, eq=False)
class Signals:
    """The signals of one pack, per target, on the CPU; absent ones are `None`.

    `hidden_MD` keeps the teacher's dtype. `padded_mass` is the largest mass any row had in padded ids.
    """

    logprob_M: np.ndarray
    logsumexp_M: np.ndarray
    entropy_M: np.ndarray
    topk_ids_MK: np.ndarray | None
    topk_logprobs_MK: np.ndarray | None
    tail_logprob_M: np.ndarray | None
    hidden_MD: Tensor | None
    logits_MV: np.ndarray | None
    padded_mass: float


def check_signals(names: tuple[str, ...]) -> None:
    """Refuse unknown signal names.

    Raises:
        UsageError: naming the unknown one.
    """
    for name in names:
        if name not in SIGNALS:
            raise UsageError(f"unknown signal '{name}'", hint=f"one or more of {', '.join(SIGNALS)}")
    if not names:
        raise UsageError("no signal asked for", hint=f"one or more of {', '.join(SIGNALS)}")


@torch.no_grad()
def compute_signals(hidden_RD: Tensor, head: Head, pack: Pack, names: tuple[str, ...], *, topk: int = 64) -> Signals:
    """The signals `names` of a pack from the states at its prediction rows.

    `sampled` (logprob, logsumexp, entropy) is always there: it is the self-check of the others. `topk` > V gives V.

    Raises:
        InputError: `E-NONFINITE` when a row's logits are NaN or have no finite log-sum-exp.
        UsageError: an unknown signal name, or a target id beyond the head's real ids.
    """
    check_signals(names)
    ids = pack.target_ids_M
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < head.size:
        raise UsageError(
            f"target ids from {int(ids.min())} to {int(ids.max())}, the head has {head.size} real ids",
            hint="plan with vocabulary=head.size",
        )
    rows, k = len(pack.rows_R), min(topk, head.size)
    out = _RowSignals(rows, len(pack.target_ids_M), k, head.size, names)
    order = np.argsort(pack.target_row_M, kind="stable")
    for start, stop in iter_chunks(rows, head.size):
        out.add(hidden_RD[start:stop], head, start, stop, pack, order)
    target_row = pack.target_row_M
    return Signals(
        logprob_M=out.logprob_M,
        logsumexp_M=out.logsumexp_R[target_row],
        entropy_M=out.entropy_R[target_row],
        topk_ids_MK=out.topk_ids_RK[target_row] if "topk" in names else None,
        topk_logprobs_MK=out.topk_logprobs_RK[target_row] if "topk" in names else None,
        tail_logprob_M=out.tail_R[target_row] if "topk" in names else None,
        hidden_MD=hidden_RD.cpu()[torch.from_numpy(target_row.astype(np.int64))] if "hidden" in names else None,
        logits_MV=out.logits_RV[target_row] if "full" in names else None,
        padded_mass=out.padded_mass,
    )


class _RowSignals:
    """Buffers per row, filled chunk by chunk."""

    def __init__(self, rows: int, targets: int, k: int, size: int, names: tuple[str, ...]) -> None:
        self.names, self.k, self.padded_mass = names, k, 0.0
        self.logprob_M = np.empty(targets, np.float32)
        self.logsumexp_R, self.entropy_R, self.tail_R = (np.empty(rows, np.float32) for _ in range(3))
        wide = rows if "topk" in names else 0
        self.topk_ids_RK = np.empty((wide, k), np.int32)
        self.topk_logprobs_RK = np.empty((wide, k), np.float32)
        self.logits_RV = np.empty((rows if "full" in names else 0, size), np.float32)

    def add(self, hidden: Tensor, head: Head, start: int, stop: int, pack: Pack, order: np.ndarray) -> None:
        logits = head.logits(hidden)
        logsumexp = logits.logsumexp(-1)
        if not bool(torch.isfinite(logsumexp).all()):
            bad = int(torch.nonzero(~torch.isfinite(logsumexp))[0])
            state = pack.states[int(pack.target_state_M[pack.target_row_M == start + bad][0])]
            raise InputError(
                f"episode '{state.episode_id}', invocation {state.invocation_index}: a logit is not finite",
                code="E-NONFINITE",
                hint="try another dtype",
            )
        rows = slice(start, stop)
        self.logsumexp_R[rows] = logsumexp.cpu().numpy()
        probabilities = (logits - logsumexp[:, None]).exp()
        self.entropy_R[rows] = torch.special.entr(probabilities).sum(-1).cpu().numpy()
        self.padded_mass = max(self.padded_mass, float(head.padded_mass(hidden, logsumexp).max()))
        low, high = np.searchsorted(pack.target_row_M[order], [start, stop])
        targets = order[low:high]
        row_M = torch.from_numpy(pack.target_row_M[targets].astype(np.int64) - start).to(logits.device)
        id_M = torch.from_numpy(pack.target_ids_M[targets].astype(np.int64)).to(logits.device)
        self.logprob_M[targets] = (logits[row_M, id_M] - logsumexp[row_M]).cpu().numpy()
        if "topk" in self.names:
            values, ids = (logits - logsumexp[:, None]).topk(self.k, dim=-1)
            self.topk_ids_RK[rows] = ids.cpu().numpy()
            self.topk_logprobs_RK[rows] = values.cpu().numpy()
            rest = probabilities.scatter(1, ids, 0.0).sum(-1)
            self.tail_R[rows] = rest.log().cpu().numpy()
        if "full" in self.names:
            self.logits_RV[rows] = logits.cpu().numpy()


def bytes_per_target(names: tuple[str, ...], *, width: int, hidden_bytes: int, topk: int, size: int) -> int:
    """Uncompressed bytes that one target takes in the scores table."""
    total = 16  # output_index, logprob, logsumexp, entropy
    total += 8 * min(topk, size) + 4 if "topk" in names else 0
    total += width * hidden_bytes if "hidden" in names else 0
    return total + (4 * size if "full" in names else 0)


def describe_head(head: Head) -> dict[str, Any]:
    """The head's kind as the scores' metadata states it."""
    return {
        "bias": head.bias_V is not None,
        "logit_scale": head.logit_scale,
        "softcap": head.softcap,
        "vocab_size": int(head.weight_VD.shape[0]),
        "size": head.size,
        "width": int(head.weight_VD.shape[1]),
        "digest": head.digest(),
    }


def iter_chunks(rows: int, size: int) -> Iterator[tuple[int, int]]:
    """`[start, stop)` runs of rows whose [rows, size] logits stay within CHUNK_CELLS cells."""
    step = max(1, CHUNK_CELLS // size)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
