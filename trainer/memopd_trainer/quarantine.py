"""Bad episodes apart from good ones: each in a trace of its own kind, and for each bad one the reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from memopd_trace.disk import atomic_file, atomic_folder
from memopd_trace.errors import CheckFailed, printable
from memopd_trace.invocation import Invocation
from memopd_trace.storage import TraceReader, TraceWriter
from memopd_trace.validate import validate

ACCEPTED, QUARANTINED, REASONS = "accepted.parquet", "quarantined.parquet", "reasons.json"
MAX_FINDINGS = 1_000_000


@dataclass(frozen=True, slots=True)
class Reason:
    """Why an episode is bad. `code` is that of a rule, where one was broken."""

    episode_id: str
    message: str
    code: str | None = None
    invocation_index: int | None = None


@dataclass(frozen=True, slots=True)
class BadEpisode:
    """An episode that could not be finished: the calls it had made, which may be none."""

    reason: Reason
    rows: tuple[Invocation, ...] = ()


def write_reasons(path: Path, reasons: Sequence[Reason]) -> None:
    """Write them as a JSON list."""
    with atomic_file(path) as out:
        out.write(json.dumps([asdict(r) for r in reasons], indent=1).encode())


def read_reasons(path: Path) -> list[Reason]:
    """What `write_reasons` wrote; none where there is no file."""
    return [Reason(**r) for r in json.loads(path.read_bytes())] if path.exists() else []


def separate(recorded: Path, folder: Path, *, go_on: bool) -> None:
    """Validate a folder of rollouts (its accepted and quarantined episodes) under `train`, and make `folder` of it:
    accepted and quarantined episodes, and the reasons. Without `go_on` nothing may be bad.

    Raises:
        CheckFailed: a fault that is not one episode's, a bad episode without `go_on`, or no good one.
    """
    source = recorded / ACCEPTED
    report = validate(source, "train", max_findings=MAX_FINDINGS)
    errors = [f for f in report.findings if f.severity == "error"]
    known = read_reasons(recorded / REASONS)
    for f in errors:
        if f.episode_id is None:
            raise CheckFailed(f"{source}: {printable(f.message)}", code=f.code, hint=f.hint)
        known.append(Reason(f.episode_id, printable(f.message), f.code, f.invocation_index))
    first = dict[str, Reason]()
    for reason in known:
        first.setdefault(reason.episode_id, reason)
    if first and not go_on:
        reason = next(iter(first.values()))
        raise CheckFailed(
            f"{source}: {len(first)} bad episodes, the first is '{printable(reason.episode_id)}': {reason.message}",
            code=reason.code,
            hint="on_bad: quarantine leaves them out and goes on",
        )
    with atomic_folder(folder) as made:
        if first:
            _copy([recorded / QUARANTINED, source], made / QUARANTINED, first, inside=True)
        if not _copy([source], made / ACCEPTED, first, inside=False):
            raise CheckFailed(
                f"{source}: no episode is good ({_counted(known)})", hint="the environment or the policy is at fault"
            )
        write_reasons(made / REASONS, known)


def _copy(sources: Sequence[Path], target: Path, names: dict[str, Reason], *, inside: bool) -> int:
    """Copy the episodes whose names are (or are not) among `names`, row by row as they are; how many rows."""
    readers = [TraceReader(source) for source in sources if source.exists()]
    wanted, rows = pa.array(list(names), pa.string()), 0
    with TraceWriter(target, readers[0].metadata) as writer:
        for batch in (batch for reader in readers for batch in reader.iter_batches()):
            mask = pc.is_in(batch.column("episode_id").cast(pa.string()), value_set=wanted)
            chosen = batch.filter(mask if inside else pc.invert(mask))
            if chosen.num_rows:
                writer.write_batch(chosen)
                rows += chosen.num_rows
    return rows


def _counted(reasons: Sequence[Reason]) -> str:
    counts = Counter(r.code or r.message for r in reasons)
    return ", ".join(f"{count} x {what}" for what, count in counts.most_common(3))
