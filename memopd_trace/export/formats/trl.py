"""TRL: one row a call, with the columns of several of its trainers side by side.

`SFTTrainer` takes `input_ids` and `labels`. What a `rollout_func` of `GRPOTrainer` returns is `prompt_ids`,
`completion_ids`, `logprobs` and `env_mask`; a rollout of its asynchronous trainer is `input_ids`, `completion_mask`
and `old_log_probs`. No trainer of TRL reads a teacher from a data set: the columns are named as its server
distillation names what a teacher server answered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from memopd_trace.export.format import Context, Field, Format, Sample, Sink, ids_of
from memopd_trace.export.sinks import ParquetSink

IGNORED = -100  # a label that no loss counts
INT64, FLOAT32 = pa.list_(pa.int64()), pa.list_(pa.float32())
REWARD = pa.struct([pa.field("name", pa.string()), pa.field("value", pa.float64())])  # `datasets` knows no maps
FIELDS = (
    Field("prompt_ids", INT64, "the prompt's ids", ("prompt_ids",)),
    Field("completion_ids", INT64, "the output's ids", ("output_ids",)),
    Field(
        "logprobs",
        FLOAT32,
        "of `completion_ids`: nats, of the whole vocabulary at `temperature`, 0 where not trained; null = none "
        "of that kind",
        ("output_logprobs", "logprob_kind", "output_kept_logmass"),
    ),
    Field("env_mask", INT64, "of `completion_ids`: 1 where trained", ("output_loss_mask", "accepted")),
    Field("input_ids", INT64, "both"),
    Field("labels", INT64, f"`input_ids` where trained, else {IGNORED}"),
    Field("completion_mask", INT64, "of `input_ids`: 1 where trained"),
    Field("old_log_probs", FLOAT32, "`logprobs` over `input_ids`, 0 at the prompt"),
    Field("reward", pa.float64(), "this row's own; null = none", ("reward",)),
    Field("rewards", pa.list_(REWARD), "named parts", ("rewards",)),
    Field("episode_return", pa.float64(), "sum of the episode's rewards; null = not scored"),
    Field("group_id", pa.string(), "group, else task, else episode", ("group_id",)),
    Field("temperature", pa.float64(), "of `logprobs`"),
    Field("model_version", pa.int64(), "of the weights that sampled", ("policy_version",)),
    Field("actual_logprobs", FLOAT32, "teacher: nats, of `completion_ids`", (), ("logprob",)),
    Field("topk_token_ids", pa.list_(pa.list_(pa.int64())), "teacher: K ids a token", (), ("topk_ids",)),
    Field("topk_logprobs", pa.list_(FLOAT32), "teacher: nats, of those", (), ("topk_logprobs",)),
    Field("episode_id", pa.string(), "the trace's key", ("episode_id",)),
    Field("invocation_index", pa.int32(), "the trace's key", ("invocation_index",)),
)


def row(sample: Sample) -> dict[str, Any]:
    """The columns of one row."""
    i, ids, teacher = sample.invocation, ids_of(sample.invocation), sample.full_teacher
    mask = sample.over_sequence(sample.mask)
    return {
        "prompt_ids": i.prompt_ids,
        "completion_ids": i.output_ids,
        "logprobs": sample.logprobs,
        "env_mask": sample.mask.astype(np.int64),
        "input_ids": ids,
        "labels": np.where(mask, ids, IGNORED),
        "completion_mask": mask.astype(np.int64),
        "old_log_probs": None if sample.logprobs is None else sample.over_sequence(sample.logprobs),
        "reward": i.reward,
        "rewards": None if i.rewards is None else [{"name": n, "value": v} for n, v in i.rewards.items()],
        "episode_return": sample.episode_return,
        "group_id": sample.group,
        "temperature": sample.temperature,
        "model_version": i.policy_version,
        "actual_logprobs": None if teacher is None else teacher.logprob,
        "topk_token_ids": None if teacher is None else teacher.ids,
        "topk_logprobs": None if teacher is None else teacher.logprobs,
        "episode_id": i.episode_id,
        "invocation_index": i.invocation_index,
    }


def open_sink(out: Any, context: Context) -> Sink:
    """One Parquet file."""
    return ParquetSink(out, FIELDS, row)


FORMAT = Format(
    name="trl",
    title="TRL 1.16: columns of SFT, GRPO's `rollout_func` and server distillation",
    fields=FIELDS,
    open=open_sink,
    note="For `SFTTrainer` keep `input_ids` and `labels` alone; with a `max_length` it cuts, and so changes states.",
)
