"""The validator: check traces against the rules of a profile, and go on only with those that hold."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from memopd_trace.engine import TraceCheck
from memopd_trace.errors import InputError, UsageError, printable
from memopd_trace.jobs import cores, in_order
from memopd_trace.log import Log
from memopd_trace.pieces import load_pieces
from memopd_trace.places import PathLike, Place, place, size_of
from memopd_trace.report import MAX_TEXT, Report, TraceSummary
from memopd_trace.rules import RULES, choose, match
from memopd_trace.rules.registry import Inputs

MAX_FINDINGS = 100
WORTH_A_PROCESS = 16 * 2**20  # bytes on disk, read in about the second that a process takes to start


def validate(
    path: PathLike | Sequence[PathLike],
    profile: str = "core",
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    max_findings: int = MAX_FINDINGS,
    per_file_ignores: Mapping[str, Iterable[str]] | None = None,
    tokenizer: PathLike | None = None,
    views: PathLike | None = None,
    scores: PathLike | Sequence[PathLike] | None = None,
    sample: int | None = None,
    jobs: int | None = 1,
) -> Report:
    """Check one or more traces against a profile's rules.

    Args:
        path: a trace (file or folder), or several.
        profile: `core`, `lineage`, `policy` or `train`. A value that is present and wrong is found under
            each; a profile adds what must be present.
        select: codes or globs; only these rules are judged.
        ignore: codes or globs of rules that are not judged.
        max_findings: findings stored per code; counts stay true.
        per_file_ignores: glob of inputs (`*` crosses folders) -> codes or globs that are not judged there.
        tokenizer: a folder with a `tokenizer.json`, or that file, for the rules that read text; the extra `tokenizer`.
        views: a views file of the trace.
        scores: a scores folder of the trace, or several, which are then held against each other.
        sample: look only at so many episodes of each trace, the same ones each time. What needs all rows is not run.
        jobs: check so many inputs at once, in spawned processes (a script then needs `if __name__ == "__main__"`);
            `None`: one for each processor, where the inputs are large enough to repay it.

    Returns:
        The report. An input that is missing, unreadable or refused is a finding in it, and `report.refused`
        counts it; nothing is raised for it.

    Raises:
        UsageError: an unknown profile, a pattern that matches no code, several traces or a sample with views or scores,
            no trace at all, or a number that is too low.
        InputError: the tokenizer is missing or no tokenizer.
        WorkerDiedError: a process was killed, and what it found is lost.
        MissingExtraError: a tokenizer is given and its library is not installed.
    """
    paths, folders = _as_list(path), _as_list(() if scores is None else scores)
    if len(paths) > 1 and (views is not None or folders):
        raise UsageError("views and scores are of one trace", hint="validate each trace with its own")
    if sample is not None and (views is not None or folders):
        raise UsageError("views and scores need all rows of the trace", hint="leave out the sample")
    for name, number, least in (("sample", sample, 1), ("jobs", jobs, 1), ("max_findings", max_findings, 0)):
        if number is not None and number < least:
            raise UsageError(f"{name}: at least {least}, got {number}")
    if not paths:
        raise UsageError("no trace is given", hint="a pattern that matched nothing?")
    inputs = Inputs(
        tokenizer=None if tokenizer is None else load_pieces(tokenizer),
        views=None if views is None else place(views),
        scores=[place(each) for each in folders] or None,
    )
    chosen = choose(profile, select, ignore)
    unwanted = {os.path.abspath(g): match(codes) for g, codes in (per_file_ignores or {}).items()}  # noqa: PTH100
    tasks = []
    for each in paths:
        left_out = set().union(*(codes for g, codes in unwanted.items() if fnmatchcase(os.path.abspath(each), g)))  # noqa: PTH100
        judged = [r.code for r in chosen if r.phase == "open" or r.code not in left_out]
        reasons = dict.fromkeys(left_out, "ignored in this file")
        tasks.append(_Task(place(each), judged, reasons, max_findings, inputs, sample))
    log, traces = Log({r.code for r in chosen}, max_findings), []
    for summary, one in in_order(_judge, tasks, _processes(tasks) if jobs is None else jobs):
        traces.append(summary)
        log.absorb(one)
    by_severity = Counter[str]()
    for code, count in log.counts.items():
        by_severity[RULES[code].severity] += count
    return Report(
        profile, tuple(traces), log.results(chosen), tuple(log.findings), by_severity["error"], by_severity["warning"]
    )


@dataclass(frozen=True, slots=True)
class _Task:
    """One input to be checked, for whichever process does it: rules go by their codes."""

    path: Place
    codes: list[str]
    reasons: dict[str, str]
    max_findings: int
    inputs: Inputs
    sample: int | None


def _judge(task: _Task) -> tuple[TraceSummary, Log]:
    log = Log(set(task.codes), task.max_findings, reasons=dict(task.reasons))
    check = TraceCheck(task.path, [RULES[code] for code in task.codes], log, task.inputs, task.sample)
    return check.run(), log


def _processes(tasks: Sequence[_Task]) -> int:
    """One for each processor, or one alone for what is read sooner than another one starts."""
    return cores() if len(tasks) > 1 and sum(size_of(task.path) for task in tasks) > WORTH_A_PROCESS else 1


def _as_list(paths: PathLike | Sequence[PathLike]) -> list[PathLike]:
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)


def require_valid(path: PathLike, profile: str = "core", *, views: PathLike | None = None) -> None:
    """Go on only with a trace, and views of it, that have no error under `profile`; warnings pass.

    Raises:
        InputError: with the code and the place of the first error.
    """
    report = validate(path, profile, max_findings=1, views=views)
    found = [f for f in report.findings if f.severity == "error"]
    if found:
        first, more = found[0], report.errors - 1
        if RULES[first.code].phase == "open":  # the input was refused: no list; the message names the place itself
            raise InputError(printable(first.message, MAX_TEXT), code=first.code, hint=first.hint)
        who = "" if first.episode_id is None else f"episode '{printable(first.episode_id)}', "
        who += "" if first.invocation_index is None else f"invocation {first.invocation_index}: "
        raise InputError(
            f"{first.path}: {who}{printable(first.message, MAX_TEXT)}" + (f" (and {more} more errors)" if more else ""),
            code=first.code,
            hint=f"`memopd-trace validate --profile {profile}{'' if views is None else ' --views'}` lists them all",
        )
