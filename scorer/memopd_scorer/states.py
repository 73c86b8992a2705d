"""What is packed: an invocation's state, which of its tokens are targets, and how far it may be shared.

numpy only, no torch. n tokens of the sequence, m targets (sampled tokens to be scored).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memopd_trace.invocation import IDS, Invocation


@dataclass(frozen=True, slots=True)
class State:
    """One invocation under one view, ready to be packed; n tokens, m targets.

    `row_of_target` is the path index of the row that predicts each target: i-1 for the output token at sequence
    index i, its own slot for in-place generation. `realm` keeps apart what must never share a prefix; `routes` are
    recorded expert ids, one row a token but the last. `left_out` counts sampled tokens that are no target.
    """

    episode_id: str
    invocation_index: int
    digest: bytes
    ids: IDS  # [n]
    positions: IDS | None  # [n], None = 0…n-1
    visible_from: IDS | None  # [n], None = k
    visible_until: IDS | None  # [n], None = n
    row_of_target: IDS  # [m] path index
    output_index: IDS  # [m] index into output_ids
    target_ids: IDS  # [m]
    realm: bytes = b""
    routes: NDArray[np.int16] | None = None  # [n-1, layers * k]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.ids)


def predicted(invocation: Invocation) -> NDArray[np.bool_]:
    """bool[len(output)]: which output tokens have a row that predicts them (all, but a first one without a prompt)."""
    return _rows_of_outputs(invocation) >= 0


def state_of(invocation: Invocation, *, vocabulary: int | None = None) -> State:
    """The invocation's own recorded state, with its sampled tokens as targets.

    No target is an output token without any row before it (an empty prompt), nor, with `vocabulary` (the tokenizer's
    real size), an id beyond it: logits that are cut to the real ids give it no probability.
    """
    rows = _rows_of_outputs(invocation)
    wanted = invocation.sampled()
    targets = wanted & (rows >= 0)
    if vocabulary is not None:
        targets &= invocation.output_ids < vocabulary
    chosen = np.flatnonzero(targets).astype(np.int32)
    realm = hashlib.sha256(invocation.model_id.encode())
    for media in invocation.media or ():
        realm.update(f"{media.start},{media.stop}".encode() + media.sha256)
    routes, steps = invocation.routed_experts, max(1, len(invocation) - 1)
    if routes is not None and len(routes) % steps:  # of unknown width: shared with nothing but its equal
        realm.update(routes.tobytes())
        routes = None
    return State(
        episode_id=invocation.episode_id,
        invocation_index=invocation.invocation_index,
        digest=invocation.state_digest or invocation.compute_digest(),
        ids=invocation.sequence_ids,
        positions=invocation.position_ids,
        visible_from=invocation.visible_from,
        visible_until=invocation.visible_until,
        row_of_target=rows[chosen],
        output_index=chosen,
        target_ids=invocation.output_ids[chosen],
        realm=realm.digest(),
        routes=None if routes is None else routes.reshape(steps, -1),
        left_out=int(wanted.sum()) - len(chosen),
    )


def shareable_length(state: State) -> int:
    """How many leading tokens another state may share: up to the first token whose visibility is not the default,
    and before the first query that such a token lets look ahead."""
    n = len(state)
    limit = n
    if state.visible_until is not None:
        limit = min(limit, first(state.visible_until != n, n))
    if state.visible_from is not None:
        other = state.visible_from != np.arange(n)
        if other.any():
            limit = min(limit, first(other, n), int(state.visible_from[other].min()))
    return limit


def _rows_of_outputs(invocation: Invocation) -> IDS:
    """int32[len(output)]: the path index of the row that predicts each output token; -1 where there is none."""
    if invocation.output_slots is not None:
        return invocation.output_slots
    prompt, output = len(invocation.prompt_ids), len(invocation.output_ids)
    return np.arange(prompt - 1, prompt + output - 1, dtype=np.int32)


def first(flags: NDArray[np.bool_], default: int) -> int:
    """Index of the first true flag."""
    return int(np.argmax(flags)) if flags.any() else default
