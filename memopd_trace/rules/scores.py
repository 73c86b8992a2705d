"""Rules about scores: whose tokens they are for, and whether a row's signals can be what one teacher says of them."""

# ruff: noqa: D103 - each function's entry says what it checks
from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from memopd_trace.rules.batch import Array, Bools
from memopd_trace.rules.behaviour import ROUNDING, SENTINEL
from memopd_trace.rules.joined import ScoreBatch
from memopd_trace.rules.registry import Hit, rule
from memopd_trace.rules.rowindex import digest_cells, digest_hex
from memopd_trace.tiers import least_kl

KEY = ("episode_id", "invocation_index")
MASS = 1e-3  # nats by which the mass of a whole distribution may differ from 1 in float32
CHECKED_ROWS, CHECKED_TARGETS = 8, 8  # of a folder, and of a row: the self-check recomputes whole vocabularies


@rule(
    "E-SCORES-ROW",
    "a score of a row that the trace does not hold",
    phase="scores-shape",
    clause="A score MUST be of a row of the trace.",
    columns=KEY,
    wants="scores",
    hint="are these scores of another trace?",
)
def row(b: ScoreBatch) -> Iterator[Hit]:
    yield from b.unknown_hits()


@rule(
    "E-SCORES-DUPLICATE",
    "a row is scored twice in one folder",
    phase="scores-shape",
    clause="A pair (`episode_id`, `invocation_index`) MUST occur once in a scores folder.",
    columns=KEY,
    wants="scores",
    hint="which of the two is right cannot be told; score the trace again into a new folder",
)
def duplicate(b: ScoreBatch) -> Iterator[Hit]:
    for at in np.flatnonzero(b.repeated):
        yield Hit(int(at), "the row has a score already", "invocation_index")


@rule(
    "E-SCORES-STATE",
    "a score is of another state than the trace's row",
    phase="scores-shape",
    clause="A score row MUST carry the state digest of the trace row it is joined with.",
    columns=("state_digest",),
    wants="scores",
    hint="the trace changed after it was scored, or these are scores of another trace; score it again",
)
def same_state(b: ScoreBatch) -> Iterator[Hit]:
    yield from b.state_hits()


@rule(
    "E-SCORES-RUN",
    "a score is of another teacher or view than its run",
    phase="scores-shape",
    clause="`teacher_id` and `view` MUST be those of the run's metadata.",
    columns=("teacher_id", "view"),
    wants="scores",
    hint="one folder holds one run",
)
def same_run(b: ScoreBatch) -> Iterator[Hit]:
    for name in ("teacher_id", "view"):
        expected = getattr(b.run, name)
        yield from b.row_hits(~b.equals(name, expected), name, f"{name} is not the run's", expected=expected)


@rule(
    "E-SCORES-LENGTH",
    "a score's lists are not as long as its targets, or not as wide as the run says",
    phase="scores-shape",
    clause="Every signal list MUST have one item for each item of `output_index`, as wide as the metadata says.",
    columns=("output_index", "logprob", "logsumexp", "entropy", "topk_ids", "topk_logprobs", "tail_logprob", "hidden",
             "hidden_scale", "hidden_logsumexp", "hidden_kl", "logits"),
    wants="scores",
    hint="trimming one list and not the others gives each token its neighbour's score",
)  # fmt: skip
def length(b: ScoreBatch) -> Iterator[Hit]:
    targets = b.output_lengths
    for name in b.run.signal_columns:
        lengths = b.list_lengths(name)
        for at in np.flatnonzero(lengths != targets):
            have, want = ("no list" if lengths[at] < 0 else f"{lengths[at]} items"), f"{targets[at]} items"
            yield Hit(int(at), f"{name} has {have} for {targets[at]} targets", name, want, have)
        for at in np.flatnonzero(b.wrong_width(name) & (lengths == targets)):
            yield Hit(int(at), f"a list of {name} has another width", name, f"{b.run.width_of(name)} items")


@rule(
    "E-SCORES-INDEX",
    "a score's indices are no rising indices into the output",
    phase="scores-shape",
    clause="`output_index` MUST be strictly rising indices into the trace row's `output_ids`.",
    columns=("output_index",),
    wants="scores",
    hint="targets are scattered back by index, never as the last n tokens",
)
def index(b: ScoreBatch) -> Iterator[Hit]:
    values = b.vector("output_index")
    limit = b.known["outputs"][b.row_of_output]
    first = b.index_of_output == 0
    falls = ~first & (values <= np.r_[-1, values[:-1]]) if len(values) else first
    expected = "rising, from 0 to len(output_ids) - 1"
    bad = (values < 0) | (values >= limit) | falls
    yield from b.output_hits(bad, "output_index", "is out of range or order", values, expected=expected)


