"""The validator: stream a trace once, show every rule what it looks at, and report what was found.

Memory holds one record batch and one episode at a time (and a digest per episode, to know it again). A row
whose arrays do not fit together is reported and not shown to rules about values; an episode with broken keys,
or with a row that could not be read, is reported and not shown to rules about episodes. Both are counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from memopd_trace.conform import conform_batch
from memopd_trace.errors import InputError, printable
from memopd_trace.invocation import invocations_from_batch
from memopd_trace.report import MAX_TEXT, Finding, Report, RuleResult, Status, TraceSummary
from memopd_trace.rules import RULES, choose
from memopd_trace.rules.batch import Batch, Bools, Ints
from memopd_trace.rules.episode import EpisodesSeen, Run
from memopd_trace.rules.files import FileContext
from memopd_trace.rules.gate import may_judge, unfit, vacuous
from memopd_trace.rules.registry import Hit, Phase, Rule
from memopd_trace.rules.structure import REQUIRED
from memopd_trace.storage import TraceReader, read_manifest

MAX_FINDINGS = 100
NO_VALUES = "no row has a value in its columns"
SHAPE_RULES = [r for r in RULES.values() if r.phase == "shape"]
KEY_RULES = [r for r in RULES.values() if r.phase == "key"]

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
    log = _Log({r.code for r in chosen}, max_findings)
    traces = [_TraceCheck(Path(p), chosen, log).run() for p in paths]
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


@dataclass(slots=True)
class _Log:
    """What all rules came to: true counts, capped findings, who ran and why not."""

    codes: set[str]
    max_findings: int
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ran: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)

    def add(self, rule: Rule, path: Path, hit: Hit, row: int | None, key: tuple[str | None, int | None]) -> None:
        if rule.code not in self.codes:
            return
        self.counts[rule.code] += 1
        if self.counts[rule.code] <= self.max_findings:
            self.findings.append(
                Finding(
                    code=rule.code,
                    severity=rule.severity,
                    path=str(path),
                    message=hit.message,
                    row=row,
                    episode_id=key[0],
                    invocation_index=key[1],
                    column=hit.column,
                    expected=hit.expected,
                    actual=hit.actual,
                    hint=hit.hint or rule.hint,
                )
            )

    def refuse(self, path: Path, error: InputError) -> str:
        code = error.code or "E-UNREADABLE"
        self.add(RULES[code], path, Hit(None, error.message, hint=error.hint), None, (None, None))
        return code

    def result(self, rule: Rule) -> RuleResult:
        count = self.counts[rule.code]
        status: Status = "pass"
        if count:
            status = "fail" if rule.severity == "error" else "warn"
        elif rule.code in self.blocked:
            return RuleResult(rule.code, "not run", 0, self.blocked[rule.code])
        elif rule.code not in self.ran:
            return RuleResult(rule.code, "not run", 0, self.reasons.get(rule.code, "the input was refused"))
        return RuleResult(rule.code, status, count)


class _TraceCheck:
    """One trace being checked."""

    def __init__(self, path: Path, rules: list[Rule], log: _Log) -> None:
        self.path, self.log = path, log
        self.rules: dict[Phase, list[Rule]] = {phase: [] for phase in ("file", "batch", "episode")}
        for rule in rules:
            self.rules.setdefault(rule.phase, []).append(rule)
        self.judged = {r.code: r for r in rules}
        self.seen = EpisodesSeen()
        self.summary = TraceSummary(str(path))

    def run(self) -> TraceSummary:
        try:
            reader = TraceReader(self.path)
            self._describe(reader)
            manifest = read_manifest(self.path) if self.path.is_dir() else None
            for index in range(len(reader.files)):
                _FileCheck(self, reader, index, manifest).run()
        except InputError as error:
            self.summary.refused = self.log.refuse(self.path, error)
        return self.summary

    def _describe(self, reader: TraceReader) -> None:
        meta = reader.metadata
        self.summary.spec_version = meta.spec_version
        self.summary.producer = " ".join(filter(None, (meta.producer.name, meta.producer.version)))
        self.summary.gaps = tuple((g.code, g.detail) for g in meta.source.gaps) if meta.source else ()


class _FileCheck:
    """One file of a trace being checked, from its schema to its last row."""

    def __init__(self, trace: _TraceCheck, reader: TraceReader, index: int, manifest: dict[str, Any] | None) -> None:
        self.trace, self.reader, self.log = trace, reader, trace.log
        self.path = reader.files[index]
        self.file = FileContext(
            path=self.path,
            index=index,
            schema=reader.schema(index),
            metadata=reader.metadata,
            first_schema=reader.schema(0),
            manifest=manifest,
            part=manifest["files"][index] if manifest else None,
        )
        self.current: Run | None = None

    def run(self) -> None:
        fields = [pa.nulls(0, f.type) for f in self.file.schema]
        self._conform(pa.RecordBatch.from_arrays(fields, schema=pa.schema(list(self.file.schema))))
        for raw in self.reader.iter_raw(self.file.index):
            self._batch(raw)
        self._end_run()
        if self.file.index == len(self.reader.files) - 1:
            self.file.total_rows, self.file.total_episodes = self.trace.summary.rows, len(self.trace.seen)
        for rule in self.trace.rules["file"]:
            if self._may_run(rule):
                self._file_hits(rule)
        self._explain_silence()

    def _file_hits(self, rule: Rule) -> None:
        for hit in _check(rule, self.file):
            self.log.add(rule, self.path, hit, None, (None, None))

    def _conform(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        batch, misfits = conform_batch(raw)
        for misfit in misfits:
            if misfit.kind != "null":  # E-NULL names every such row
                self.file.misfits.setdefault(misfit.column, misfit)
        return batch

    def _batch(self, raw: pa.RecordBatch) -> None:
        base = self.file.rows
        batch = self._conform(raw)
        self.file.rows += raw.num_rows
        self.trace.summary.rows += raw.num_rows
        for name in batch.schema.names:
            column = batch.column(name)
            if name not in self.file.first_value and column.null_count < len(column):
                self.file.first_value[name] = base + int(np.asarray(column.is_valid()).argmax())
        if any(name in self.file.misfits for name in REQUIRED):
            return
        whole, sound = self._sound_rows(batch, base)
        self._batch_rules(Batch(_keep(batch, sound), self.file.metadata), base + np.flatnonzero(sound))
        self._rows(batch, base, whole)

    def _sound_rows(self, batch: pa.RecordBatch, base: int) -> tuple[Bools, Bools]:
        """([B] no required cell is null, [B] and the arrays fit together)."""
        sound = np.ones(batch.num_rows, bool)
        whole = sound
        for rule in SHAPE_RULES:
            rows = np.flatnonzero(sound)
            view = Batch(_keep(batch, sound), self.file.metadata)
            sound = sound.copy()
            for hit in _check(rule, view):
                self._batch_hit(rule, view, hit, base + rows)
                sound[rows[hit.row]] = False
            if rule.code == "E-NULL":
                whole = sound
        self.log.ran.update(r.code for r in SHAPE_RULES if not vacuous(r, self.file))
        self.trace.summary.rows_unsound += int((~sound).sum())
        return whole, sound

    def _batch_rules(self, batch: Batch, rows: Ints) -> None:
        for rule in self.trace.rules["batch"]:
            if len(batch) and self._may_run(rule):
                for hit in _check(rule, batch):
                    self._batch_hit(rule, batch, hit, rows)

    def _batch_hit(self, rule: Rule, batch: Batch, hit: Hit, rows: Ints) -> None:
        assert hit.row is not None, rule.code
        key = batch.text("episode_id", hit.row), batch.column("invocation_index")[hit.row].as_py()
        self.log.add(rule, self.path, hit, int(rows[hit.row]), key)

    def _rows(self, batch: pa.RecordBatch, base: int, whole: Bools) -> None:
        """Hand the rows on to episodes; a row with a null in a required column leaves a hole."""
        invocations = invocations_from_batch(_keep(batch, whole))
        for offset, is_whole in enumerate(whole):
            if is_whole:
                invocation = next(invocations)
                self._run_of(invocation.episode_id).add(base + offset, invocation)
            else:
                episode_id = batch.column("episode_id")[offset].as_py()
                run = self._run_of(episode_id) if episode_id is not None else self.current
                if run is not None:
                    run.unsound = True

    def _run_of(self, episode_id: str) -> Run:
        if self.current is None or self.current.episode_id != episode_id:
            self._end_run()
            self.current = Run(episode_id, self.file.metadata)
        return self.current

    def _end_run(self) -> None:
        run, self.current = self.current, None
        if run is None:
            return
        if not run.unsound:
            for rule in KEY_RULES:
                run.unsound |= self._run_hits(rule, run, self.trace.seen)
        if self.trace.seen.add(run, self.file.index):
            self.file.episodes += 1
        self.trace.summary.episodes = len(self.trace.seen)
        if run.unsound:
            self.trace.summary.episodes_unsound += 1
            return
        for rule in self.trace.rules["episode"]:
            if self._may_run(rule):
                self._run_hits(rule, run)

    def _run_hits(self, rule: Rule, run: Run, *more: EpisodesSeen) -> bool:
        self.log.ran.add(rule.code)
        found = False
        for hit in _check(rule, run, *more):
            assert hit.row is not None, rule.code
            found = True
            key = run.episode_id, run.invocations[hit.row].invocation_index
            self.log.add(rule, self.path, hit, run.rows[hit.row], key)
        return found

    def _may_run(self, rule: Rule) -> bool:
        """Whether the rule can judge this file, as far as it was read."""
        if not may_judge(rule, self.file):
            return False
        self.log.ran.add(rule.code)
        return True

    def _explain_silence(self) -> None:
        """Say of each rule why it judged nothing, or not all, of this file."""
        for code, rule in self.trace.judged.items():
            column = unfit(rule, self.file)
            if column is not None:
                self.log.blocked.setdefault(code, f"column '{column}' is missing or does not fit its type")
            elif code not in self.log.ran:
                self.log.reasons.setdefault(code, self._silence(rule))

    def _silence(self, rule: Rule) -> str:
        if rule.unless and (reason := rule.unless(self.file)):
            return reason
        if not self.file.rows:
            return "there is no row"
        if vacuous(rule, self.file):
            return NO_VALUES
        return "no row or episode is whole enough to be judged"


def _keep(batch: pa.RecordBatch, rows: Bools) -> pa.RecordBatch:
    return batch if rows.all() else batch.filter(pa.array(rows))


def _check(rule: Rule, *what: Any) -> Iterator[Hit]:
    if rule.check is not None:
        yield from rule.check(*what)
