"""The report of an audit, as an object and as JSON.

    audit_version      "1": names and meanings below hold; further names may be added under the same version
    model, model_id    the model that ran, and which of the trace's models it stands for
    weights            `same` as those that the trace records for it (`weights_digest`), `other`, or `unknown`: none is
                       recorded, or it cannot be compared
    probe              in which layout the model is exact, and why
    attention          the attention backend, and why it
    clip_epsilon       the epsilon of `false_clip_rate`
    resolution         relative width of a percentile's bin (`memopd_scorer.audit_tally`)
    recorded           a comparison under the recorded state (below)
    by_segment_kind    {label: comparison}: the segment an output token lies in, else `after KIND` of the last one
                       before it, else `none`
    by_policy_version  {label: comparison}: `none` where no version is recorded
    by_depth           {label: comparison}: parents between the invocation and its root; `none` without a lineage
    by_relation        {label: comparison}: the relation, with `/` and the rewrite kind where there is one
    by_output_index    {label: comparison}: the token's index in its output, in powers of two (`4-7`)
    lag                -1, 0 or 1: with 1, recorded[i + 1] is the log-probability of output token i; `null` where no
                       output has two tokens to compare
    lags               {"-1", "1": evidence} for that, over all tokens that have a neighbour
    readings           {name: evidence} for other meanings of the numbers, over the first tokens (`READING_TOKENS`)
    explanation        {"kind", "text"}: see `explain`
    worst              tokens with the largest |Δ|: abs_delta, episode_id, invocation_index, output_index, token_id,
                       recorded, recomputed
    skipped_tokens     sampled tokens of this model that could not be compared
    left_out           {reason: those tokens}
    other_models       {model id: sampled tokens of the rows of the trace's other models, which were not compared}
    against            `null`, or {"view", a comparison under that view, "by_depth", "by_output_index", "left_out"}
    difference         `null`, or the comparison of the two recomputed numbers, Δ = under the view - under the
                       recorded state: what the view alone costs
    top1_flips         `null`, or how many of `difference.tokens` have another most likely id under the view
    limits, failed     {option: limit} as given, and [{"limit", "value", "at_most"}] for those that did not hold

    comparison         tokens, max_abs, p50_abs, p99_abs, p999_abs, mean_abs, mean_signed, kl, false_clip_rate
    evidence           pairs, mean_abs, mean_abs_as_recorded, times_closer, sigmas

All log-probabilities, differences and `kl` are in nats; shares lie in 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopd_scorer.audit_tally import RESOLUTION, Comparison, Evidence, WorstToken

AUDIT_VERSION = "1"
TABLES = ("by_segment_kind", "by_policy_version", "by_depth", "by_relation", "by_output_index")
AGAINST_TABLES = ("by_depth", "by_output_index")
EXACT = 1e-4  # nats: a float32 model on another machine
ROUNDING = 0.02  # nats: the typical difference of a half-precision run
LAG_TIMES, READING_TIMES = 2.0, 3.0  # how much closer another reading has to be
Tables = dict[str, dict[str, Comparison]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the comparison under the recorded state must not exceed; `None` = not asked.

    `max_abs` and `max_p99` in nats, `max_false_clips` a share in 0 to 1.
    """

    max_abs: float | None = None
    max_p99: float | None = None
    max_false_clips: float | None = None

    def failed(self, found: Comparison) -> list[dict[str, Any]]:
        """The limits that do not hold: name, value, limit. A NaN holds none."""
        values = {"max_abs": found.max_abs, "max_p99": found.p99_abs, "max_false_clips": found.false_clip_rate}
        limits = self.to_json()
        return [
            {"limit": name, "value": value, "at_most": limits[name]}
            for name, value in values.items()
            if name in limits and not value <= limits[name]
        ]

    def to_json(self) -> dict[str, float]:
        """Those that were given."""
        return {n: v for n in self.__slots__ if (v := getattr(self, n)) is not None}