@rule(
    "E-SCORES-NONFINITE",
    "a stored score is NaN or infinite",
    phase="scores",
    clause="A score MUST be finite, but for -inf where `topk_logprobs`, `tail_logprob` or `logits` say probability 0.",
    columns=("logprob", "logsumexp", "entropy", "topk_logprobs", "tail_logprob", "hidden", "hidden_scale",
             "hidden_logsumexp", "hidden_kl", "logits"),
    wants="scores",
    hint="a target without a score is left out of output_index, never filled",
)  # fmt: skip
def nonfinite(b: ScoreBatch) -> Iterator[Hit]:
    for name, values in b.each_signal():
        zero_fits = name in ("topk_logprobs", "tail_logprob", "logits")
        bad = np.isnan(values) | (np.isposinf(values) if zero_fits else np.isinf(values))
        yield from b.target_hits(bad, name, "is not finite", expected="a finite number")
    if b.run.hidden_dtype is not None:
        whole: Bools = np.all(np.isfinite(b.states()), axis=1)
        yield from b.output_hits(~whole, "hidden", "is not finite", expected="finite numbers")


@rule(
    "E-SCORES-POSITIVE",
    "a score gives a probability above 1",
    phase="scores",
    clause="`logprob`, `topk_logprobs` and `tail_logprob` MUST NOT exceed 0 by more than 0.001 nats.",
    columns=("logprob", "topk_logprobs", "tail_logprob"),
    wants="scores",
    hint="a filler, a loss with the wrong sign, or logits in place of log-probabilities",
)
def positive(b: ScoreBatch) -> Iterator[Hit]:
    for name, values in b.each_signal():
        if name in ("logprob", "topk_logprobs", "tail_logprob"):
            yield from b.target_hits(values > ROUNDING, name, "is positive", expected="at most 0")


@rule(
    "E-SCORES-SENTINEL",
    "a filler value in place of a score",
    phase="scores",
    clause="`logprob` MUST be above -1000; a target without a score is left out, never filled.",
    columns=("logprob",),
    wants="scores",
    hint='servers write -9999 for "none"; leave the target out of output_index',
)
def sentinel(b: ScoreBatch) -> Iterator[Hit]:
    values = b.vector("logprob")
    bad = (values <= SENTINEL) & np.isfinite(values)
    yield from b.target_hits(bad, "logprob", "is a filler", expected=f"above {SENTINEL:g}")


@rule(
    "E-SCORES-ENTROPY",
    "an entropy that no distribution over the vocabulary has",
    phase="scores",
    clause="`entropy` MUST be from 0 to ln(size) nats, to 0.001.",
    columns=("entropy",),
    wants="scores",
    hint="bits in place of nats, or the entropy of something else",
)
def entropy(b: ScoreBatch) -> Iterator[Hit]:
    values, most = b.vector("entropy"), float(np.log(b.size))
    bad = (values < -ROUNDING) | (values > most + ROUNDING)
    yield from b.target_hits(bad, "entropy", "is out of range", expected=f"0 to {most:.4f}")


def _no_topk(b: ScoreBatch) -> str | None:
    return None if "topk" in b.run.signals else "the scores hold no signal 'topk'"


@rule(
    "E-SCORES-TOPK-IDS",
    "chosen ids that repeat or are no ids",
    phase="scores",
    clause="A target's `topk_ids` MUST be distinct ids from 0 to `size` - 1.",
    columns=("topk_ids",),
    wants="scores",
    unless=_no_topk,
    hint="an id twice counts its mass twice; a pad id has none",
)
def topk_ids(b: ScoreBatch) -> Iterator[Hit]:
    ids = b.matrix("topk_ids")
    yield from b.target_hits((ids < 0) | (ids >= b.size), "topk_ids", "is no id", expected=f"0 to {b.size - 1}")
    ranked = np.sort(ids, axis=1)
    repeated = (ranked[:, 1:] == ranked[:, :-1]).any(1)
    yield from b.output_hits(repeated, "topk_ids", "holds an id twice", expected="distinct ids")


