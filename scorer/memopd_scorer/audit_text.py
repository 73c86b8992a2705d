"""The report of an audit as text for a person at a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from memopd_scorer.audit_report import AuditReport, explain
from memopd_scorer.audit_tally import Comparison, Evidence, WorstToken
from memopd_trace.errors import printable

TITLES = {
    "by_segment_kind": "segment",
    "by_policy_version": "policy version",
    "by_depth": "depth",
    "by_relation": "relation",
    "by_output_index": "output index",
}
WORTH_TELLING = 1.1  # times closer
MOST_ROWS = 12  # of one table; the JSON has all


def print_audit(report: AuditReport, console: Console) -> None:
    """Print what a person needs of it; 80 columns are enough for labels of up to 23 characters."""
    console.print(_comparisons(report))
    lines = [f"explanation: {explain(report)[1]}", *_moments(report), *_shifts(report), *_left_out(report)]
    lines += _verdict(report)
    for line in lines:
        console.print(printable(line, limit=None), markup=False, highlight=False, soft_wrap=True)
    if report.worst and report.recorded.max_abs > 0:
        console.print(_worst(report.worst))


def _comparisons(report: AuditReport) -> Table:
    table = Table("|Δ| in nats", box=None, padding=(0, 1, 0, 0))
    table.columns[0].min_width = 23
    for title in ("tokens", "max", "p50", "p99", "p99.9", "mean", "clips"):
        table.add_column(title, justify="right", no_wrap=True)
    rows: list[tuple[str, Comparison | None]] = [("recorded state", report.recorded)]
    for name, labels in report.tables.items():
        if list(labels) == ["none"]:  # nothing is recorded to split by
            continue
        rows += [(f" {TITLES[name]} {label}", c) for label, c in list(labels.items())[:MOST_ROWS]]
        if len(labels) > MOST_ROWS:
            rows.append((f" {TITLES[name]}: {len(labels) - MOST_ROWS} more in the JSON", None))
    if report.other_view is not None:
        rows += [(report.other_view.view, report.against), (" less recorded state", report.difference)]
    for name, c in rows:
        table.add_row(escape(printable(name)), *(_numbers(c) if c is not None else ()))
    return table


def _numbers(c: Comparison) -> tuple[str, ...]:
    sizes = (c.max_abs, c.p50_abs, c.p99_abs, c.p999_abs, c.mean_abs)
    return (f"{c.tokens:,}", *(f"{size:.1e}" for size in sizes), f"{c.false_clip_rate:.2%}")


def _moments(report: AuditReport) -> Iterator[str]:
    names = ["recorded state", report.other_view.view if report.other_view else ""]
    for name, c in zip(names, (report.recorded, report.against), strict=True):
        if c is not None:
            clips = f"{c.false_clip_rate:.2%} false clips at epsilon {report.clip_epsilon:g}"
            yield f"{name}: KL estimate {c.kl:.2e} nats a token, mean Δ {c.mean_signed:+.2e} nats, {clips}"
    if report.other_view is not None and report.difference is not None:
        tokens = f"{report.top1_flips:,} of {report.difference.tokens:,} tokens"
        yield f"{report.other_view.view}: another most likely token at {tokens}"


def _shifts(report: AuditReport) -> Iterator[str]:
    yield f"best lag: {'cannot be told, no output has two tokens' if report.lag is None else report.lag}"
    for shift, evidence in report.lags.items():
        if evidence.pairs:
            yield f"  lag {shift:+d}: {_evidence(evidence)}"
    name = max(report.readings, key=lambda n: report.readings[n].times_closer, default=None)
    if name is not None and report.readings[name].times_closer > WORTH_TELLING:
        yield f"best other reading, {name}: {_evidence(report.readings[name])}"


def _evidence(evidence: Evidence) -> str:
    here, there = evidence.sum_abs / evidence.pairs, evidence.sum_abs_recorded / evidence.pairs
    times = evidence.times_closer
    fit = f"{times:.2g} times closer" if times >= 1 else f"{1 / times:.2g} times farther"
    return f"mean |Δ| {here:.1e} instead of {there:.1e} nats over {evidence.pairs:,} tokens ({fit})"


def _verdict(report: AuditReport) -> Iterator[str]:
    weights = {"same": "those that the trace records", "other": "not those that the trace records"}
    yield f"weights: {weights.get(report.weights, 'cannot be compared with any that the trace records')}"
    if not report.limits.to_json():
        yield "nothing was judged: no limit was given (--max-abs, --max-p99, --max-false-clips)"


def _left_out(report: AuditReport) -> Iterator[str]:
    for reason, tokens in report.left_out.items():
        yield f"left out: {tokens:,} tokens, {reason}"
    for model_id, tokens in report.other_models.items():
        yield f"left out: {tokens:,} tokens of the trace's model '{printable(model_id)}'"
    if report.other_view is not None:
        for reason, tokens in report.other_view.left_out.items():
            yield f"left out under {report.other_view.view}: {tokens:,} tokens {reason}"


def _worst(tokens: tuple[WorstToken, ...]) -> Table:
    table = Table("episode", title="worst tokens", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for title in ("invocation", "output index", "token id", "recorded", "recomputed", "|Δ| nats"):
        table.add_column(title, justify="right", no_wrap=True)
    for t in tokens:
        place = (str(t.invocation_index), str(t.output_index), str(t.token_id))
        numbers = (f"{t.recorded:.4f}", f"{t.recomputed:.4f}", f"{t.abs_delta:.2e}")
        table.add_row(escape(printable(t.episode_id)), *place, *numbers)
    return table
