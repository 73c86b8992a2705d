"""Rules about what a profile wants to be there. Wrong values are other rules' matter, under every profile.

`policy` asks only of rows that have a token to be trained, `train` of episodes that have one.
"""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memopd_trace.rules.batch import Batch
from memopd_trace.rules.behaviour import reshapes, unknown_kind
from memopd_trace.rules.episode import Run
from memopd_trace.rules.registry import Hit, Profile, rule

LINEAGE: tuple[Profile, ...] = ("lineage", "train")
POLICY: tuple[Profile, ...] = ("policy", "train")
TRAIN: tuple[Profile, ...] = ("train",)
TRAINED = ("output_ids", "output_sampled", "output_loss_mask", "accepted")


def _episode_trains(run: Run) -> bool:
    return any(i.loss_mask().any() for i in run.invocations)


@rule(
    "E-NEEDS-RELATION",
    "a row without recorded lineage",
    phase="batch",
    clause="Under `lineage`, every row MUST have a `relation`.",
    columns=("relation", "parent_index"),
    needs=(),
    profiles=LINEAGE,
    hint="the first row of an episode is a root; see E-DISCONTINUITY for the others",
)
def needs_relation(b: Batch) -> Iterator[Hit]:
    bad = ~b.given("relation") & ~b.given("parent_index")
    yield from b.row_hits(bad, "relation", "no lineage is recorded", expected="a relation")


@rule(
    "E-NEEDS-LOGPROBS",
    "a row to be trained without logprobs",
    phase="batch",
    clause="Under `policy`, a row with a token to be trained MUST have `output_logprobs`.",
    columns=("output_logprobs", *TRAINED),
    needs=(),
    profiles=POLICY,
    hint="ask the engine for the logprob of each sampled token; recomputing them hides every mismatch",
)
def needs_logprobs(b: Batch) -> Iterator[Hit]:
    yield from b.row_hits(b.trains & ~b.given("output_logprobs"), "output_logprobs", "no logprobs")


@rule(
    "E-NEEDS-LOGPROB-KIND",
    "a row to be trained does not say what its logprobs mean",
    phase="batch",
    clause="Under `policy`, a row with a token to be trained MUST have a known `logprob_kind`.",
    columns=("logprob_kind", "output_logprobs", "sampling", *TRAINED),
    needs=(),
    profiles=POLICY,
    hint="raw, if sampling was at temperature 1 over the whole vocabulary",
)
def needs_logprob_kind(b: Batch) -> Iterator[Hit]:
    elsewhere = b.given("output_logprobs") & reshapes(b)  # E-LOGPROB-KIND speaks of these
    bad = b.trains & unknown_kind(b) & ~elsewhere
    yield from b.row_hits(
        bad, "logprob_kind", "the kind of logprob is not known", expected="'raw', 'tempered', 'processed'"
    )


@rule(
    "E-NEEDS-SAMPLING",
    "a row to be trained without its sampling temperature",
    phase="batch",
    clause="Under `policy`, a row with a token to be trained MUST have `sampling.temperature`.",
    columns=("sampling", *TRAINED),
    needs=(),
    profiles=POLICY,
)
def needs_sampling(b: Batch) -> Iterator[Hit]:
    unset = np.isnan(b.numbers("sampling", "temperature", np.nan)) | ~b.given("sampling")
    yield from b.row_hits(b.trains & unset, "sampling", "no sampling temperature", expected="a temperature")


@rule(
    "E-NEEDS-POLICY-VERSION",
    "a row to be trained does not say which weights sampled it",
    phase="batch",
    clause="Under `policy`, a row with a token to be trained MUST have a policy version.",
    columns=("policy_version", "output_policy_versions", *TRAINED),
    needs=(),
    profiles=POLICY,
)
def needs_policy_version(b: Batch) -> Iterator[Hit]:
    bad = b.trains & ~b.given("policy_version") & ~b.given("output_policy_versions")
    yield from b.row_hits(bad, "policy_version", "no policy version", expected="a version")


@rule(
    "E-NEEDS-ENGINE-IDS",
    "a row to be trained whose ids are not known to be the engine's",
    phase="batch",
    clause="Under `policy`, a row with a token to be trained MUST have the `token_source` `engine`.",
    columns=("token_source", *TRAINED),
    needs=(),
    profiles=POLICY,
    hint="ids derived from text need not be the sampled ones: no ratio of probabilities holds for them",
)
def needs_engine_ids(b: Batch) -> Iterator[Hit]:
    bad = b.trains & ~b.equals("token_source", "engine")
    yield from b.row_hits(bad, "token_source", "the ids are not known to be the engine's", expected="'engine'")


@rule(
    "E-NEEDS-REWARD",
    "an episode without a reward",
    phase="episode",
    clause="Under `train`, an episode with a token to be trained MUST have a `reward` on at least one row.",
    columns=("reward", *TRAINED),
    needs=(),
    profiles=TRAIN,
    hint="0 is a reward, null is none",
)
def needs_reward(run: Run) -> Iterator[Hit]:
    if all(i.reward is None for i in run.invocations) and _episode_trains(run):
        yield Hit(len(run.invocations) - 1, "no row of the episode has a reward", "reward", "a number", "null")


@rule(
    "E-NEEDS-END",
    "an episode that does not say how it ended",
    phase="episode",
    clause="Under `train`, `terminated` or `truncated` MUST be given on the last row of an episode with a token to be "
    "trained.",
    columns=("terminated", "truncated", *TRAINED),
    needs=(),
    profiles=TRAIN,
    hint="a lost tail looks the same; a limit is `truncated`, an end of the task `terminated`",
)
def needs_end(run: Run) -> Iterator[Hit]:
    last = run.invocations[-1]
    if last.terminated is None and last.truncated is None and _episode_trains(run):
        message = "the last row gives neither terminated nor truncated"
        yield Hit(len(run.invocations) - 1, message, "terminated", "true or false", "null")


@rule(
    "E-NEEDS-GROUP",
    "an episode that belongs to no group and no task",
    phase="episode",
    clause="Under `train`, an episode with a token to be trained MUST have a `group_id` or a `task_id`.",
    columns=("group_id", "task_id", *TRAINED),
    needs=(),
    profiles=TRAIN,
    hint="a relative advantage compares the episodes of one group",
)
def needs_group(run: Run) -> Iterator[Hit]:
    first = run.invocations[0]
    if first.group_id is None and first.task_id is None and _episode_trains(run):
        yield Hit(0, "neither group_id nor task_id", "group_id", "a group or a task", "null")