@rule(
    "E-SCORES-TOPK-ORDER",
    "chosen ids that are not best first",
    phase="scores",
    clause="Where `topk_source` is `teacher`, `topk_logprobs` MUST NOT rise.",
    columns=("topk_logprobs",),
    wants="scores",
    unless=lambda b: _no_topk(b) or (None if b.run.topk_source == "teacher" else "the teacher did not choose the ids"),
    hint="sort ids and log-probabilities together",
)
def topk_order(b: ScoreBatch) -> Iterator[Hit]:
    values = b.matrix("topk_logprobs")
    bad = np.zeros(values.shape, bool)
    bad[:, 1:] = values[:, 1:] > values[:, :-1]
    yield from b.target_hits(bad, "topk_logprobs", "rises", expected="best first")


@rule(
    "E-SCORES-TOPK-MASS",
    "the chosen ids and the tail are not one whole distribution",
    phase="scores",
    clause="The mass of `topk_logprobs` and `tail_logprob` together MUST be 1, to 0.001 nats.",
    columns=("topk_logprobs", "tail_logprob"),
    wants="scores",
    unless=_no_topk,
    hint="renormalised over the chosen ids? then the tail is lost; or the tail is of another target",
)
def topk_mass(b: ScoreBatch) -> Iterator[Hit]:
    parts = np.concatenate([b.matrix("topk_logprobs"), b.vector("tail_logprob")[:, None]], axis=1)
    mass = log_sum_exp(parts)
    yield from b.output_hits(np.abs(mass) > MASS, "tail_logprob", "leaves another mass", mass, expected="0 nats in all")


@rule(
    "E-SCORES-TARGET",
    "a log-probability is not that of the sampled id",
    phase="scores",
    clause="`logprob` MUST be what `topk_logprobs` and `logits` say of the sampled id, to the run's `tolerance`.",
    columns=("logprob", "topk_ids", "topk_logprobs", "logits"),
    wants="scores",
    unless=lambda b: (
        None if {"topk", "full"} & set(b.run.signals) else "the scores hold neither signal 'topk' nor 'full'"
    ),
    hint="scores shifted by one against the tokens look like this",
)
def target(b: ScoreBatch) -> Iterator[Hit]:
    logprob, ids, tolerance = b.vector("logprob"), b.sampled_ids, b.run.tolerance
    if "topk" in b.run.signals:
        chosen, values = b.matrix("topk_ids") == ids[:, None], b.matrix("topk_logprobs")
        inside = chosen.any(1)
        listed = np.where(inside, np.where(chosen, values, 0).sum(1), logprob)
        bad = np.abs(listed - logprob) > tolerance
        if b.run.topk_source == "teacher":  # what is better than the last of the best is one of them
            bad |= ~inside & (logprob > values[:, -1] + tolerance)
        message = "is not what the chosen ids say"
        yield from b.output_hits(bad, "logprob", message, logprob, expected="the sampled id's log-probability")
    if "full" in b.run.signals:
        logits = b.matrix("logits") / b.run.temperature
        own = logits[np.arange(len(ids)), np.minimum(ids, b.size - 1)] - log_sum_exp(logits)
        bad = (np.abs(own - logprob) > tolerance) | (ids >= b.size)
        yield from b.output_hits(bad, "logprob", "is not what the logits say", logprob)


@rule(
    "E-SCORES-LOGITS",
    "a logsumexp that is not that of the logits",
    phase="scores",
    clause="`logsumexp` MUST be that of `logits`, to the run's `tolerance`.",
    columns=("logsumexp", "logits"),
    wants="scores",
    unless=lambda b: None if "full" in b.run.signals else "the scores hold no signal 'full'",
    hint="logits of padded ids counted in, or another temperature",
)
def logits(b: ScoreBatch) -> Iterator[Hit]:
    stored, actual = b.vector("logsumexp"), log_sum_exp(b.matrix("logits") / b.run.temperature)
    bad = np.abs(stored - actual) > b.run.tolerance
    yield from b.output_hits(bad, "logsumexp", "is not that of the logits", stored)


