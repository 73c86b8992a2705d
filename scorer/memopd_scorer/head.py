"""A model's output head: from final states to logits over the tokenizer's real ids.

Shape legend: R prediction rows, V vocabulary (of the weights, padded ids included), D model width.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from memopd_scorer.finish import finish_of
from memopd_scorer.placement import whole_head
from memopd_trace.errors import InputError


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

    def logit_of(self, hidden_RD: Tensor, ids_R: Tensor) -> Tensor:
        """[R]: each row's logit of one id (below `size`), float32 (float64 stays), without those of the others."""
        wide = torch.promote_types(hidden_RD.dtype, torch.float32)
        ids_R = ids_R.to(self.weight_VD.device)
        logit_R = (hidden_RD.to(self.weight_VD.device, wide) * self.weight_VD[ids_R].to(wide)).sum(-1)
        return self._shape(logit_R, None if self.bias_V is None else self.bias_V[ids_R].to(wide))

    def upcast(self) -> Head:
        """The same head in float32 (float64 stays), for many chunks: casting half-precision weights for each would cost
        about as much as the product with it."""
        wide = torch.promote_types(self.weight_VD.dtype, torch.float32)
        bias_V = None if self.bias_V is None else self.bias_V.to(wide)
        return replace(self, weight_VD=self.weight_VD.to(wide), bias_V=bias_V)

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
                h.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return h.hexdigest()

    def _finish(self, hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        wide = torch.promote_types(hidden_RD.dtype, torch.float32)
        logits = hidden_RD.to(weight_VD.device, wide) @ weight_VD.to(wide).T  # its layers may be on several devices
        return self._shape(logits, None if bias_V is None else bias_V.to(wide))

    def _shape(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Bias, scale and softcap on products with the weights."""
        if bias is not None:
            logits = logits + bias
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def head_of(model: PreTrainedModel, size: int) -> Head:
    """The output head of a causal LM, on its live parameters (gradients flow into them), or on a whole copy of those
    that are in parts or elsewhere (`memopd_scorer.placement`).

    Scale and softcap are measured on the model's own logits (`memopd_scorer.finish`): a few tokens are run.

    Raises:
        InputError: `E-MODEL-UNSUPPORTED` when the head is not one linear layer with scale and softcap, or has fewer
            than `size` rows.
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
    with whole_head(model, layer) as whole:
        scale, softcap = finish_of(model, whole)
        return Head(whole.weight, whole.bias, scale, softcap, size)


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
