"""verl: the columns of a rollout's `DataProto`, one ragged row a call. `docs/exporters.md` has the lines that pad them.

Tensors are named as verl's agent loop names them (`prompts`, `responses`, …); the rest are its non-tensor columns. A
teacher's ids and log-probabilities stand at the token that predicts, and the last token's are 0, as verl's own teacher
manager writes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memopd_trace.export.format import Context, Field, Format, Sample, Sink, ids_of
from memopd_trace.export.sinks import ParquetSink

INT64, FLOAT32 = pa.list_(pa.int64()), pa.list_(pa.float32())
FIELDS = (
    Field("prompts", INT64, "the prompt's ids", ("prompt_ids",)),
    Field("responses", INT64, "the output's ids", ("output_ids",)),
    Field("input_ids", INT64, "both"),
    Field("attention_mask", INT64, "1 at every token: nothing is padded yet"),
    Field("position_ids", INT64, "0…n-1"),
    Field("response_mask", INT64, "1 at output tokens to be trained", ("output_loss_mask", "accepted")),
    Field(
        "rollout_log_probs",
        FLOAT32,
        "nats, of the whole vocabulary at `temperature`, 0 where the mask is 0; null = none of that kind",
        ("output_logprobs", "logprob_kind", "output_kept_logmass"),
    ),
    Field("token_level_scores", FLOAT32, "this row's own reward at its last output token; null = none", ("reward",)),
    Field("teacher_ids", pa.list_(pa.list_(pa.int32())), "K ids at the token that predicts", (), ("topk_ids",)),
    Field(
        "teacher_logprobs",
        pa.list_(FLOAT32),
        "nats, of those ids; without top-k, K = 1: of the sampled id",
        (),
        ("topk_logprobs",),
    ),
    Field("uid", pa.string(), "group, else task, else episode: what advantages are normalised over", ("group_id",)),
    Field("episode_return", pa.float64(), "sum of the episode's rewards; null = not scored"),
    Field("temperature", pa.float64(), "of `rollout_log_probs`"),
    Field("min_global_steps", pa.int64(), "oldest policy version", ("policy_version", "output_policy_versions")),
    Field("max_global_steps", pa.int64(), "newest policy version"),
    Field("episode_id", pa.string(), "the trace's key", ("episode_id",)),
    Field("invocation_index", pa.int32(), "the trace's key", ("invocation_index",)),
)


def row(sample: Sample) -> dict[str, Any]:
    """The columns of one row."""
    i, m = sample.invocation, len(sample.invocation.output_ids)
    ids = ids_of(i)
    first, last = versions(sample)
    scores = None
    if i.reward is not None:
        scores = np.zeros(m, np.float32)
        scores[-1] = i.reward
    teacher_ids, teacher_logprobs = _teacher(sample)
    return {
        "prompts": i.prompt_ids,
        "responses": i.output_ids,
        "input_ids": ids,
        "attention_mask": np.ones(len(ids), np.int64),
        "position_ids": np.arange(len(ids)),
        "response_mask": sample.mask.astype(np.int64),
        "rollout_log_probs": sample.logprobs,
        "token_level_scores": scores,
        "teacher_ids": teacher_ids,
        "teacher_logprobs": teacher_logprobs,
        "uid": sample.group,
        "episode_return": sample.episode_return,
        "temperature": sample.temperature,
        "min_global_steps": first,
        "max_global_steps": last,
        "episode_id": i.episode_id,
        "invocation_index": i.invocation_index,
    }


def _teacher(sample: Sample) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
    """[n, K] ids and their log-probabilities; without top-k those of the sampled ids."""
    teacher = sample.full_teacher
    if teacher is None:
        return None, None
    if teacher.ids is None or teacher.logprobs is None:
        sampled = np.where(teacher.scored, sample.invocation.output_ids, 0)
        return sample.over_queries(sampled[:, None]), sample.over_queries(teacher.logprob[:, None])
    return sample.over_queries(teacher.ids), sample.over_queries(teacher.logprobs)


def versions(sample: Sample) -> tuple[int | None, int | None]:
    """The oldest and the newest weights that sampled the row."""
    i = sample.invocation
    if i.output_policy_versions is None:
        return i.policy_version, i.policy_version
    return int(i.output_policy_versions.min()), int(i.output_policy_versions.max())


def open_sink(out: Any, context: Context) -> Sink:
    """One Parquet file."""
    return ParquetSink(out, FIELDS, row)


FORMAT = Format(
    name="verl",
    title="verl 0.9: the tensors and non-tensor columns of a rollout's DataProto",
    fields=FIELDS,
    open=open_sink,
    sampled_only=True,
    note="It is no prompt data set (`RLHFDataset`): these are rollouts, for a trainer that skips generation.",
)
