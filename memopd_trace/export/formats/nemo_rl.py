"""NeMo-RL: one row a call, as a `DatumSpec` with a tokenised message log.

NeMo-RL trains a message that is the assistant's and has `generation_logprobs`, whole. So an output of which only parts
are trained is cut into stretches, and the others get another role; `token_loss_mask` says the same again. A key that
is null stands for one that is absent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memopd_trace.export.format import Context, Field, Format, Sample, Sink
from memopd_trace.export.sinks import ParquetSink

PROMPT, TRAINED, OTHER = "user", "assistant", "environment"
MESSAGE = pa.struct(
    [
        pa.field("role", pa.string()),
        pa.field("content", pa.string()),
        pa.field("token_ids", pa.list_(pa.int64())),
        pa.field("token_loss_mask", pa.list_(pa.int64())),
        pa.field("generation_logprobs", pa.list_(pa.float32())),
    ]
)
FIELDS = (
    Field(
        "message_log",
        pa.list_(MESSAGE),
        f"the prompt ({PROMPT}), then the output in stretches: {TRAINED} where trained, else {OTHER}; "
        "`generation_logprobs` are nats of the whole vocabulary at `temperature`, null = none of that kind; "
        "`content` is empty",
        (
            "prompt_ids",
            "output_ids",
            "output_loss_mask",
            "accepted",
            "output_logprobs",
            "logprob_kind",
            "output_kept_logmass",
        ),
    ),
    Field("length", pa.int64(), "n, tokens"),
    Field("loss_multiplier", pa.float32(), "1"),
    Field("idx", pa.int64(), "the row's number"),
    Field("total_reward", pa.float32(), "this row's own reward; null = none", ("reward",)),
    Field("episode_return", pa.float64(), "sum of the episode's rewards; null = not scored"),
    Field("group_id", pa.string(), "group, else task, else episode", ("group_id",)),
    Field("weight_version", pa.int64(), "of the weights that sampled", ("policy_version",)),
    Field("temperature", pa.float64(), "of `generation_logprobs`"),
    Field(
        "teacher_topk_indices",
        pa.list_(pa.list_(pa.int64())),
        "K ids at the token that predicts, 0 elsewhere",
        (),
        ("topk_ids",),
    ),
    Field(
        "teacher_topk_logits",
        pa.list_(pa.list_(pa.float32())),
        "their log-probabilities: logits up to a constant",
        (),
        ("topk_logprobs",),
    ),
    Field("episode_id", pa.string(), "the trace's key", ("episode_id",)),
    Field("invocation_index", pa.int32(), "the trace's key", ("invocation_index",)),
)


def message_log(sample: Sample) -> list[dict[str, Any]]:
    """The prompt, and the output in stretches of one mask."""
    i = sample.invocation
    log = [_message(PROMPT, i.prompt_ids, 0, None)]
    edges = np.flatnonzero(np.diff(sample.mask)) + 1
    for part in map(slice, np.r_[0, edges], np.r_[edges, len(sample.mask)]):
        trained = bool(sample.mask[part][0])
        logprobs = sample.logprobs[part] if trained and sample.logprobs is not None else None
        log.append(_message(TRAINED if trained else OTHER, i.output_ids[part], int(trained), logprobs))
    return log


def _message(role: str, ids: np.ndarray, mask: int, logprobs: np.ndarray | None) -> dict[str, Any]:
    return {
        "role": role,
        "content": "",
        "token_ids": ids,
        "token_loss_mask": np.full(len(ids), mask),
        "generation_logprobs": logprobs,
    }


def _queries(sample: Sample, values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else sample.over_queries(values)


class _Rows:
    """Numbers the rows."""

    def __init__(self) -> None:
        self.idx = -1

    def row(self, sample: Sample) -> dict[str, Any]:
        """The columns of one row."""
        self.idx += 1
        i, teacher = sample.invocation, sample.full_teacher
        return {
            "message_log": message_log(sample),
            "length": len(i),
            "loss_multiplier": 1.0,
            "idx": self.idx,
            "total_reward": i.reward,
            "episode_return": sample.episode_return,
            "group_id": sample.group,
            "weight_version": i.policy_version,
            "temperature": sample.temperature,
            "teacher_topk_indices": _queries(sample, None if teacher is None else teacher.ids),
            "teacher_topk_logits": _queries(sample, None if teacher is None else teacher.logprobs),
            "episode_id": i.episode_id,
            "invocation_index": i.invocation_index,
        }


def open_sink(out: Any, context: Context) -> Sink:
    """One Parquet file."""
    return ParquetSink(out, FIELDS, _Rows().row)


FORMAT = Format(
    name="nemo-rl",
    title="NeMo-RL (August 2026): `DatumSpec` with a tokenised message log, and `teacher_topk_*` of its distillation",
    fields=FIELDS,
    open=open_sink,
    note="Drop keys that are null, and make tensors of lists, before `batched_message_log_to_flat_message`.",
)
