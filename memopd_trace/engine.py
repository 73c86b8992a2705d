"""One trace being checked: stream it once and show every rule what it looks at.

Memory holds one record batch and one episode at a time (and a digest per episode, to know it again). A row
whose arrays do not fit together is reported and not shown to rules about values; an episode with broken keys,
or with a row that could not be read, is reported and not shown to rules about episodes. Both are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from memopd_trace.conform import conform_batch
from memopd_trace.errors import InputError
from memopd_trace.invocation import invocations_from_batch
from memopd_trace.report import Finding, RuleResult, Status, TraceSummary
from memopd_trace.rules import RULES
from memopd_trace.rules.batch import Batch, Bools, Ints
from memopd_trace.rules.episode import EpisodesSeen, Run
from memopd_trace.rules.files import FileContext
from memopd_trace.rules.gate import may_judge, silence, unfit, vacuous
from memopd_trace.rules.registry import Hit, Inputs, Phase, Rule
from memopd_trace.rules.structure import REQUIRED
from memopd_trace.storage import TraceReader, read_manifest

SHAPE_RULES = [r for r in RULES.values() if r.phase == "shape"]
NOT_WHOLE = "no row or episode is whole enough to be judged"
KEY_RULES = [r for r in RULES.values() if r.phase == "key"]


@dataclass(slots=True)
class Log:
    """What all rules came to: true counts, capped findings, who ran and why not."""

    codes: set[str]
    max_findings: int
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ran: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)

    def add(self, rule: Rule, path: Path, hit: Hit, row: int | None, key: tuple[str | None, int | None]) -> None:
        """Count a hit, and keep it as a finding while there is room."""
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
        """Record that an input was refused; returns the code."""
        code = error.code or "E-UNREADABLE"
        self.add(RULES[code], path, Hit(None, error.message, hint=error.hint), None, (None, None))
        return code

    def result(self, rule: Rule) -> RuleResult:
        """What a rule came to over all inputs."""
        count = self.counts[rule.code]
        status: Status = "pass"
        if count:
            status = "fail" if rule.severity == "error" else "warn"
        elif rule.code in self.blocked:
            return RuleResult(rule.code, "not run", 0, self.blocked[rule.code])
        elif rule.code not in self.ran:
            return RuleResult(rule.code, "not run", 0, self.reasons.get(rule.code, "the input was refused"))
        return RuleResult(rule.code, status, count)


class TraceCheck:
    """One trace being checked."""

    def __init__(self, path: Path, rules: list[Rule], log: Log, inputs: Inputs) -> None:
        self.path, self.log, self.inputs = path, log, inputs
        self.rules: dict[Phase, list[Rule]] = {phase: [] for phase in ("file", "batch", "episode")}
        for rule in rules:
            self.rules.setdefault(rule.phase, []).append(rule)
        self.judged = {r.code: r for r in rules}
        self.seen = EpisodesSeen()
        self.summary = TraceSummary(str(path))

    def run(self) -> TraceSummary:
        """Check every file of the trace."""
        try:
            reader = TraceReader(self.path)
            self._describe(reader)
            manifest = read_manifest(self.path) if self.path.is_dir() else None
            for index in range(len(reader.files)):
                FileCheck(self, reader, index, manifest).run()
        except InputError as error:
            self.summary.refused = self.log.refuse(self.path, error)
        return self.summary

    def _describe(self, reader: TraceReader) -> None:
        meta = reader.metadata
        self.summary.spec_version = meta.spec_version
        self.summary.producer = " ".join(filter(None, (meta.producer.name, meta.producer.version)))
        self.summary.gaps = tuple((g.code, g.detail) for g in meta.source.gaps) if meta.source else ()


class FileCheck:
    """One file of a trace being checked, from its schema to its last row."""

    def __init__(self, trace: TraceCheck, reader: TraceReader, index: int, manifest: dict[str, Any] | None) -> None:
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
            inputs=trace.inputs,
        )
        self.current: Run | None = None

    def run(self) -> None:
        """Check the file; what it comes to is in the log and the trace's summary."""
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
        judged = Batch(_keep(batch, sound), self.file.metadata, self.file.inputs)
        self._batch_rules(judged, base + np.flatnonzero(sound))
        self._rows(batch, base, whole)

    def _sound_rows(self, batch: pa.RecordBatch, base: int) -> tuple[Bools, Bools]:
        """([B] no required cell is null, [B] and the arrays fit together)."""
        sound = np.ones(batch.num_rows, bool)
        whole = sound
        for rule in SHAPE_RULES:
            rows = np.flatnonzero(sound)
            view = Batch(_keep(batch, sound), self.file.metadata, self.file.inputs)
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
            self.current = Run(episode_id, self.file.metadata, inputs=self.file.inputs)
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
                self.log.reasons.setdefault(code, silence(rule, self.file) or NOT_WHOLE)


def _keep(batch: pa.RecordBatch, rows: Bools) -> pa.RecordBatch:
    return batch if rows.all() else batch.filter(pa.array(rows))


def _check(rule: Rule, *what: Any) -> Iterator[Hit]:
    if rule.check is not None:
        yield from rule.check(*what)
