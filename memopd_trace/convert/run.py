"""The verb `convert`: a log in another format -> a trace, checked, and a table of what was lost on the way."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memopd_trace.convert.assemble import Assembler
from memopd_trace.convert.chat import Renderer
from memopd_trace.convert.draft import MAX_DEPTH, Draft, is_too_deep
from memopd_trace.convert.format import Format
from memopd_trace.convert.formats import find
from memopd_trace.convert.known import Known, metadata_of, profile_of
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import Record, find_files
from memopd_trace.convert.spool import RowSpool, SideFile, Spool
from memopd_trace.disk import sync_folder
from memopd_trace.errors import CheckFailed, UsageError, first_line, printable
from memopd_trace.parts import SUFFIXES
from memopd_trace.report import Report
from memopd_trace.schema import LOGPROB_KINDS
from memopd_trace.storage import TraceWriter
from memopd_trace.validate import validate

FAULT = "not understood, by a fault of the converter (please report it)"
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Conversion:
    """The outcome: the loss table, the report on the trace, and where things are (`None` where nothing was written).

    `trace` is the trace, or `OUT.invalid` where it broke a rule. `aside` holds what was too large for its row.
    """

    format: str
    losses: Losses
    trace: Path | None
    aside: Path | None
    report: Report | None

    @property
    def valid(self) -> bool:
        """Whether a trace was written and breaks no rule of its profile."""
        return self.report is not None and not self.report.errors

    def exit_code(self) -> int:
        """0 all fine, 1 broken records or an invalid trace, 3 nothing could be converted."""
        if self.report is None:
            return 3
        return 1 if self.losses.broken or not self.valid else 0

    def _way_out(self) -> str:
        """Where no record was understood, the log is likely another format's."""
        understood = self.losses.converted or self.losses.broken < self.losses.records
        return "" if understood else f" (is it a log of '{self.format}'? `memopd-trace formats` lists the others)"

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        report = self.report
        return {
            "format": self.format,
            "trace": None if self.trace is None else str(self.trace),
            "aside": None if self.aside is None else str(self.aside),
            **self.losses.to_json(),
            "validated": None
            if report is None
            else {"profile": report.profile, "errors": report.errors, "warnings": report.warnings},
        }

    def to_text(self) -> str:
        """For a person."""
        text = self.losses.to_text()
        if self.report is None:
            return text + "written   nothing: no call could be converted" + self._way_out() + "\n"
        text += f"written   {printable(str(self.trace), None)}\n"
        if self.aside is not None:
            text += f"          {printable(str(self.aside), None)} holds what was too large for a row\n"
        found = self.report
        text += f"validated {found.profile}: {found.errors} errors, {found.warnings} warnings\n"
        return text + "".join(f"  {f.code} {printable(f.message, 300)}\n" for f in found.findings[:10])


def convert(
    format: str,
    inputs: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    tokenizer: PathLike | None = None,
    model_id: str | None = None,
    logprob_kind: str | None = None,
    strict: bool = False,
    on_record: Callable[[int], None] | None = None,
) -> Conversion:
    """Convert logs into a trace.

    Args:
        format: a name that `memopd-trace formats` prints.
        inputs: files, folders (all their files of the format) or globs.
        out: the trace: `.parquet`, `.arrow`, `.ipc`, `.feather`, or without a suffix a folder.
        tokenizer: the folder of the model's tokenizer. Text becomes ids by it, and it names whose ids they are.
        model_id: the one model that all calls are of, whatever the log calls it.
        logprob_kind: what the log's log-probabilities are, where the log does not say: `raw`, `tempered` or
            `processed`.
        strict: stop at the first broken record; nothing is written then.
        on_record: called with the number of records so far, after each one that held something.

    Returns:
        The outcome. What could be converted is written; a trace that breaks a rule is kept as `OUT.invalid`.

    Raises:
        UsageError: an unknown format, an output that exists, a text format without a tokenizer.
        InputError: an input is missing, or the tokenizer is none.
        CheckFailed: a broken record, with `strict`.
    """
    chosen, target = find(format), _target(out)
    if logprob_kind not in (None, *LOGPROB_KINDS):
        raise UsageError(f"logprob_kind '{logprob_kind}'", hint=f"one of {', '.join(LOGPROB_KINDS)}")
    files = find_files([inputs] if isinstance(inputs, str | os.PathLike) else inputs, chosen.suffixes)
    if tokenizer is None and chosen.exactness == "text":
        raise UsageError(f"'{chosen.name}' holds text and no ids", hint="give the model's tokenizer: --tokenizer DIR")
    losses = Losses()
    renderer = None if tokenizer is None else Renderer(tokenizer)
    readable = None if renderer is None else renderer.pieces()
    assembler = Assembler(losses, renderer, readable, model_id, logprob_kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = stack.enter_context(_workplace(target))
        pieces_of, rows = stack.enter_context(Spool(folder)), stack.enter_context(RowSpool(folder / "rows"))
        aside = stack.enter_context(SideFile(folder / "aside"))
        known, again = Known(), dict[str, int]()

        def finish(draft: Draft) -> None:
            for row in assembler.rows(_renamed(draft, known, losses, again)):
                rows.add(row.invocation)
                known.learn(row.invocation)
                if row.aside:
                    aside.add(row.invocation, row.aside)

        for draft in _drafts(chosen, files, losses, strict):
            if draft.whole:
                finish(draft)
            else:
                pieces_of.add(draft.episode_id, draft)
            if on_record is not None:
                on_record(losses.records)
        for pieces in pieces_of:
            finish(_joined(pieces, losses))
        if not losses.rows:
            return Conversion(chosen.name, losses, None, None, None)
        known.to_gaps(losses, chosen, renderer)
        made = folder / target.name
        with TraceWriter(made, metadata_of(chosen, files, losses, known, renderer)) as writer:
            for batch in rows:
                writer.write_batch(batch)
        report = validate(made, profile_of(losses), max_findings=10)
        return _put_in_place(made, aside, target, Conversion(chosen.name, losses, None, None, report))


def _target(out: PathLike) -> Path:
    target = Path(out)
    if target.name in ("", ".."):
        raise UsageError(f"{target}: is a folder", hint="give the name of the trace to write")
    for path in (target, _named(target, ".invalid"), _named(target, ".aside.jsonl.zst")):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path}: exists already", hint="remove it or write elsewhere")
    if target.suffix and target.suffix not in SUFFIXES:
        raise UsageError(
            f"{target}: unknown suffix '{target.suffix}'",
            hint=f"use one of {', '.join(SUFFIXES)}, or no suffix for a folder",
        )
    return target


