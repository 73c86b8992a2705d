"""What is packed: an invocation's state, which of its tokens are targets, and how far it may be shared.

numpy only, no torch. n tokens of the sequence, m targets (sampled tokens to be scored).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memopd_trace.invocation import IDS, Invocation
from memopd_trace.lineage import realm, shareable_length

# The columns that `state_of` and the grouping of episodes look at.
STATE_COLUMNS = (
    "episode_id", "invocation_index", "group_id", "task_id", "model_id", "prompt_ids", "output_ids", "position_ids",
    "visible_from", "visible_until", "output_slots", "media", "state_digest", "output_sampled", "routed_experts",
)  # fmt: skip
_COUNTING = np.arange(2**16, dtype=np.int32)
_COUNTING.flags.writeable = False


@dataclass(frozen=True, slots=True)
class State:
    """One invocation under one view, ready to be packed; n tokens, m targets.

    `row_of_target` is the path index of the row that predicts each target: i-1 for the output token at sequence
    index i, its own slot for in-place generation. `realm` keeps apart what must never share a prefix; `routes` are
    recorded expert ids, one row a token but the last. `left_out` counts sampled tokens that are no target. `digest` is
    that of the trace row; under another view than `recorded`, `view_digest` is that of the ids, positions and
    visibility here, and `recorded`, where it was asked for, the state in which the targets were sampled.
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
    view_digest: bytes | None = None
    recorded: State | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def key(self) -> tuple[str, int]:
        """What the trace's row is known by."""
        return self.episode_id, self.invocation_index

    @property
    def shareable(self) -> int:
        """How many leading tokens another state may share, as far as visibility goes."""
        return shareable_length(len(self), self.visible_from, self.visible_until)

    @property
    def causal(self) -> bool:
        """Whether every token has the default visibility."""
        return (self.visible_from is None and self.visible_until is None) or self.shareable == len(self)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs when it is run alone."""
        n = len(self)
        if self.visible_from is None and self.visible_until is None:
            return pairs_of_prefix(n)
        start = counting(0, n) if self.visible_from is None else self.visible_from
        stop = n * n if self.visible_until is None else int(self.visible_until.sum(dtype=np.int64))
        return stop - int(start.sum(dtype=np.int64))


def pairs_of_prefix(tokens: int) -> int:
    """Visible (query, key) pairs of `tokens` tokens that see each other causally."""
    return tokens * (tokens + 1) // 2


def counting(start: int, stop: int) -> IDS:
    """int32 `start`…`stop`-1, not to be written to."""
    return _COUNTING[start:stop] if stop <= len(_COUNTING) else np.arange(start, stop, dtype=np.int32)


def predicted(invocation: Invocation) -> NDArray[np.bool_]:
    """bool[len(output)]: which output tokens have a row that predicts them (all, but a first one without a prompt)."""
    return _rows_of_outputs(invocation) >= 0


def state_of(invocation: Invocation, *, vocabulary: int | None = None) -> State:
    """The invocation's own recorded state, with its sampled tokens as targets.

    No target is an output token without any row before it (an empty prompt), nor, with `vocabulary` (the tokenizer's
    real size), an id beyond it: logits that are cut to the real ids give it no probability.
    """
    rows, output_index, left_out = _targets(invocation, vocabulary)
    digest, routes = realm(invocation)
    return State(
        episode_id=invocation.episode_id,
        invocation_index=invocation.invocation_index,
        digest=invocation.state_digest or invocation.compute_digest(),
        ids=invocation.sequence_ids,
        positions=invocation.position_ids,
        visible_from=invocation.visible_from,
        visible_until=invocation.visible_until,
        row_of_target=rows,
        output_index=output_index,
        target_ids=invocation.output_ids[output_index],
        realm=digest,
        routes=routes,
        left_out=left_out,
    )


def _targets(invocation: Invocation, vocabulary: int | None) -> tuple[IDS, IDS, int]:
    """([m] rows that predict the targets, [m] their indices in the output, sampled tokens that are no target)."""
    rows, ids = _rows_of_outputs(invocation), invocation.output_ids
    known = vocabulary is None or not len(ids) or int(ids.max()) < vocabulary
    if known and invocation.output_sampled is None and invocation.output_slots is None and len(invocation.prompt_ids):
        return rows, counting(0, len(ids)), 0  # nearly every row: every output token is a target
    wanted = invocation.sampled()
    targets = wanted & (rows >= 0)
    if vocabulary is not None:
        targets &= ids < vocabulary
    chosen = np.flatnonzero(targets).astype(np.int32)
    return rows[chosen], chosen, int(wanted.sum()) - len(chosen)


def _rows_of_outputs(invocation: Invocation) -> IDS:
    """int32[len(output)]: the path index of the row that predicts each output token; -1 where there is none."""
    if invocation.output_slots is not None:
        return invocation.output_slots
    prompt, output = len(invocation.prompt_ids), len(invocation.output_ids)
    if not prompt:
        return np.arange(-1, output - 1, dtype=np.int32)
    return counting(prompt - 1, prompt + output - 1)
