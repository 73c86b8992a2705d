"""Views and scores being checked against the trace that they are for: stream each once beside the index of its rows.

Memory holds the index (`memopd_trace.rules.rowindex`), a flag or a count a row for each file, and one batch. A row that
does not fit together, or is of no row, is reported and not shown to rules about values; a damaged shard is not read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from memopd_trace.arrowfile import iter_file
from memopd_trace.conform import conform_batch
from memopd_trace.errors import InputError
from memopd_trace.log import Log
from memopd_trace.places import Place
from memopd_trace.report.model import InputSummary
from memopd_trace.rules import RULES
from memopd_trace.rules.batch import Ints
from memopd_trace.rules.joined import (
    LAGS,
    JoinedBatch,
    ScoreBatch,
    ScoresContext,
    ViewBatch,
    ViewsContext,
)
from memopd_trace.rules.registry import Hit, Phase, Rule
from memopd_trace.rules.rowindex import RowIndex, keys_of
from memopd_trace.rules.scorefiles import shown_at
from memopd_trace.schema import RECORDED, VIEWS_COLUMNS
from memopd_trace.scorefolder import HEAD, ScoresFolder, conform_scores, open_scores, shard_fault
from memopd_trace.viewfile import ViewsReader


class JoinedCheck:
    """What one trace is checked with beside itself."""

    def __init__(self, index: RowIndex, rules: Sequence[Rule], log: Log) -> None:
        self.index, self.log = index, log
        self.rules: dict[Phase, list[Rule]] = {}
        for rule in rules:
            self.rules.setdefault(rule.phase, []).append(rule)

    def run(self, views: Place | None, scores: Sequence[Place]) -> tuple[InputSummary, ...]:
        """Check a views file and scores folders; what they come to is in the log."""
        with np.errstate(all="ignore"):  # of NaN and infinity the rules speak
            return self._run(views, scores)

    def _run(self, views: Place | None, scores: Sequence[Place]) -> tuple[InputSummary, ...]:
        summaries = []
        folders: list[tuple[InputSummary, ScoresFolder | None]] = []
        for path in scores:
            summary = InputSummary("scores", str(path))
            folders.append((summary, self._open(summary, open_scores, path)))
        found = None
        if views is not None:
            summaries.append(InputSummary("views", str(views)))
            reader = self._open(summaries[-1], ViewsReader, views)
            if reader is not None:
                found = self._views(reader, summaries[-1], {f.metadata.view for _, f in folders if f is not None})
        earlier: list[ScoresContext] = []
        for summary, folder in folders:
            summaries.append(summary)
            if folder is not None:
                earlier.append(self._scores(folder, summary, found, earlier, len(folders) > 1))
        return tuple(summaries)

    def _open(self, summary: InputSummary, make: Callable[[Place], Any], path: Place) -> Any:
        try:
            return make(path)
        except InputError as error:
            summary.refused = self.log.refuse(path, error)
            self._explain(summary.kind, f"the {summary.kind} were refused")
            return None

    def _explain(self, want: str, reason: str) -> None:
        for rule in (r for rules in self.rules.values() for r in rules):
            if rule.wants == want:
                self.log.reasons.setdefault(rule.code, reason)

    # views

    def _views(self, reader: ViewsReader, summary: InputSummary, scored: set[str]) -> ViewsContext | None:
        file = ViewsContext(reader.path, reader.metadata, self.index, frozenset(scored - {RECORDED}))
        tracker = _Tracker(self.index)
        try:
            for raw in reader.iter_raw():
                batch, misfits = conform_batch(raw, VIEWS_COLUMNS)
                for misfit in misfits:
                    file.misfits.setdefault(misfit.column, misfit)
                if not file.misfits:
                    self._views_batch(file, batch, tracker)
                file.rows += batch.num_rows
        except InputError as error:
            summary.refused = self.log.refuse(reader.path, error)
        summary.rows = file.rows
        self._file_rules("views-file", file, lambda hit: (reader.path, None))
        self._explain("views", "the views hold no row that could be judged")
        return None if summary.refused or file.misfits else file

    def _views_batch(self, file: ViewsContext, table: pa.RecordBatch, tracker: _Tracker) -> None:
        for name in table.schema.names:
            if table.column(name).null_count < table.num_rows:
                file.first_value.setdefault(name, file.rows)
        at, repeated, backwards = tracker.mark(table, table.column("view").to_pylist())
        row = file.rows + np.arange(table.num_rows)
        batch: ViewBatch = self._fitting("views-shape", ViewBatch(file, table, at, row, repeated, backwards), file.path)
        file.models.update(batch.known["model"].tolist())
        self._batch_rules("views", batch, file.path)
        for view in file.wanted:
            digests = file.digests_of(view)
            for at_row in np.flatnonzero(batch.equals("view", view)):
                digests[batch.at[at_row]] = batch.digest(int(at_row))

    # scores

    def _scores(
        self,
        folder: ScoresFolder,
        summary: InputSummary,
        views: ViewsContext | None,
        earlier: Sequence[ScoresContext],
        several: bool,
    ) -> ScoresContext:
        file = ScoresContext(folder, self.index, views, np.zeros(len(self.index.rows), np.int32))
        if several:
            file.logprobs = _file_of_nans(len(self.index.tokens))
            file.others = [(c.folder, c.logprobs) for c in earlier if _same_teacher(c.folder, folder)]
        file.headless = _without_head(file)
        meta = RULES["E-SCORES-META"]
        assert meta.check is not None
        if not list(meta.check(file)):
            tracker = _Tracker(self.index)
            for path in folder.files:
                self._shard(file, path, tracker, summary)
        summary.rows = sum(file.rows.values())
        self._file_rules("scores-file", file, lambda hit: shown_at(file, hit))
        self._explain("scores", "the scores hold no row that could be judged")
        return file

    def _shard(self, file: ScoresContext, path: Place, tracker: _Tracker, summary: InputSummary) -> None:
        fault = shard_fault(path, file.run)
        if fault is not None:
            file.faults[path] = fault
            return
        rows = 0
        try:
            for raw in iter_file(path):
                table, misfits = conform_scores(raw, file.run)
                if misfits:
                    file.misfits[path] = misfits
                    return
                self._scores_batch(file, table, path, rows, tracker)
                rows += raw.num_rows
        except InputError as error:
            summary.refused = self.log.refuse(path, error)
            return
        file.rows[path] = rows

    def _scores_batch(
        self, file: ScoresContext, table: pa.RecordBatch, path: Place, base: int, tracker: _Tracker
    ) -> None:
        at, repeated, backwards = tracker.mark(table, [""] * table.num_rows)
        row = base + np.arange(table.num_rows)
        whole = ScoreBatch(file, table, at, row, repeated, backwards)
        batch: ScoreBatch = self._fitting("scores-shape", whole, path)
        file.models.update(batch.known["model"].tolist())
        teacher = (file.run.teacher.tokenizer_fingerprint, file.run.teacher.head.size)
        same = [(m.tokenizer.fingerprint, m.tokenizer.size) == teacher for m in self.index.models]
        same_tokenizer = np.array([*same, False])[batch.known["model"]]
        batch.excuse(~same_tokenizer)
        batch = batch.keep(same_tokenizer)  # of another one, no number means anything
        self._batch_rules("scores", batch, path)
        _count(file, batch)

    # rules

    def _fitting(self, phase: Phase, batch: Any, path: Place) -> Any:
        """The rows that pass the shape rules, whichever were chosen, and whose trace row can be judged."""
        for rule in (r for r in RULES.values() if r.phase == phase):
            assert rule.check is not None
            fits = np.ones(len(batch), bool)
            for hit in rule.check(batch):
                self._batch_hit(rule, path, batch, hit)
                fits[hit.row] = False
            batch.excuse(~fits)
            self.log.ran.add(rule.code)
            batch = batch.keep(fits)
            if rule.code in ("E-VIEW-ROW", "E-SCORES-ROW"):
                batch = batch.keep(batch.known["sound"])
        return batch

    def _batch_rules(self, phase: Phase, batch: Any, path: Place) -> None:
        for rule in self.rules.get(phase, ()):
            reason = rule.unless(batch) if rule.unless else None
            if reason is not None:
                self.log.reasons.setdefault(rule.code, reason)
            elif len(batch):
                assert rule.check is not None
                self.log.ran.add(rule.code)
                for hit in rule.check(batch):
                    self._batch_hit(rule, path, batch, hit)

    def _file_rules(self, phase: Phase, file: Any, where: Callable[[Hit], tuple[Place, int | None]]) -> None:
        for rule in self.rules.get(phase, ()):
            reason = rule.unless(file) if rule.unless else None
            if reason is not None:
                self.log.reasons.setdefault(rule.code, reason)
                continue
            assert rule.check is not None
            self.log.ran.add(rule.code)
            for hit in rule.check(file):
                path, row = where(hit)
                self.log.add(rule, path, hit, row, (None, None))

    def _batch_hit(self, rule: Rule, path: Place, batch: JoinedBatch, hit: Hit) -> None:
        assert hit.row is not None, rule.code
        key = batch.text("episode_id", hit.row), batch.column("invocation_index")[hit.row].as_py()
        self.log.add(rule, path, hit, int(batch.row[hit.row]), key)


class _Tracker:
    """Which rows of the trace came already, under each name, and how far down the trace the last one was."""

    def __init__(self, index: RowIndex) -> None:
        self.index = index
        self._seen: dict[str, NDArray[np.bool_]] = {}
        self._last = (-1, -1)

    def mark(self, table: pa.RecordBatch, names: Sequence[str]) -> tuple[Ints, NDArray[np.bool_], NDArray[np.bool_]]:
        """(index of each row, whether it came before under its name, whether a later row of the trace came before)."""
        at = self.index.find(keys_of(table))
        repeated, backwards = np.zeros((2, len(at)), bool)
        rows = self.index.rows
        for row, (where, name) in enumerate(zip(at.tolist(), names, strict=True)):
            if where < 0:
                continue
            seen = self._seen.setdefault(name, np.zeros(len(rows), bool))
            repeated[row], seen[where] = seen[where], True
            place = int(rows["file"][where]), int(rows["row"][where])
            backwards[row] = place < self._last
            self._last = max(self._last, place)
        return at, repeated, backwards


def _count(file: ScoresContext, batch: ScoreBatch) -> None:
    """What is kept of a batch of whole rows: covered tokens, lags, temperatures, log-probabilities."""
    index, logprob, token = file.index, batch.vector("logprob"), batch.token
    trained = index.tokens["trained"][token]
    file.covered[batch.at] += np.bincount(batch.row_of_output, trained, len(batch)).astype(np.int32)
    sampled_at = batch.known["temperature"]
    file.tempered |= bool(((sampled_at > 0) & (np.abs(sampled_at - file.run.temperature) > 1e-6)).any())
    if len(file.logprobs):
        file.logprobs[token] = logprob
    own = np.array(
        [_sampled_by(file, *pair) for pair in zip(batch.known["model"], batch.known["version"], strict=True)]
    )
    if not own.any():
        return
    first, stop = batch.known["first"][batch.row_of_output], batch.known["first"] + batch.known["outputs"]
    stop = stop[batch.row_of_output]
    for number, lag in enumerate(LAGS):
        there = own[batch.row_of_output] & (token + lag >= first) & (token + lag < stop)
        apart = np.abs(logprob[there] - index.tokens["logprob"][token[there] + lag])
        given = ~np.isnan(apart)
        file.lags[number] += apart[given].sum(), given.sum()


def _sampled_by(file: ScoresContext, model: int, version: int) -> bool:
    """Whether the teacher's very weights are those of a policy of the trace."""
    described = file.index.models[model]
    policy = described.policies.get(str(version))
    digest = policy.weights_digest if policy is not None else described.weights_digest
    return digest is not None and digest == file.run.teacher.weights_digest


