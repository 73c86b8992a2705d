"""One visibility, several backends: how a pack's tokens see each other inside a Transformers model.

    sdpa    CPU and any GPU: span by span, each against its own branch; no T x T mask exists
    flex    FlexAttention with the interval rule; GPU (on a CPU uncompiled and forward only)
    flash   variable-length FlashAttention over the branches; CUDA, half precision, no recorded visibility
    eager   one dense T x T mask and explicit softmax: the readable reference, for tests
    native  the model's own attention, for a pack of one plain state

What a backend does not compute it refuses by name. Sliding windows count along the branch in all of them.
"""

from memopd_scorer.attention.choice import REQUESTS, Backend, Choice, choose
from memopd_scorer.attention.forward import iter_states_at_rows, states_at_rows
from memopd_scorer.attention.recompute import recompute_layers
from memopd_scorer.attention.visibility import UnsupportedAttentionError, Visibility

__all__ = [
    "REQUESTS",
    "Backend",
    "Choice",
    "UnsupportedAttentionError",
    "Visibility",
    "choose",
    "iter_states_at_rows",
    "recompute_layers",
    "states_at_rows",
]
