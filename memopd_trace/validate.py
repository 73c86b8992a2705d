"""The validator: check traces against the rules of a profile, and go on only with those that hold."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from memopd_trace.engine import Log, TraceCheck
from memopd_trace.errors import InputError, printable
from memopd_trace.report import MAX_TEXT, Report
from memopd_trace.rules import RULES, choose
from memopd_trace.rules.registry import Inputs

MAX_FINDINGS = 100

PathLike = str | os.PathLike[str]


def validate(
    path: PathLike | Sequence[PathLike],
    profile: str = "core",
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    max_findings: int = MAX_FINDINGS,
) -> Report:
    """Check one or more traces against a profile's rules.

    Args:
        path: a trace (file or folder), or several.
        profile: `core`, `lineage`, `policy` or `train`. A value that is present and wrong is found under
            each; a profile adds what must be present.
        select: codes or globs; only these rules are judged.
        ignore: codes or globs of rules that are not judged.
        max_findings: findings stored per code; counts stay true.

    Returns:
        The report. An input that is missing, unreadable or refused is a finding in it, and `report.refused`
        counts it; nothing is raised for it.

    Raises:
        UsageError: an unknown profile or a pattern that matches no code.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    chosen = choose(profile, select, ignore)
    log = Log({r.code for r in chosen}, max_findings)
    traces = [TraceCheck(Path(p), chosen, log, Inputs()).run() for p in paths]
    results = tuple(log.result(r) for r in chosen if r.phase != "open" or log.counts[r.code])
    by_severity = Counter[str]()
    for code, count in log.counts.items():
        by_severity[RULES[code].severity] += count
    return Report(profile, tuple(traces), results, tuple(log.findings), by_severity["error"], by_severity["warning"])


def require_valid(path: PathLike, profile: str = "core") -> None:
    """Go on only with a trace that has no error under `profile`; warnings pass.

    Raises:
        InputError: with the code and the place of the first error.
    """
    report = validate(path, profile, max_findings=1)
    found = [f for f in report.findings if f.severity == "error"]
    if found:
        first, more = found[0], report.errors - 1
        who = "" if first.episode_id is None else f"episode '{printable(first.episode_id)}', "
        who += "" if first.invocation_index is None else f"invocation {first.invocation_index}: "
        raise InputError(
            f"{first.path}: {who}{printable(first.message, MAX_TEXT)}" + (f" (and {more} more errors)" if more else ""),
            code=first.code,
            hint=f"`memopd-trace validate --profile {profile}` lists them all",
        )