def _named(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)


def _drafts(chosen: Format, files: Sequence[Path], losses: Losses, strict: bool) -> Iterator[Draft]:
    for record in chosen.records(files):
        losses.begin(record.place)
        if isinstance(record, Record):
            yield from _read(chosen, record, losses)
        else:
            losses.records += 1
            losses.broke(record)
        if strict and losses.issues:
            raise CheckFailed(str(losses.issues[0]), hint="without --strict the rest is converted")


def _read(chosen: Format, record: Record, losses: Losses) -> list[Draft]:
    """The drafts of a record. A converter may say of single ones of several records that they are dropped."""
    before = losses.dropped_records.total
    losses.records += record.size

    def left() -> int:
        return record.size - (losses.dropped_records.total - before)

    try:
        found = list(chosen.read(record.value, losses))
        if not found and left():
            raise NotACall("nothing in it")
        if any(map(is_too_deep, found)):
            raise BrokenRecord(f"is nested in more than {MAX_DEPTH} levels")
        losses.converted += left()
        return found
    except NotACall as reason:
        losses.skip(str(reason), left())
    except BrokenRecord as error:
        losses.broke(Issue(record.place, str(error)), left())
    except MemoryError:
        raise
    except Exception as error:  # a converter's own fault must not cost the rest of the log
        losses.broke(Issue(record.place, f"{FAULT}: {type(error).__name__}: {first_line(error)}"), left())
    return []


def _renamed(draft: Draft, known: Known, losses: Losses, again: dict[str, int]) -> Draft:
    """The episode under a name that no earlier one has. `again` keeps the last number that each name was given."""
    if draft.episode_id in known.outcome:
        number = again.get(draft.episode_id, 1) + 1
        while f"{draft.episode_id}~{number}" in known.outcome:
            number += 1
        again[draft.episode_id] = number
        losses.degrade("an episode's id occurs again", f"'{draft.episode_id}' became '…~{number}'")
        draft.episode_id = f"{draft.episode_id}~{number}"
    return draft


def _joined(pieces: list[Draft], losses: Losses) -> Draft:
    first, *more = pieces
    for piece in more:
        for name in first.absorb(piece):
            losses.degrade(f"told twice and differently, the last word holds: {name}", first.episode_id)
    return first


def _put_in_place(made: Path, aside: SideFile, target: Path, done: Conversion) -> Conversion:
    """Give the trace its name, `.invalid` where it breaks a rule, and put the side file beside it."""
    trace, beside = target if done.valid else _named(target, ".invalid"), None
    _target(target)  # another conversion may have written there meanwhile
    if aside.finish():
        beside = _named(target, ".aside.jsonl.zst")
        aside.path.rename(beside)
    made.rename(trace)
    sync_folder(target.parent)
    return replace(done, trace=trace, aside=beside)


@contextmanager
def _workplace(target: Path) -> Iterator[Path]:
    """A folder beside the target for what is not finished; it goes when the conversion ends."""
    _remove_leftovers(target)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name[:200]}.", suffix=".tmp"))
    held = _hold(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_leftovers(target: Path) -> None:
    """Remove the folders of conversions into this name that were killed; one that is under way holds its own."""
    for folder in target.parent.glob(f".{glob.escape(target.name[:200])}.????????.tmp"):
        with suppress(OSError):
            held = _hold(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)


def _hold(folder: Path) -> int:
    """Hold a folder until its descriptor is closed or the process ends.

    Raises:
        OSError: another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