@dataclass(frozen=True, slots=True)
class Against:
    """The comparison of the same tokens under another view. `compared` is `None` where no token was left to compare,
    and so are `difference` and `top1_flips`; `left_out` counts tokens by reason."""

    view: str
    compared: Comparison | None
    difference: Comparison | None
    top1_flips: int | None
    tables: Tables
    left_out: dict[str, int]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found; the fields are described in the module's docstring. `histograms` holds the [B] counts of
    |Δ| of each view (`memopd_scorer.audit_tally.upper_edges`), for plots."""

    model: str
    model_id: str
    weights: str
    probe: str
    attention: str
    clip_epsilon: float
    recorded: Comparison
    tables: Tables
    lags: dict[int, Evidence]
    readings: dict[str, Evidence]
    worst: tuple[WorstToken, ...]
    left_out: dict[str, int]
    other_models: dict[str, int]
    other_view: Against | None
    limits: Limits
    histograms: dict[str, NDArray[np.int64]] = field(repr=False)

    @property
    def by_segment_kind(self) -> dict[str, Comparison]:
        """The recorded-state comparison, split."""
        return self.tables["by_segment_kind"]

    @property
    def by_policy_version(self) -> dict[str, Comparison]:
        """The recorded-state comparison, split."""
        return self.tables["by_policy_version"]

    @property
    def skipped_tokens(self) -> int:
        """Sampled tokens of this model that could not be compared."""
        return sum(self.left_out.values())

    @property
    def against(self) -> Comparison | None:
        """The comparison under the other view."""
        return self.other_view.compared if self.other_view else None

    @property
    def difference(self) -> Comparison | None:
        """Between the two recomputed numbers."""
        return self.other_view.difference if self.other_view else None

    @property
    def top1_flips(self) -> int | None:
        """Tokens whose most likely id is another one under the other view."""
        return self.other_view.top1_flips if self.other_view else None

    @property
    def lag(self) -> int | None:
        """The shift of the recorded numbers that fits best; anything but 0 is an off-by-one in the log."""
        if not any(e.pairs for e in self.lags.values()):
            return None
        best = max(self.lags, key=lambda lag: self.lags[lag].times_closer)
        return best if self.lags[best].convinces(LAG_TIMES) else 0

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The limits that do not hold."""
        return self.limits.failed(self.recorded)

    def to_json(self) -> dict[str, Any]:
        """Plain data, as the module's docstring says."""
        kind, text = explain(self)
        return {
            "audit_version": AUDIT_VERSION,
            "model": self.model,
            "model_id": self.model_id,
            "weights": self.weights,
            "probe": self.probe,
            "attention": self.attention,
            "clip_epsilon": self.clip_epsilon,
            "resolution": RESOLUTION,
            "recorded": self.recorded.to_json(),
            **_tables_json(self.tables),
            "lag": self.lag,
            "lags": {str(lag): e.to_json() for lag, e in self.lags.items()},
            "readings": {name: e.to_json() for name, e in self.readings.items()},
            "explanation": {"kind": kind, "text": text},
            "worst": [t.to_json() for t in self.worst],
            "skipped_tokens": self.skipped_tokens,
            "left_out": self.left_out,
            "other_models": self.other_models,
            "against": self._against_json(),
            "difference": None if self.difference is None else self.difference.to_json(),
            "top1_flips": self.top1_flips,
            "limits": self.limits.to_json(),
            "failed": self.failed,
        }

    def _against_json(self) -> dict[str, Any] | None:
        if self.other_view is None:
            return None
        compared = {} if self.against is None else self.against.to_json()
        tables = _tables_json(self.other_view.tables)
        return {"view": self.other_view.view, "tokens": 0, **compared, **tables, "left_out": self.other_view.left_out}


def _tables_json(tables: Tables) -> dict[str, Any]:
    return {name: {label: c.to_json() for label, c in table.items()} for name, table in tables.items()}


def explain(report: AuditReport) -> tuple[str, str]:
    """(kind, one line): what the numbers say of where a mismatch comes from, as far as they can.

    `exact`      no difference above float32's rounding
    `lag`        an off-by-one in the log
    `reading`    another temperature, or another treatment of the kept mass, fits far better
    `rounding`   small everywhere and without a tail: a half-precision run of the same state
    `part`       most tokens agree, some do not: look at the tables and the worst tokens
    `unexplained` another state, other weights, or noise: the numbers alone do not tell which
    """
    found = report.recorded
    if found.max_abs <= EXACT:
        return "exact", "the recorded numbers come out again, to float32 rounding"
    lag = report.lag
    reading = max(report.readings, key=lambda name: report.readings[name].times_closer, default=None)
    closer = report.readings[reading].times_closer if reading is not None else 1.0
    if lag and report.lags[lag].times_closer >= closer:
        where = "one place later" if lag == 1 else "one place earlier"
        times = report.lags[lag].times_closer
        return "lag", f"off by one: the recorded numbers of the tokens stand {where} ({times:.3g} times closer)"
    if reading is not None and report.readings[reading].convinces(READING_TIMES):
        return "reading", f"the recorded numbers fit '{reading}' {closer:.3g} times closer than what the trace says"
    if found.p50_abs <= ROUNDING and found.p99_abs <= 10 * ROUNDING:
        return "rounding", "differences of the size of half-precision rounding, without a tail"
    if found.p50_abs <= ROUNDING:
        return "part", "most tokens agree and some do not: see which, by the tables and the worst tokens"
    return "unexplained", "no shift and no temperature explains it: another state or other weights"