@rule(
    "E-SCORES-TIER",
    "a scale or an error that no stored state has",
    phase="scores",
    clause="`hidden_scale` MUST be above 0, and `hidden_kl` MUST NOT be below 0.",
    columns=("hidden_scale", "hidden_kl"),
    wants="scores",
    unless=lambda b: "the states are exact" if b.run.hidden_tier == "exact" else None,
    hint="a scale of 0 makes every state alike; a divergence is never negative",
)
def tier(b: ScoreBatch) -> Iterator[Hit]:
    yield from b.target_hits(b.matrix("hidden_scale") <= 0, "hidden_scale", "is no scale", expected="above 0")
    yield from b.target_hits(b.vector("hidden_kl") < 0, "hidden_kl", "is no divergence", expected="at least 0")


def _no_check(b: ScoreBatch) -> str | None:
    if b.run.hidden_dtype is None:
        return "the scores hold no states"
    return b.context.headless


@rule(
    "E-SCORES-CHECK",
    "scores do not follow from their states and head",
    phase="scores",
    clause="`logsumexp` and `logprob` MUST be what state and head give, to the run's `tolerance`; of rebuilt states, "
    "`hidden_logsumexp` MUST be, and `logprob` MUST be within `hidden_kl`.",
    columns=("logsumexp", "logprob", "hidden", "hidden_scale", "hidden_logsumexp", "hidden_kl"),
    wants="scores",
    unless=_no_check,
    hint="these scores are not of this head and these states; score again",
)
def check(b: ScoreBatch) -> Iterator[Hit]:
    """Of eight rows spread over the folder, the first targets: whole vocabularies are recomputed."""
    every = max(1, b.context.folder.rows // CHECKED_ROWS)
    number = sum(b.context.rows.values()) + b.row
    chosen = (number % every == 0)[b.row_of_output] & (b.index_of_output < CHECKED_TARGETS)
    if not chosen.any():
        return
    logsumexp, logprob = b.from_states(chosen)
    stored, tolerance = b.vector("logprob")[chosen], b.run.tolerance
    name = "logsumexp" if b.run.hidden_tier == "exact" else "hidden_logsumexp"
    yield from _off(b, chosen, name, np.abs(logsumexp - b.vector(name)[chosen]), tolerance)
    if b.run.hidden_tier == "exact":
        yield from _off(b, chosen, "logprob", np.abs(logprob - stored), tolerance)
    else:
        most = np.maximum(b.vector("hidden_kl")[chosen], 0)
        yield from _off(b, chosen, "hidden_kl", least_kl(stored, logprob, tolerance), most)


def _off(b: ScoreBatch, chosen: Bools, name: str, nats: Array, limit: Array | float) -> Iterator[Hit]:
    """Rows with a chosen target that is off by more nats than the limit."""
    error, bad = np.zeros(len(chosen)), np.zeros(len(chosen), bool)
    error[chosen], bad[chosen] = nats, ~(nats <= limit)
    what = "is less than logprob and rebuilt state differ by, nats" if name == "hidden_kl" else "is off by nats"
    yield from b.output_hits(bad, name, what, error)


@rule(
    "E-SCORES-VIEW",
    "a score under a view does not say which prompt was scored",
    phase="scores",
    clause="`view_digest` MUST be the digest of the viewed sequence, and null under the view `recorded`.",
    columns=("view", "view_digest"),
    wants="scores",
    hint="the views changed after scoring, or are of another file; score again",
)
def view(b: ScoreBatch) -> Iterator[Hit]:
    given, stated = b.given("view_digest"), digest_cells(b.column("view_digest"))
    if not b.under_view:
        yield from b.row_hits(given, "view_digest", "is given for the recorded state", expected="null")
        return
    yield from b.row_hits(~given, "view_digest", "is missing", expected="32 bytes")
    if b.context.views is not None and not b.context.of_every_row:
        known = b.context.views.digests_of(b.run.view)[b.at]
        for at in np.flatnonzero(given & (stated != known)):
            expected = digest_hex(known[at]) if known[at] else "no view of this row"
            yield Hit(int(at), "another prompt was scored", "view_digest", expected, digest_hex(stated[at]))


def log_sum_exp(values: Array) -> Array:
    """float32 [M, W] -> float64 [M]; -inf where a row holds nothing but -inf."""
    top = values.max(axis=1, initial=-np.inf)
    top = np.where(np.isfinite(top), top, np.float32(0))
    sums = np.exp(values - top[:, None]).sum(axis=1, dtype=np.float64)
    result: Array = top + np.log(sums)
    return result