def _same_teacher(a: ScoresFolder, b: ScoresFolder) -> bool:
    """Whether two runs must give the same numbers."""
    facts = ("weights_digest", "config_digest", "dtype")
    own, other = a.metadata, b.metadata
    return (own.view, own.temperature) == (other.view, other.temperature) and all(
        getattr(own.teacher, f) == getattr(other.teacher, f) for f in facts
    )


def _without_head(file: ScoresContext) -> str | None:
    """Why states cannot be held against the head, which is looked at once; a fault of it is noted."""
    if file.run.hidden_dtype is None:
        return "the scores hold no states"
    path = file.folder.path / HEAD
    if not path.is_file():
        file.faults[path] = "missing"
        return "the head is missing"
    if find_spec("torch") is None or find_spec("safetensors") is None:
        return "needs the extra 'score': pip install 'memopd-trace[score]'"
    from memopd_scorer.headfile import head_is_whole

    if not head_is_whole(path, file.run):
        file.faults[path] = "not the head that the scores were made with"
        return "the head is damaged"
    return None


def _file_of_nans(count: int) -> NDArray[np.float32]:
    """float32[count] of NaN, in a file without a name."""
    if not count:
        return np.empty(0, np.float32)
    array = np.memmap(tempfile.TemporaryFile(), np.float32, "w+", shape=(count,))  # noqa: SIM115 - lives as long
    array[:] = np.nan
    return array
