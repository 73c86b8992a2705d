"""Rules about behaviour logprobs: the values, what they mean, and which tokens they may train."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memopd_trace.rules.batch import Batch, Bools
from memopd_trace.rules.registry import Hit, rule

ROUNDING = 1e-3  # nats by which a float32 log-softmax may come out above 0
SENTINEL = -1000.0  # no softmax over a vocabulary gives a sampled token e^-1000
ZERO_RUN = 8  # tokens that are all certain: unlikely enough to warn of
PRECISION_RUN, PRECISION_DISTINCT = 32, 16  # values, and distinct ones, before low precision is no accident
TINY = 1e-3  # float32 log-softmax itself is coarse this close to 0: a few multiples of 2^-24
HALF_BITS = 0x1FFF  # the mantissa bits of float32 that neither float16 nor bfloat16 has
LP = ("output_logprobs",)
USUAL = ("output_logprobs", SENTINEL, 0)  # a batch whose values are all in this range breaks none of the first rules


@rule(
    "E-LOGPROB-NAN",
    "a logprob is NaN",
    phase="batch",
    clause="A logprob MUST NOT be NaN.",
    columns=("output_logprobs", "output_ids"),
    needs=LP,
    hint="the logits were bad; where there is no value, write null",
)
def logprob_nan(b: Batch) -> Iterator[Hit]:
    if b.all_within(*USUAL):
        return
    lp = b.output("output_logprobs")
    yield from b.output_hits(np.isnan(lp.values), "output_logprobs", "is NaN", lp.values, expected="a number or null")


@rule(
    "E-LOGPROB-POSITIVE",
    "a logprob above 0",
    phase="batch",
    clause="A logprob MUST NOT exceed 0 by more than 0.001 nats.",
    columns=("output_logprobs", "output_ids"),
    needs=LP,
    hint="a probability above 1: a filler, a loss with the wrong sign, or half precision",
)
def logprob_positive(b: Batch) -> Iterator[Hit]:
    if b.all_within(*USUAL):
        return
    lp = b.output("output_logprobs")
    yield from b.output_hits(lp.values > ROUNDING, "output_logprobs", "is positive", lp.values, expected="at most 0")


@rule(
    "W-LOGPROB-ROUNDING",
    "a logprob a rounding error above 0",
    phase="batch",
    clause="A logprob SHOULD be at most 0.",
    columns=("output_logprobs", "output_ids"),
    needs=LP,
    hint="compute log-softmax in float32 and keep it there",
)
def logprob_rounding(b: Batch) -> Iterator[Hit]:
    if b.all_within(*USUAL):
        return
    lp = b.output("output_logprobs")
    bad = (lp.values > 0) & (lp.values <= ROUNDING)
    yield from b.output_hits(bad, "output_logprobs", "is above 0", lp.values, expected="at most 0")


@rule(
    "E-LOGPROB-INF",
    "a sampled token with probability zero",
    phase="batch",
    clause="The logprob of a sampled token MUST NOT be -inf.",
    columns=("output_logprobs", "output_ids", "output_sampled"),
    needs=LP,
    hint="a token of probability 0 cannot be sampled: a mask was applied after sampling, or it was forced "
    "(output_sampled false)",
)
def logprob_inf(b: Batch) -> Iterator[Hit]:
    if b.all_within(*USUAL):
        return
    lp = b.output("output_logprobs")
    bad = np.isneginf(lp.values) & b.sampled
    yield from b.output_hits(bad, "output_logprobs", "is -inf", lp.values, expected="a finite number or null")


@rule(
    "E-LOGPROB-SENTINEL",
    "a filler value in place of a logprob",
    phase="batch",
    clause="A finite logprob MUST be above -1000; a missing one is null, never a filler.",
    columns=("output_logprobs", "output_ids"),
    needs=LP,
    hint='servers write -9999 for "none"; write null',
)
def logprob_sentinel(b: Batch) -> Iterator[Hit]:
    if b.all_within(*USUAL):
        return
    lp = b.output("output_logprobs")
    bad = (lp.values <= SENTINEL) & np.isfinite(lp.values)
    yield from b.output_hits(bad, "output_logprobs", "is a filler", lp.values, expected=f"above {SENTINEL:g}, or null")


@rule(
    "E-LOGPROB-NULL",
    "a token to be trained has no logprob",
    phase="batch",
    clause="Where a row gives `output_logprobs`, every token to be trained MUST have one.",
    columns=("output_logprobs", "output_ids", "output_sampled", "output_loss_mask", "accepted"),
    needs=LP,
    hint="take the token out of output_loss_mask, or leave the whole list null",
)
def logprob_null(b: Batch) -> Iterator[Hit]:
    lp = b.output("output_logprobs")
    if lp.given.all():
        return
    bad = b.given("output_logprobs")[b.row_of_output] & b.trained & ~lp.given
    yield from b.output_hits(bad, "output_logprobs", "is null on a token to be trained", expected="a number of nats")


@rule(
    "W-LOGPROB-ZERO",
    "every logprob of a call is exactly 0",
    phase="batch",
    clause="The logprobs of 8 or more tokens SHOULD NOT all be exactly 0, unless sampling left no choice.",
    columns=("output_logprobs", "output_ids", "logprob_kind", "sampling"),
    needs=LP,
    hint="0.0 means certainty; where there is no value, write null",
)
def logprob_zero(b: Batch) -> Iterator[Hit]:
    lp = b.output("output_logprobs")
    suspect = b.given("output_logprobs") & ~b.any_of_row(lp.values != 0)  # a null has the value 0
    if not suspect.any():
        return
    greedy = b.numbers("sampling", "temperature", 1.0) == 0
    no_choice = greedy & b.equals("logprob_kind", "tempered", "processed")
    no_choice |= (b.numbers("sampling", "top_k", 0) == 1) & b.equals("logprob_kind", "processed")
    for row in np.flatnonzero(suspect & ~no_choice).tolist():
        given = int(lp.given[b.outputs_of(row)].sum())
        if given >= ZERO_RUN:
            yield Hit(row, f"all {given} logprobs are exactly 0.0", "output_logprobs", "below 0", "0.0")


@rule(
    "W-LOGPROB-QUANTISED",
    "logprobs with no more than half precision",
    phase="batch",
    clause="Logprobs SHOULD be computed and kept in float32.",
    columns=("output_logprobs", "output_ids"),
    needs=LP,
    hint="-12.3457 becomes -12.375 in bfloat16: a ratio of 1.03 with nothing changed",
)
def logprob_quantised(b: Batch) -> Iterator[Hit]:
    lp = b.output("output_logprobs")
    fine = (np.ascontiguousarray(lp.values, np.float32).view(np.uint32) & HALF_BITS) != 0
    fine &= lp.values < -TINY  # which neither a null (0) nor NaN is; -inf has no fine bits
    for row in np.flatnonzero(b.given("output_logprobs") & ~b.any_of_row(fine)).tolist():
        values = lp.values[b.outputs_of(row)]
        real = values[(values < -TINY) & np.isfinite(values)]
        if len(real) >= PRECISION_RUN and len(np.unique(real)) >= PRECISION_DISTINCT:
            message = f"all {len(real)} logprobs fit float16 or bfloat16"
            yield Hit(row, message, "output_logprobs", "float32 values")


def _cuts_support(b: Batch) -> Bools:
    """[B]: the sampler kept only a part of the vocabulary."""
    cut = (b.numbers("sampling", "top_p", 1.0) < 1) | (b.numbers("sampling", "top_k", 0) > 0)
    return cut | (b.numbers("sampling", "min_p", 0.0) > 0)


def reshapes(b: Batch) -> Bools:
    """[B]: the sampler's distribution is not the model's softmax at temperature 1."""
    changed = b.numbers("sampling", "temperature", 1.0) != 1
    return changed | (b.numbers("sampling", "repetition_penalty", 1.0) != 1) | _cuts_support(b)


@rule(
    "E-SAMPLING-RANGE",
    "a sampling setting that no sampler accepts",
    phase="batch",
    clause="Sampling settings MUST be finite and in their ranges: temperature >= 0, 0 < `top_p` <= 1, …",
    columns=("sampling",),
)
def sampling_range(b: Batch) -> Iterator[Hit]:
    for name, low, high, default in (
        ("temperature", 0.0, np.inf, 1.0),
        ("top_p", np.finfo(float).tiny, 1.0, 1.0),
        ("top_k", 0, np.inf, 0),
        ("min_p", 0.0, 1.0, 0.0),
        ("repetition_penalty", np.finfo(float).tiny, np.inf, 1.0),
    ):
        values = b.numbers("sampling", name, default)
        for row in np.flatnonzero(~((values >= low) & (values <= high) & np.isfinite(values))):
            yield Hit(int(row), f"sampling.{name} is out of range", "sampling", None, str(values[row]))


@rule(
    "E-LOGPROB-KIND",
    "it is not known what the logprobs mean",
    phase="batch",
    clause="`logprob_kind` MUST be known where sampling changed the distribution.",
    columns=("output_logprobs", "logprob_kind", "sampling"),
    needs=LP,
    hint="engines return them before or after temperature and top-p; ask yours which, and record it",
)
def logprob_kind(b: Batch) -> Iterator[Hit]:
    bad = b.given("output_logprobs") & reshapes(b) & unknown_kind(b)
    for row in np.flatnonzero(bad):
        settings = {k: v for k, v in b.column("sampling")[int(row)].as_py().items() if v is not None}
        message = f"logprob_kind is {b.text('logprob_kind', int(row)) or 'null'} under {settings}"
        yield Hit(int(row), message, "logprob_kind", "raw, tempered or processed")


def unknown_kind(b: Batch) -> Bools:
    """[B]: `logprob_kind` is null or says `unknown`."""
    return ~b.given("logprob_kind") | b.equals("logprob_kind", "unknown")


@rule(
    "E-SUPPORT-UNKNOWN",
    "logprobs renormalised over a set that is not recorded",
    phase="batch",
    clause="`processed` logprobs under top-k, top-p or min-p MUST come with `output_kept_logmass`.",
    columns=(
        "output_logprobs", "output_ids", "logprob_kind", "sampling", "output_kept_logmass", "output_sampled",
        "output_loss_mask", "accepted",
    ),
    needs=LP,
    hint="record raw or tempered logprobs, or the kept set's log mass: the ratio is off by it",
)  # fmt: skip
def support_unknown(b: Batch) -> Iterator[Hit]:
    renormalised = b.equals("logprob_kind", "processed") & _cuts_support(b)
    if not renormalised.any():
        return
    lp, mass = b.output("output_logprobs"), b.output("output_kept_logmass")
    bad = renormalised[b.row_of_output] & b.trained & lp.given & ~mass.given
    yield from b.output_hits(bad, "output_kept_logmass", "is missing under 'processed'", expected="a log mass")


@rule(
    "E-KEPT-MASS",
    "a kept mass that is no probability",
    phase="batch",
    clause="`output_kept_logmass` MUST be a finite number of nats, at most 0.001 above 0.",
    columns=("output_kept_logmass", "output_ids"),
    needs=("output_kept_logmass",),
    hint="it is the logarithm of a probability: ln 0.8 = -0.223",
)
def kept_mass(b: Batch) -> Iterator[Hit]:
    mass = b.output("output_kept_logmass")
    bad = mass.given & (~np.isfinite(mass.values) | (mass.values > ROUNDING))
    yield from b.output_hits(bad, "output_kept_logmass", "is no log mass", mass.values, expected="finite, at most 0")


@rule(
    "E-LOSS-UNSAMPLED",
    "a token that the policy did not choose is to be trained",
    phase="batch",
    clause="`output_loss_mask` MUST be false where `output_sampled` is false.",
    columns=("output_loss_mask", "output_sampled", "output_ids"),
    needs=("output_loss_mask",),
)
def loss_unsampled(b: Batch) -> Iterator[Hit]:
    mask = b.output("output_loss_mask")
    bad = mask.given & mask.values.astype(bool) & ~b.sampled
    yield from b.output_hits(bad, "output_loss_mask", "is true, output_sampled is false", expected="false")


@rule(
    "E-LOSS-REJECTED",
    "a rejected attempt is to be trained",
    phase="batch",
    clause="`output_loss_mask` MUST be false throughout where `accepted` is false.",
    columns=("output_loss_mask", "output_ids", "accepted"),
    needs=("accepted",),
    hint="leave the mask null: nothing of a rejected attempt is trained",
)
def loss_rejected(b: Batch) -> Iterator[Hit]:
    mask = b.output("output_loss_mask")
    rejected = ~b.flags("accepted", True)
    bad = mask.given & mask.values.astype(bool) & rejected[b.row_of_output]
    yield from b.output_hits(bad, "output_loss_mask", "is true on a rejected attempt", expected="false")


@rule(
    "E-RETOKENIZED-LOGPROBS",
    "logprobs on ids that were derived from text",
    phase="batch",
    clause="A row whose `token_source` is `retokenized` MUST have no `output_logprobs`.",
    columns=("token_source", "output_logprobs", "output_ids"),
    needs=("token_source",),
    hint="they belong to the engine's ids, which these need not be: record those, or leave this null",
)
def retokenized_logprobs(b: Batch) -> Iterator[Hit]:
    derived = b.equals("token_source", "retokenized")
    if not derived.any():
        return
    bad = derived[b.row_of_output] & b.output("output_logprobs").given
    yield from b.output_hits(bad, "output_logprobs", "belongs to ids the engine did not report", expected="null")
