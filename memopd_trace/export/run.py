"""The verb `export`: a trace -> the rows that another trainer takes, and a table of what they could not carry."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopd_trace import __version__
from memopd_trace.disk import atomic_file, atomic_folder, sync_folder
from memopd_trace.errors import CheckFailed, InputError, UsageError, printable
from memopd_trace.export.format import Context, Format, Sink
from memopd_trace.export.formats import find
from memopd_trace.export.losses import Losses
from memopd_trace.export.samples import FEATURES, samples
from memopd_trace.export.scores import Scores
from memopd_trace.places import PathLike
from memopd_trace.storage import TraceReader
from memopd_trace.validate import validate


@dataclass(frozen=True, slots=True)
class Export:
    """The outcome: the loss table, and where the rows are (`None` where `strict` wrote nothing)."""

    format: str
    losses: Losses
    path: Path | None

    def exit_code(self) -> int:
        """0 written, 1 `strict` and something would be lost."""
        return 0 if self.path is not None else 1

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "format": self.format,
            "written": None if self.path is None else str(self.path),
            **self.losses.to_json(),
        }

    def to_text(self) -> str:
        """For a person."""
        where = "nothing: --strict, and something would be lost" if self.path is None else str(self.path)
        return f"{self.losses.to_text()}written   {printable(where, None)}\n"


class _Strict(Exception):
    """Something would be lost."""


def export(
    format: str,
    trace: PathLike,
    out: str | os.PathLike[str],
    *,
    scores: PathLike | None = None,
    drop: Collection[str] = (),
    strict: bool = False,
    overwrite: bool = False,
    on_row: Callable[[int], None] = lambda rows: None,
) -> Export:
    """Write a trace's rows as another trainer takes them, each call a row of its own.

    Args:
        format: a name that `memopd-trace exports` prints.
        trace: a trace, which is checked first (profile `core`).
        out: the file, or for some formats the folder. It is there whole or not at all.
        scores: a scores folder of the trace; joined by key, and checked.
        drop: features of `memopd_trace.export.FEATURES` that may be flattened; without it they are refused.
        strict: write nothing if anything is not carried.
        overwrite: replace what is there.
        on_row: called with the number of rows so far.

    Raises:
        UsageError: an unknown format or feature, scores that are missing or have no place, an output that exists.
        InputError: an unreadable trace or scores, a state that the target would judge as another one, scores of
            another state.
        CheckFailed: the trace breaks a rule.
        MissingExtraError: scores without the extra `score`.
    """
    chosen, target = find(format), Path(out)
    _check(chosen, target, scores is not None, drop, overwrite)
    if chosen.folder:
        target = Path(os.path.abspath(target))  # noqa: PTH100 - '.' has no name that could be given to another
    _must_be_apart(target, [(trace, "the trace"), *([] if scores is None else [(scores, "the scores")])])
    reader = TraceReader(trace)
    _must_be_valid(trace)
    joined = None if scores is None else Scores(scores)
    if joined is not None:
        joined.check(chosen, drop)
    context = Context(reader.metadata, None if joined is None else joined.metadata, _longest(chosen, reader))
    losses = Losses()
    try:
        with _opened(chosen, target, overwrite) as place, _aborting(chosen.open(place, context)) as sink:
            for sample in samples(chosen, reader.iter_episodes(), joined, drop, losses):
                sink.add(sample)
                losses.written += 1
                on_row(losses.rows)
            if joined is not None and len(joined) and losses.rows and not joined.used:
                raise InputError(f"{scores}: no row of it is of this trace", code="E-SCORES-ROW")
            if strict and losses.any:
                raise _Strict
            sink.close(_notes(chosen, context, drop, losses))
    except _Strict:
        return Export(chosen.name, losses, None)
    return Export(chosen.name, losses, target)


def _check(chosen: Format, target: Path, scored: bool, drop: Collection[str], overwrite: bool) -> None:
    for feature in drop:
        if feature not in FEATURES:
            raise UsageError(f"no feature '{feature}' to drop", hint=f"one of {', '.join(FEATURES)}")
    if scored and not chosen.takes_scores:
        raise UsageError(f"'{chosen.name}' has no place for scores", hint="leave --scores away")
    if chosen.needs_scores and not scored:
        raise UsageError(f"'{chosen.name}' is made of a teacher's scores", hint="give --scores DIR")
    if target.suffix != chosen.suffix:
        what = f"a name that ends in {chosen.suffix}" if chosen.suffix else "a folder, whose name has no suffix"
        raise UsageError(f"{target}: '{chosen.name}' is written as {what}", hint="rename the output")
    there = target.exists() or target.is_symlink()
    if there and not overwrite:
        raise UsageError(f"{target}: exists already", hint="--overwrite, or write elsewhere")
    if there and chosen.folder and (target.is_symlink() or not (target / chosen.marker).is_file()):
        raise UsageError(f"{target}: is no earlier export, so it is not overwritten", hint="write elsewhere")


def _must_be_apart(target: Path, read: Sequence[tuple[PathLike, str]]) -> None:
    """Raises:
    UsageError: the output would replace what is read, lie in its folder, or take its folder's place.
    """
    out = Path(os.path.realpath(target))
    for given, what in read:
        found = Path(os.path.realpath(given))
        if not found.exists():  # told where it is read; or it is no local path
            continue
        if out == found:
            raise UsageError(f"{target}: is {what} itself", hint="write elsewhere")
        if (found.is_dir() and found in out.parents) or out in found.parents:
            raise UsageError(f"{target}: and {what}, {given}, are one in the other", hint="write elsewhere")


def _must_be_valid(trace: PathLike) -> None:
    """Raises:
    InputError, CheckFailed: what the validator says of the trace.
    """
    report = validate(trace, max_findings=1)
    if report.errors:
        first = next(f for f in report.findings if f.severity == "error")
        kind = InputError if report.exit_code() == 3 else CheckFailed
        raise kind(f"{trace}: {first.message}", code=first.code, hint="`memopd-trace validate` tells all")


def _longest(chosen: Format, reader: TraceReader) -> int:
    """Tokens of the longest row, where the format fills all up to it."""
    if not chosen.pads:
        return 0
    rows = reader.iter_invocations(("prompt_ids", "output_ids"))
    return max((len(i.prompt_ids) + len(i.output_ids) for i in rows), default=0)


@contextmanager
def _opened(chosen: Format, target: Path, overwrite: bool) -> Iterator[Any]:
    """A file, or a folder, under a temporary name: put in place on leaving, removed on an exception."""
    if not chosen.folder:
        with atomic_file(target, new=not overwrite) as out:
            yield out
        return
    if not target.exists():
        with atomic_folder(target) as folder:
            yield folder
        return
    fresh, old = (target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp") for _ in range(2))
    with atomic_folder(fresh) as folder:
        yield folder
    target.rename(old)
    fresh.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old)


@contextmanager
def _aborting(sink: Sink) -> Iterator[Sink]:
    try:
        yield sink
    except BaseException:
        sink.abort()
        raise


def _notes(chosen: Format, context: Context, drop: Collection[str], losses: Losses) -> dict[str, Any]:
    """What the file is and what it lacks, as plain values; it stands in the file."""
    scores = context.scores
    teacher = None if scores is None else {"name": scores.teacher.name, "view": scores.view, "topk": scores.topk}
    return {
        "producer": f"memopd-trace {__version__}",
        "format": chosen.name,
        "models": {name: model.name for name, model in context.metadata.models.items()},
        "teacher": teacher,
        "dropped": sorted(drop),
        **losses.to_json(),
    }
