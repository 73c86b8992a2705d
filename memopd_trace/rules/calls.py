"""Rules about how a call ran: where it stopped, which weights sampled it, which experts it used."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memopd_trace.invocation import IDS
from memopd_trace.lineage import inherited
from memopd_trace.rules.batch import Batch, Bools, Ints
from memopd_trace.rules.episode import Run
from memopd_trace.rules.files import FileContext
from memopd_trace.rules.registry import Hit, rule

FEW = 8  # stop ids, above which they are looked up instead of compared one by one


def _no_stop_ids(file: FileContext) -> str | None:
    known = any(m.tokenizer.stops for m in file.metadata.models.values())
    return None if known else "no model's tokenizer names eos_ids or stop_ids"


def _is_stop(b: Batch) -> Bools:
    """[M]: the output id stops its model."""
    ids = b.lists("output_ids").values
    stops = np.zeros(len(ids), bool)
    for name, model in b.metadata.models.items():
        own = b.equals("model_id", name)
        if model.tokenizer.stops and own.any():
            found = _isin(ids, model.tokenizer.stops)
            stops |= found if own.all() else found & own[b.row_of_output]
    return stops


def _isin(ids: IDS, stops: list[int]) -> Bools:
    """`np.isin`, several times as fast for the few stops that a model has."""
    return np.isin(ids, stops) if len(stops) > FEW else np.logical_or.reduce([ids == stop for stop in stops])


@rule(
    "W-STOP-MISSING",
    "a call that stopped does not end in a stop id",
    phase="batch",
    clause="Where `finish_reason` is `stop`, the last output id SHOULD be one of `eos_ids` or `stop_ids`.",
    columns=("finish_reason", "output_ids", "output_slots", "model_id"),
    needs=("finish_reason",),
    hint="engines drop the stop id from their answer; without it the policy is never trained to stop",
    unless=_no_stop_ids,
)
def stop_missing(b: Batch) -> Iterator[Hit]:
    bad = b.last_output & ~_is_stop(b)
    if not bad.any():
        return
    known = b.equals("model_id", *(name for name, model in b.metadata.models.items() if model.tokenizer.stops))
    bad &= (b.equals("finish_reason", "stop") & known & ~b.given("output_slots"))[b.row_of_output]
    what = "ends the output and is no stop id"
    yield from b.output_hits(bad, "output_ids", what, b.lists("output_ids").values, expected="an eos or stop id")


@rule(
    "W-IDS-AFTER-STOP",
    "ids follow a stop id in the output",
    phase="batch",
    clause="A stop id SHOULD occur only at the end of `output_ids`.",
    columns=("output_ids", "output_slots", "model_id"),
    needs=("output_ids",),
    hint="padding that was kept, or tokens of a batch that ran on; what was not sampled does not belong here",
    unless=_no_stop_ids,
)
def ids_after_stop(b: Batch) -> Iterator[Hit]:
    bad = _is_stop(b) & ~b.last_output
    if not bad.any():
        return
    bad &= ~b.given("output_slots")[b.row_of_output]
    what = "is a stop id with ids behind it"
    yield from b.output_hits(bad, "output_ids", what, b.lists("output_ids").values, expected="a stop id last")


@rule(
    "W-STOP-UNTRAINED",
    "the stop id was sampled and is left out of the loss",
    phase="batch",
    clause="A sampled stop id that ends a trained output SHOULD be trained.",
    columns=("output_loss_mask", "output_sampled", "accepted", "output_ids", "output_slots", "model_id"),
    needs=("output_loss_mask",),
    hint="masks built by `id != pad_id` lose it where padding and stop id are one; the policy unlearns to stop",
    unless=_no_stop_ids,
)
def stop_untrained(b: Batch) -> Iterator[Hit]:
    ends = b.last_output & _is_stop(b) & (b.trains & ~b.given("output_slots"))[b.row_of_output]
    bad = ends & b.sampled & ~b.trained
    yield from b.output_hits(bad, "output_loss_mask", "is false on the stop id", expected="true")


def _oldest_version(b: Batch) -> tuple[Ints, Bools]:
    """([B] the oldest version that sampled a token, [B] it is known)."""
    versions, known = b.numbers("policy_version").astype(np.int64), b.given("policy_version")
    tokens = b.output("output_policy_versions")
    oldest = np.full(len(b), np.iinfo(np.int64).max)
    np.minimum.at(oldest, b.row_of_output[tokens.given], tokens.values[tokens.given])
    spans = oldest < np.iinfo(np.int64).max
    return np.where(spans, oldest, versions), known | spans


@rule(
    "E-POLICY-VERSION",
    "the row's policy version is not that of its last token",
    phase="batch",
    clause="Where both are given, `policy_version` MUST equal the last item of `output_policy_versions`.",
    columns=("policy_version", "output_policy_versions", "output_ids"),
    needs=("output_policy_versions",),
    hint="policy_version names the weights that ended the call; the list says which sampled each token",
)
def policy_version(b: Batch) -> Iterator[Hit]:
    tokens = b.output("output_policy_versions")
    row_version = b.numbers("policy_version").astype(np.int64)[b.row_of_output]
    given = b.given("policy_version")[b.row_of_output]
    bad = tokens.given & given & b.last_output & (tokens.values != row_version)
    what = "is the last token's version, policy_version is another"
    yield from b.output_hits(bad, "output_policy_versions", what, tokens.values, expected="policy_version")


@rule(
    "W-VERSION-DECREASES",
    "policy versions go back within a call",
    phase="batch",
    clause="`output_policy_versions` SHOULD NOT decrease.",
    columns=("output_policy_versions", "output_ids"),
    needs=("output_policy_versions",),
)
def version_decreases(b: Batch) -> Iterator[Hit]:
    tokens = b.output("output_policy_versions")
    bad = np.zeros(len(tokens.values), bool)
    bad[1:] = (tokens.values[1:] < tokens.values[:-1]) & tokens.given[1:]
    bad &= b.index_of_output > 0
    yield from b.output_hits(bad, "output_policy_versions", "is older than the one before", tokens.values)


@rule(
    "E-KV-VERSION",
    "reused keys and values are newer than the policy",
    phase="batch",
    clause="`kv_policy_version` MUST NOT exceed the oldest version that sampled a token of the row.",
    columns=("kv_policy_version", "policy_version", "output_policy_versions", "output_ids"),
    needs=("kv_policy_version",),
)
def kv_version(b: Batch) -> Iterator[Hit]:
    oldest, known = _oldest_version(b)
    bad = b.given("kv_policy_version") & known & (b.numbers("kv_policy_version") > oldest)
    yield from b.row_hits(bad, "kv_policy_version", "newer than the policy", expected="at most the policy version")


@rule(
    "W-KV-STALE",
    "the call reused keys and values of older weights",
    phase="batch",
    clause="`kv_policy_version` SHOULD equal the policy version.",
    columns=("kv_policy_version", "policy_version", "output_policy_versions", "output_ids"),
    needs=("kv_policy_version",),
    hint="no single policy gives these logprobs; clear the engine's prefix cache when weights change",
)
def kv_stale(b: Batch) -> Iterator[Hit]:
    oldest, known = _oldest_version(b)
    kv = b.numbers("kv_policy_version").astype(np.int64)
    for row in np.flatnonzero(b.given("kv_policy_version") & known & (kv < oldest)):
        message = f"keys and values are {int(oldest[row]) - int(kv[row])} versions old"
        yield Hit(int(row), message, "kv_policy_version", str(oldest[row]), str(kv[row]))


@rule(
    "W-KV-UNKNOWN",
    "newer weights go on from older ones, and it is not said whose keys and values were used",
    phase="episode",
    clause="Where an `extend` row has a newer policy version than its parent, `kv_policy_version` SHOULD be given.",
    columns=("relation", "parent_index", "policy_version", "kv_policy_version", "output_slots"),
    needs=("policy_version",),
    hint="the policy version, if the engine's prefix cache was cleared when the weights changed; else the oldest in it",
)
def kv_unknown(run: Run) -> Iterator[Hit]:
    for at, child in enumerate(run.invocations):
        parent, version = run.parent(child), child.policy_version
        if child.relation != "extend" or parent is None or version is None or child.kv_policy_version is not None:
            continue
        older = parent.policy_version is not None and parent.policy_version < version
        if older and inherited(parent, child) == len(parent):
            message = f"version {version} goes on from a state of version {parent.policy_version}"
            yield Hit(at, message, "kv_policy_version", "a version", "null")


def _no_routing(file: FileContext) -> str | None:
    known = any(m.num_moe_layers and m.experts_per_token for m in file.metadata.models.values())
    return None if known else "no model gives num_moe_layers and experts_per_token"


@rule(
    "E-ROUTED-LENGTH",
    "the routed experts do not cover the call",
    phase="batch",
    clause="`routed_experts` MUST hold (n - 1) x `num_moe_layers` x `experts_per_token` ids.",
    columns=("routed_experts", "prompt_ids", "output_ids", "output_slots", "model_id"),
    needs=("routed_experts",),
    hint="one entry per input position; the last token is never an input",
    unless=_no_routing,
)
def routed_length(b: Batch) -> Iterator[Hit]:
    each = b.per_model(lambda m: (m.num_moe_layers or 0) * (m.experts_per_token or 0), 0)
    routed = b.lists("routed_experts")
    want = np.maximum(b.sequence_lengths - 1, 0) * each
    for row in np.flatnonzero(routed.given & (each > 0) & (routed.lengths != want)):
        message = f"{routed.lengths[row]} expert ids for {b.sequence_lengths[row]} tokens"
        whole = routed.lengths[row] == want[row] + each[row]
        hint = "leave out the last position, whose token was no input" if whole else None
        yield Hit(int(row), message, "routed_experts", str(want[row]), str(routed.lengths[row]), hint)


@rule(
    "E-ROUTED-ID",
    "an expert that the model does not have",
    phase="batch",
    clause="Every item of `routed_experts` MUST be from 0 to the model's `num_experts` - 1.",
    columns=("routed_experts", "model_id"),
    needs=("routed_experts",),
)
def routed_id(b: Batch) -> Iterator[Hit]:
    routed = b.lists("routed_experts")
    limit = np.repeat(b.per_model(lambda m: m.num_experts, np.iinfo(np.int16).max + 1), routed.lengths)
    bad = (routed.values < 0) | (routed.values >= limit)
    yield from b.item_hits(bad, "routed_experts", "is no expert of the model", expected="0 to num_experts - 1")


@rule(
    "E-ROUTED-TWICE",
    "one expert twice for one token",
    phase="batch",
    clause="The `experts_per_token` ids of one position and layer MUST be distinct.",
    columns=("routed_experts", "model_id"),
    needs=("routed_experts",),
    hint="a top-k picks distinct experts: a fill value, or another layout than positions x layers x k",
    unless=_no_routing,
)
def routed_twice(b: Batch) -> Iterator[Hit]:
    routed, each = b.lists("routed_experts"), b.per_model(lambda m: m.experts_per_token, 0)
    bad = np.zeros(len(routed.values), bool)
    for k in np.unique(each[each > 1]):
        own = np.repeat((each == k) & (routed.lengths % k == 0), routed.lengths)
        groups = np.sort(routed.values[own].reshape(-1, k), axis=1)
        bad[own] = np.repeat((groups[:, 1:] == groups[:, :-1]).any(axis=1), k)
    yield from b.item_hits(bad, "routed_experts", "is in a group that names an expert twice", expected="distinct")
