"""From signals to the Arrow rows of a shard.

Shape legend: M targets of a pack, K chosen ids, V real ids, D model width, B scales of a state.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from memopd_scorer.plan import Pack
from memopd_scorer.signals import Signals
from memopd_trace.metadata import ScoresMetadata
from memopd_trace.schema import RECORDED, SCORES_COLUMNS


def shard_rows(pack: Pack, signals: Signals, metadata: ScoresMetadata) -> pa.RecordBatch:
    """The rows of a pack in a shard: one a state; targets of a state are neighbours in pack order."""
    counts = np.bincount(pack.target_state_M, minlength=len(pack.states))
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
    columns: dict[str, pa.Array] = {
        "episode_id": pa.array([s.episode_id for s in pack.states], pa.string()),
        "invocation_index": pa.array([s.invocation_index for s in pack.states], pa.int32()),
        "state_digest": pa.array([s.digest for s in pack.states], pa.binary(32)),
        "teacher_id": pa.array([metadata.teacher_id] * len(pack.states)).dictionary_encode(),
        "view": pa.array([metadata.view] * len(pack.states)).dictionary_encode(),
        "output_index": _lists(offsets, pa.array(pack.target_output_M, pa.int32())),
        "logprob": _lists(offsets, pa.array(signals.logprob_M)),
        "logsumexp": _lists(offsets, pa.array(signals.logsumexp_M)),
        "entropy": _lists(offsets, pa.array(signals.entropy_M)),
    }
    if metadata.view != RECORDED:
        columns["view_digest"] = pa.array([s.view_digest for s in pack.states], pa.binary(32))
    if signals.topk_ids_MK is not None:
        assert signals.topk_logprobs_MK is not None
        columns["topk_ids"] = _lists(offsets, _inner(signals.topk_ids_MK))
        columns["topk_logprobs"] = _lists(offsets, _inner(signals.topk_logprobs_MK))
        columns["tail_logprob"] = _lists(offsets, pa.array(signals.tail_logprob_M))
    if signals.hidden_MD is not None:
        columns["hidden"] = _lists(offsets, _hidden_to_arrow(signals.hidden_MD))
    if signals.hidden_scale_MB is not None:
        columns["hidden_scale"] = _lists(offsets, _inner(signals.hidden_scale_MB))
        columns["hidden_logsumexp"] = _lists(offsets, pa.array(signals.hidden_logsumexp_M))
        columns["hidden_kl"] = _lists(offsets, pa.array(signals.hidden_kl_M))
    if signals.logits_MV is not None:
        columns["logits"] = _lists(offsets, _inner(signals.logits_MV))
    return pa.RecordBatch.from_pydict({c.name: columns[c.name] for c in SCORES_COLUMNS if c.name in columns})


def _lists(offsets: pa.Array, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(offsets, values)


def _inner(values_MK: np.ndarray) -> pa.Array:
    rows, width = values_MK.shape
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * width)
    return pa.ListArray.from_arrays(offsets, pa.array(values_MK.reshape(-1)))


def _hidden_to_arrow(hidden_MD: Tensor) -> pa.Array:
    width = hidden_MD.shape[1]
    flat = hidden_MD.contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.uint16)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.numpy()), width)
