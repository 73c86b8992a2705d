"""One trace being checked: stream it once and show every rule what it looks at.

Memory holds one record batch and one episode at a time (and a digest per episode, to know it again). A row
whose arrays do not fit together is reported and not shown to rules about values; an episode with broken keys,
or with a row that could not be read, is reported and not shown to rules about episodes. Both are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from memopd_trace.arrowfile import iter_wanted
from memopd_trace.conform import conform_batch
from memopd_trace.errors import InputError, first_line
from memopd_trace.invocation import invocations_from_batch
from memopd_trace.joined import JoinedCheck
from memopd_trace.log import Log
from memopd_trace.places import Place
from memopd_trace.report import TraceSummary
from memopd_trace.rules import RULES
from memopd_trace.rules.batch import Batch, Bools, Ints
from memopd_trace.rules.episode import EpisodesSeen, Run
from memopd_trace.rules.files import FileContext
from memopd_trace.rules.gate import may_judge, silence, unfit, vacuous
from memopd_trace.rules.registry import Hit, Inputs, Phase, Rule
from memopd_trace.rules.rowindex import RowIndex
from memopd_trace.rules.structure import REQUIRED
from memopd_trace.sample import NEEDS_ALL_ROWS, NOT_SHOWN, Sample, pick
from memopd_trace.storage import TraceReader, read_manifest

SHAPE_RULES = [r for r in RULES.values() if r.phase == "shape"]
NOT_WHOLE = "no row or episode is whole enough to be judged"
KEY_RULES = [r for r in RULES.values() if r.phase == "key"]
ASKS_FOR_MORE = ("E-NEEDS-REWARD", "E-NEEDS-END")  # of an episode; a later row of a split one may bring it


class TraceCheck:
    """One trace being checked."""

    def __init__(self, path: Place, rules: list[Rule], log: Log, inputs: Inputs, sample: int | None = None) -> None:
        self.path, self.log, self.inputs = path, log, inputs
        self.rules: dict[Phase, list[Rule]] = {phase: [] for phase in ("file", "batch", "episode")}
        for rule in rules:
            self.rules.setdefault(rule.phase, []).append(rule)
        self.judged = {r.code: r for r in rules}
        self.seen = EpisodesSeen()
        self.unended: dict[str, list[str]] = {}  # episode -> codes that hold unless it goes on later
        self.summary = TraceSummary(str(path))
        self.episodes_wanted = sample
        self.sample: Sample | None = None
        self.index: RowIndex | None = None  # of its rows, where views or scores are held against them

    def run(self) -> TraceSummary:
        """Check every file of the trace."""
        try:
            reader = TraceReader(self.path)
            self._describe(reader)
            manifest = read_manifest(self.path) if self.path.is_dir() else None
            if self.inputs.views or self.inputs.scores:
                self.index = RowIndex(reader.metadata, reader.files)
            if self.episodes_wanted is not None:
                self._take_sample(reader, self.episodes_wanted)
            for index in range(len(reader.files)):
                FileCheck(self, reader, index, manifest).run()
            if self.index is not None:
                joined = JoinedCheck(self.index, list(self.judged.values()), self.log)
                self.summary.inputs = joined.run(self.inputs.views, self.inputs.scores or ())
        except InputError as error:
            self.summary.refused = self.log.refuse(self.path, error)
        except (MemoryError, pa.ArrowCapacityError) as error:
            why = InputError(f"{self.path}: does not fit into memory: {first_line(error)}", code="E-LIMIT")
            self.summary.refused = self.log.refuse(self.path, why)
        self.summary.rules = self.log.results(self.judged.values())
        return self.summary

    def _take_sample(self, reader: TraceReader, episodes: int) -> None:
        self.sample = pick(reader.files, episodes)
        self.summary.of_rows, self.summary.of_episodes = self.sample.of_rows, self.sample.of_episodes
        self.log.blocked.update(dict.fromkeys(NEEDS_ALL_ROWS, NOT_SHOWN))
        self.rules["file"] = [rule for rule in self.rules["file"] if rule.code not in NEEDS_ALL_ROWS]

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
        self.episode_rules: list[Rule] = []  # those that can judge the file as far as it was read
        self.episode_columns = columns_of(*KEY_RULES, *trace.rules["episode"])

    def run(self) -> None:
        """Check the file; what it comes to is in the log and the trace's summary."""
        fields = [pa.nulls(0, f.type) for f in self.file.schema]
        self._conform(pa.RecordBatch.from_arrays(fields, schema=pa.schema(list(self.file.schema))))
        for numbers, raw in self._numbered():
            self._batch(raw, numbers)
        self._end_run()
        if self.file.index == len(self.reader.files) - 1:
            self.file.total_rows, self.file.total_episodes = self.trace.summary.rows, len(self.trace.seen)
        for rule in self.trace.rules["file"]:
            if self._may_run(rule):
                self._file_hits(rule)
        self._explain_silence()

    def _numbered(self) -> Iterator[tuple[Ints, pa.RecordBatch]]:
        """([B] row numbers, batch as stored) of the rows that are looked at."""
        index, first = self.file.index, 0
        if self.trace.sample is not None:
            yield from iter_wanted(self.path, self.trace.sample.rows[index])
            return
        for raw in self.reader.iter_raw(index):
            yield np.arange(first, first + raw.num_rows), raw
            first += raw.num_rows

    def _file_hits(self, rule: Rule) -> None:
        for hit in _check(rule, self.file):
            self.log.add(rule, self.path, hit, None, (None, None))

    def _conform(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        batch, misfits = conform_batch(raw)
        for misfit in misfits:
            if misfit.kind != "null":  # E-NULL names every such row
                self.file.misfits.setdefault(misfit.column, misfit)
        return batch

    def _batch(self, raw: pa.RecordBatch, numbers: Ints) -> None:
        batch = self._conform(raw)
        self.file.rows += raw.num_rows
        self.trace.summary.rows += raw.num_rows
        for name in batch.schema.names:
            column = batch.column(name)
            if name not in self.file.first_value and column.null_count < len(column):
                self.file.first_value[name] = int(numbers[np.asarray(column.is_valid()).argmax()])
        self.episode_rules = [rule for rule in self.trace.rules["episode"] if may_judge(rule, self.file)]
        if any(name in self.file.misfits for name in REQUIRED):
            self.trace.index = None
            return
        whole, sound, rows = self._sound_rows(batch, numbers)
        self._batch_rules(sound, numbers[rows])
        if self.trace.index is not None:
            self.trace.index.add(sound, self.file.index, numbers[rows])
            unsound = np.setdiff1d(np.arange(batch.num_rows), rows)
            self.trace.index.add_unsound(batch.take(pa.array(unsound)), self.file.index, numbers[unsound])
        self._rows(batch, numbers, whole)

    def _sound_rows(self, batch: pa.RecordBatch, numbers: Ints) -> tuple[Bools, Batch, Ints]:
        """([B] no required cell is null, the rows whose arrays fit together too, which these are)."""
        whole, rows = np.ones(batch.num_rows, bool), np.arange(batch.num_rows)
        view = Batch(batch, self.file.metadata, self.file.inputs)
        for rule in SHAPE_RULES:
            fits = np.ones(len(rows), bool)
            for hit in _check(rule, view):
                self._batch_hit(rule, view, hit, numbers[rows])
                fits[hit.row] = False
            if not fits.all():
                view, rows = Batch(_keep(view.table, fits), self.file.metadata, self.file.inputs), rows[fits]
            if rule.code == "E-NULL":
                whole = fits
        self.log.ran.update(r.code for r in SHAPE_RULES if not vacuous(r, self.file))
        self.trace.summary.rows_unsound += batch.num_rows - len(rows)
        return whole, view, rows

    def _batch_rules(self, batch: Batch, rows: Ints) -> None:
        for rule in self.trace.rules["batch"]:
            if len(batch) and self._may_run(rule):
                for hit in _check(rule, batch):
                    self._batch_hit(rule, batch, hit, rows)

    def _batch_hit(self, rule: Rule, batch: Batch, hit: Hit, rows: Ints) -> None:
        assert hit.row is not None, rule.code
        key = batch.text("episode_id", hit.row), batch.column("invocation_index")[hit.row].as_py()
        self.log.add(rule, self.path, hit, int(rows[hit.row]), key)

    def _rows(self, batch: pa.RecordBatch, numbers: Ints, whole: Bools) -> None:
        """Hand the rows on to episodes; a row with a null in a required column leaves a hole."""
        invocations = invocations_from_batch(_keep(batch, whole), self.episode_columns)
        for offset, (number, is_whole) in enumerate(zip(numbers.tolist(), whole.tolist(), strict=True)):
            if is_whole:
                invocation = next(invocations)
                self._run_of(invocation.episode_id).add(number, invocation)
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
        if self.trace.seen.goes_on(run):
            for code in self.trace.unended.pop(run.episode_id, ()):
                self.log.retract(code, run.episode_id)
        if self.trace.seen.add(run, self.file.index):
            self.file.episodes += 1
        self.trace.summary.episodes = len(self.trace.seen)
        if run.unsound:
            self.trace.summary.episodes_unsound += 1
            return
        for rule in self.episode_rules:
            if self._run_hits(rule, run) and rule.code in ASKS_FOR_MORE:
                self.trace.unended.setdefault(run.episode_id, []).append(rule.code)

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
            if rule.wants in ("views", "scores") and self.file.inputs.lack(rule.wants) is None:
                continue  # `JoinedCheck` does
            column = unfit(rule, self.file)
            if column is not None:
                self.log.blocked.setdefault(code, f"column '{column}' is missing or does not fit its type")
            elif code not in self.log.ran:
                self.log.reasons.setdefault(code, silence(rule, self.file) or NOT_WHOLE)


def columns_of(*rules: Rule) -> set[str]:
    """What these rules read, and the required columns."""
    return {*REQUIRED, *(name for rule in rules for name in rule.columns)}


def _keep(batch: pa.RecordBatch, rows: Bools) -> pa.RecordBatch:
    return batch if rows.all() else batch.filter(pa.array(rows))


def _check(rule: Rule, *what: Any) -> Iterator[Hit]:
    if rule.check is not None:
        yield from rule.check(*what)
