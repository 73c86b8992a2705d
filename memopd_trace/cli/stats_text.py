"""The totals of a trace as a table for a person."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.errors import printable

VALUES = 8  # of a count by value
Row = tuple[str, str]


def sections(stats: dict[str, Any]) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows of name and text) of `Stats.to_dict`; what a trace does not record is left out."""
    for title, rows in (
        (printable(stats["path"], None), _file(stats)),
        ("tokens", _tokens(stats)),
        ("lineage", _lineage(stats)),
        ("behaviour", _behaviour(stats)),
        ("outcome", _outcome(stats)),
        ("source", _source(stats)),
    ):
        kept = [(name, text) for name, text in rows if text]
        if kept:
            yield title, kept


def _file(stats: dict[str, Any]) -> list[Row]:
    producer = " ".join(printable(v) for v in stats["producer"].values() if v)
    return [
        ("spec version", f"{stats['spec_version']}, written by {producer}"),
        ("rows", ", ".join(_count(stats[f"{noun}s"], noun) for noun in ("row", "episode", "group"))),
        ("rows unsound", f"{stats['rows_unsound']:,}" if stats["rows_unsound"] else ""),
        ("rows of an episode", _lengths(stats["lengths"]["episode"])),
        ("models", _tally(stats["models"])),
        ("agents", _tally(stats["agents"])),
    ]


def _tokens(stats: dict[str, Any]) -> list[Row]:
    tokens, sharing = stats["tokens"], stats["sharing"]
    rows = [("total", ", ".join(f"{name} {tokens[name]:,}" for name in ("prompt", "output", "sampled", "trained")))]
    rows += [(f"{name} length", _lengths(stats["lengths"][name])) for name in ("prompt", "output", "sequence")]
    for name in ("within_episodes", "within_groups"):
        tree = sharing[name]
        if tree["ratio"] is not None:
            bound = f" (at most: counted in {tree['parts'] + 1} parts)" if tree["parts"] else ""
            text = f"{sharing['logical']:,} -> {tree['distinct']:,} distinct ({tree['ratio']:.2f}x){bound}"
            rows.append((f"shared {name.replace('_', ' ')}", text))
    segments = stats["segments"]
    copied = f"; {segments['copied']:,} copied from earlier rows" if segments["copied"] else ""
    return [*rows, ("in segments", text + copied if (text := _tally(segments["kinds"])) else "")]


def _lineage(stats: dict[str, Any]) -> list[Row]:
    lineage = stats["lineage"]
    if not lineage["relations"]["values"]:
        return []
    branches = (
        f"{lineage['branched_rows']:,} of {_count(lineage['rows_with_children'], 'parent')} with several children"
    )
    return [
        ("relations", _tally(lineage["relations"])),
        ("rewrites", _tally(lineage["rewrite_kinds"])),
        ("evidence", _tally(lineage["rewrite_evidence"])),
        ("depth", _lengths(lineage["depth"])),
        ("branching", f"{branches}, at most {lineage['most_children']:,}" if lineage["rows_with_children"] else ""),
        ("rejected rows", f"{lineage['rejected']:,}" if lineage["rejected"] else ""),
    ]


def _behaviour(stats: dict[str, Any]) -> list[Row]:
    logprobs, policy = stats["logprobs"], stats["policy"]
    covered = ""
    if logprobs["coverage"] is not None:
        covered = f"{_percent(logprobs['coverage'])} of output tokens"
        if logprobs["trained_coverage"] is not None:
            covered += f", {_percent(logprobs['trained_coverage'])} of trained ones"
        if logprobs["mean"] is not None:
            covered += f"; mean {logprobs['mean']:.4f} nats"
    lag = ""
    if policy["mean_lag"] is not None:
        lag = f"mean {policy['mean_lag']:.2f}, at most {policy['max_lag']} behind version {policy['newest']}"
    mixed = f"{policy['mixed_rows']:,} rows, {policy['mixed_episodes']:,} episodes"
    stale = f"{policy['stale_kv_rows']:,} rows, at most {policy['max_kv_lag']} versions"
    return [
        ("log-probabilities", covered),
        ("kinds", _tally(logprobs["kinds"])),
        ("policy versions", _tally(policy["versions"], "tokens")),
        ("lag", lag),
        ("several versions in", mixed if policy["mixed_rows"] or policy["mixed_episodes"] else ""),
        ("stale keys, values", stale if policy["stale_kv_rows"] else ""),
        ("finish reasons", _tally(stats["finish_reasons"])),
        ("token sources", _tally(stats["token_sources"])),
    ]


def _outcome(stats: dict[str, Any]) -> list[Row]:
    rewards, ends = stats["rewards"], stats["ends"]
    rows = [("return", _moments(rewards["return"])), ("reward of a row", _moments(rewards["reward"]))]
    rows += [(f"part {printable(name, 40)}", _moments(part)) for name, part in rewards["parts"].items()]
    if any(ends.values()):
        rows.append(("episodes", f"{ends['terminated']:,} terminated, {ends['truncated']:,} truncated"))
    return rows


def _source(stats: dict[str, Any]) -> list[Row]:
    used = ", ".join(f"{name} in {_count(rows, 'row')}" for name, rows in stats["features"]["used"].items() if rows)
    rows = [("format", printable(stats["source"] or "")), ("features", used)]
    rows += [("could not tell", _gap(gap)) for gap in stats["gaps"]]
    time = stats["time"]
    if time["first"] is not None:
        rows.append(("time", f"{time['first']} to {time['last']} ({time['span_s']:,.1f} s)"))
    if time["calls_s"] is not None:
        rows.append(("in calls", f"{time['calls_s']:,.1f} s, {time['timed_rows']:,} rows timed"))
    return rows


def _gap(gap: dict[str, Any]) -> str:
    return printable(gap["code"]) + (f" ({printable(gap['detail'])})" if gap["detail"] else "")


def _tally(tally: dict[str, Any], unit: str = "") -> str:
    """`a: 3, b: 2, others: 2, not recorded: 1`; empty where every value is null."""
    values = tally["values"]
    if not values:
        return ""
    named = list(values.items())[:VALUES]
    parts = [f"{printable(value, 40)}: {count:,}" for value, count in named]
    rest = sum(list(values.values())[VALUES:]) + tally["others"]
    parts += [f"others: {rest:,}"] if rest else []
    parts += [f"not recorded: {tally['null']:,}"] if tally["null"] else []
    return ", ".join(parts) + (f" {unit}" if unit else "")


def _lengths(lengths: dict[str, Any]) -> str:
    if not lengths["count"]:
        return ""
    return f"p50 {lengths['p50']:,}, p95 {lengths['p95']:,}, max {lengths['max']:,}, mean {lengths['mean']:,.1f}"


def _moments(moments: dict[str, Any]) -> str:
    if not moments["count"] and not moments["nonfinite"]:
        return ""
    parts = [f"{name} {moments[name]:.4g}" for name in ("mean", "std", "min", "max") if moments[name] is not None]
    parts += [f"not finite {moments['nonfinite']:,}"] if moments["nonfinite"] else []
    return ", ".join(parts) + f" (of {moments['count']:,})"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _percent(share: float) -> str:
    """Never rounded up to all."""
    return "100%" if share == 1 else f"{min(share * 100, 99.9):.1f}%"
