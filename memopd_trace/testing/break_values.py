"""Mutations of single rows: ids, state arrays, log-probabilities, versions, routes, and what profiles want."""

# ruff: noqa: D103 - the code that each function is tied to says what it breaks
from __future__ import annotations

import numpy as np

from memopd_trace.invocation import Invocation, Media, Sampling
from memopd_trace.metadata import TraceMetadata
from memopd_trace.testing.mutation import Rows, breaks, edit, on_tail, site, tail, where


@breaks("E-LENGTH-OUTPUT")
def logprobs_one_short(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = where(rows, lambda row: row.output_logprobs is not None and len(row.output_logprobs) > 0)
    return None if at is None else edit(rows, at, output_logprobs=rows[at].output_logprobs[1:])  # type: ignore[index]


@breaks("E-LENGTH-OUTPUT")
def stop_id_only_in_the_mask(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, 0, output_loss_mask=[False] * (len(rows[0].output_ids) + 1))


@breaks("E-LENGTH-SEQUENCE")
def positions_of_the_prompt_only(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = where(rows, lambda row: row.output_slots is None and len(row.output_ids) > 0)
    return None if at is None else edit(rows, at, position_ids=np.arange(len(rows[at].prompt_ids)))


@breaks("E-LENGTH-SEQUENCE")
def visibility_one_long(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    n = len(rows[0])
    return edit(rows, 0, visible_until=np.full(n + 1, n))


@breaks("E-MODEL-UNKNOWN")
def model_that_is_not_described(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, 0, model_id="".join(metadata.models) + "?")


@breaks("E-CATEGORY")
def unknown_finish_reason(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    # an empty output is right only beside certain words, so a call that has one would break that clause too
    return edit(rows, where(rows, lambda row: len(row.output_ids) > 0), finish_reason="done")


@breaks("E-CATEGORY")
def unregistered_rewrite_kind(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, where(rows, lambda row: row.relation == "rewrite"), rewrite_kind="compact")


output_lost = on_tail("E-OUTPUT-EMPTY", "output_lost", output_ids=[], output_logprobs=[])
negative_id = on_tail("E-ID-RANGE", "negative_id", prompt_ids=lambda s: [*s.ids, -100])


@breaks("E-ID-RANGE")
def id_beyond_the_model(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = site(metadata, rows)
    return tail(metadata, rows, {"output_ids": [*at.ids[:2], at.model.tokenizer.vocab_size]})


@breaks("W-ID-PADDED")
def id_in_the_padding(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = site(metadata, rows)
    t = at.model.tokenizer
    return tail(metadata, rows, {"output_ids": [*at.ids[:2], t.size]}) if t.size < t.vocab_size else None


prompt_lost = on_tail("E-NO-CONTEXT", "prompt_lost", prompt_ids=[])


@breaks("W-DOUBLE-BOS")
def begin_id_twice(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = site(metadata, rows)
    bos = at.model.tokenizer.bos_id
    return None if bos is None else tail(metadata, rows, {"prompt_ids": [bos, bos, *at.ids]})


@breaks("W-STOP-MISSING")
def stop_id_dropped(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return tail(metadata, rows, {"finish_reason": "stop"}) if site(metadata, rows).stops else None


@breaks("W-IDS-AFTER-STOP")
def ids_behind_the_stop_id(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = site(metadata, rows)
    return tail(metadata, rows, {"output_ids": [at.ids[0], at.stops[0], at.ids[1]]}) if at.stops else None


@breaks("W-STOP-UNTRAINED")
def stop_id_not_trained(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = site(metadata, rows)
    call = {"output_ids": [*at.ids[:2], *at.stops[:1]], "output_loss_mask": [True, True, False]}
    return tail(metadata, rows, call) if at.stops else None


negative_position = on_tail("E-POSITION-NEGATIVE", "negative_position", position_ids=[-1, 0, 1, 2, 3, 4])
never_visible = on_tail("E-VISIBILITY", "never_visible", visible_until=[0, 6, 6, 6, 6, 6])
visible_beyond_the_end = on_tail("E-VISIBILITY", "visible_beyond_the_end", visible_until=[7, 6, 6, 6, 6, 6])
visible_too_late = on_tail("E-VISIBILITY", "visible_too_late", visible_from=[1, 1, 2, 3, 4, 5])
slot_outside = on_tail("E-SLOT-RANGE", "slot_outside", output_slots=[0, 1, 3])
slot_filled_twice = on_tail("E-SLOT-DUPLICATE", "slot_filled_twice", output_slots=[0, 1, 1])
media_outside = on_tail("E-MEDIA-RANGE", "media_outside", media=[Media(2, 4, bytes(32))])
media_empty = on_tail("E-MEDIA-RANGE", "media_empty", media=[Media(1, 1, bytes(32))])
media_run_cut = on_tail(
    "E-MEDIA-RUN", "media_run_cut", prompt_ids=lambda s: s.ids[:1] * 3, media=[Media(0, 2, bytes(32))]
)
media_overlap = on_tail("E-MEDIA-ORDER", "media_overlap", media=[Media(0, 2, bytes(32)), Media(1, 3, bytes(32))])


@breaks("E-STATE-DIGEST")
def digest_of_another_state(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, 0, state_digest=bytes(32))


def _trained_value(value: float | None, rows: Rows) -> Rows | None:
    """The first logprob of a token to be trained becomes `value`."""
    for at, row in enumerate(rows):
        trained = np.flatnonzero(row.sampled() & row.loss_mask())
        if row.output_logprobs is not None and len(trained):
            logprobs = row.output_logprobs.tolist()
            logprobs[trained[0]] = value
            return edit(rows, at, output_logprobs=logprobs)
    return None


@breaks("E-LOGPROB-NAN")
def logprob_nan(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return _trained_value(float("nan"), rows)


@breaks("E-LOGPROB-POSITIVE")
def logprob_of_the_wrong_sign(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return _trained_value(0.5, rows)


@breaks("W-LOGPROB-ROUNDING")
def logprob_a_little_above_0(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return _trained_value(1e-4, rows)


@breaks("E-LOGPROB-INF")
def sampled_with_probability_0(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return _trained_value(float("-inf"), rows)


@breaks("E-LOGPROB-SENTINEL")
def logprob_filler(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return _trained_value(-9999.0, rows)


@breaks("E-LOGPROB-NULL")
def trained_without_logprob(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return _trained_value(None, rows)


HALF = [-(number + 1) / 64 for number in range(40)]
zeros = on_tail("W-LOGPROB-ZERO", "zeros", output_ids=lambda s: s.ids[:1] * 8, output_logprobs=[0.0] * 8)
half_precision = on_tail(
    "W-LOGPROB-QUANTISED", "half_precision", output_ids=lambda s: s.ids[:1] * 40, output_logprobs=HALF
)
negative_temperature = on_tail("E-SAMPLING-RANGE", "negative_temperature", sampling=Sampling(temperature=-1.0))
top_p_zero = on_tail("E-SAMPLING-RANGE", "top_p_zero", sampling=Sampling(temperature=1.0, top_p=0.0))
kind_unknown = on_tail("E-LOGPROB-KIND", "kind_unknown", logprob_kind="unknown", sampling=Sampling(temperature=0.5))
TOP_P = {"logprob_kind": "processed", "sampling": Sampling(temperature=1.0, top_p=0.9)}
support_lost = on_tail("E-SUPPORT-UNKNOWN", "support_lost", **TOP_P)
mass_above_1 = on_tail("E-KEPT-MASS", "mass_above_1", output_kept_logmass=[-0.1, 0.5, -0.1], **TOP_P)
forced_and_trained = on_tail(
    "E-LOSS-UNSAMPLED", "forced_and_trained", output_sampled=[True, False, True], output_loss_mask=[True] * 3
)
rejected_and_trained = on_tail(
    "E-LOSS-REJECTED", "rejected_and_trained", accepted=False, output_loss_mask=[False, True, False]
)
retokenized = on_tail("E-RETOKENIZED-LOGPROBS", "retokenized", token_source="retokenized")
version_of_the_start = on_tail(
    "E-POLICY-VERSION", "version_of_the_start", policy_version=4, output_policy_versions=[4, 4, 5]
)
version_goes_back = on_tail(
    "W-VERSION-DECREASES", "version_goes_back", policy_version=4, output_policy_versions=[5, 5, 4]
)
cache_of_the_future = on_tail("E-KV-VERSION", "cache_of_the_future", policy_version=4, kv_policy_version=5)
stale_cache = on_tail("W-KV-STALE", "stale_cache", policy_version=4, kv_policy_version=3)


def _routed(metadata: TraceMetadata, rows: Rows, first: int, cut: int) -> Rows | None:
    """A last call whose first route is `first` (-1: one more than there are), without the last `cut` of its routes."""
    model = site(metadata, rows).model
    if not (model.num_moe_layers and model.experts_per_token and model.num_experts):
        return None
    routes = np.tile(np.arange(model.experts_per_token), 5 * model.num_moe_layers)
    routes[0] = first % (model.num_experts + 1)
    return tail(metadata, rows, {"routed_experts": routes[: len(routes) - cut]})


@breaks("E-ROUTED-LENGTH")
def routes_cut(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return _routed(metadata, rows, 0, cut=1)


@breaks("E-ROUTED-ID")
def expert_that_is_not_there(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return _routed(metadata, rows, -1, cut=0)


@breaks("E-ROUTED-TWICE")
def one_expert_twice(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return _routed(metadata, rows, 1, cut=0)


def _trains(row: Invocation) -> bool:
    return bool((row.sampled() & row.loss_mask()).any())


@breaks("E-NEEDS-LOGPROBS", profile="policy")
def logprobs_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, where(rows, _trains), output_logprobs=None, output_kept_logmass=None)


@breaks("E-NEEDS-LOGPROB-KIND", profile="policy")
def kind_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return tail(metadata, rows, {"logprob_kind": None})


@breaks("E-NEEDS-SAMPLING", profile="policy")
def temperature_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return tail(metadata, rows, {"sampling": Sampling(seed=1)})


@breaks("E-NEEDS-POLICY-VERSION", profile="policy")
def versions_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    at = where(rows, _trains)
    return edit(rows, at, policy_version=None, output_policy_versions=None, kv_policy_version=None)


@breaks("E-NEEDS-ENGINE-IDS", profile="policy")
def token_source_lost(metadata: TraceMetadata, rows: Rows) -> Rows | None:
    return edit(rows, where(rows, _trains), token_source=None)
