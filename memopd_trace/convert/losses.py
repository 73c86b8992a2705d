"""The loss table of a conversion: what came in, what went out, and where the rest is. Nothing vanishes uncounted:

    records in == records converted + records dropped        a record: one object of the log
    calls in   == rows out + calls dropped                   a call: what a record says about one call of a model

*Degraded* is a call that is a row and lost something on the way. A *gap* is what no row of the trace, or not each,
could be told; gaps also stand in the trace's metadata (`source.gaps`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memopd_trace.convert.gaps import GAPS
from memopd_trace.errors import printable

MAX_ISSUES = 100  # broken records that are listed; all are counted
MAX_SHOWN = 20  # of them in a text
MAX_HISTORY = 2**25  # messages in all prompts of one record; each prompt repeats those before it


class BrokenRecord(Exception):
    """A record that is damaged or not what the format says: reported with its place, dropped, and exit code 1."""


class NotACall(Exception):
    """A whole record that tells of no model call, nor anything about one: dropped and counted, and no fault."""


@dataclass(frozen=True, slots=True)
class Issue:
    """A broken record: where it stands and what is wrong with it, in one line."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{printable(self.place, None)}: {printable(self.reason, 400)}"


@dataclass(slots=True)
class Count:
    """How often something happened, and one case of it."""

    number: int = 0
    example: str = ""


class Tally(dict[str, Count]):
    """Counts by reason, in the order in which they first came up."""

    def add(self, reason: str, example: str = "", number: int = 1) -> None:
        """Count `number` cases; the first `example` is kept."""
        count = self.setdefault(reason, Count(example=example))
        count.number += number

    @property
    def total(self) -> int:
        """All cases."""
        return sum(count.number for count in self.values())


@dataclass(slots=True)
class Losses:
    """Everything that a conversion counts. `place` is the record that is being read."""

    records: int = 0
    converted: int = 0
    calls: int = 0
    rows: int = 0
    episodes: int = 0
    dropped_records: Tally = field(default_factory=Tally)
    dropped_calls: Tally = field(default_factory=Tally)
    degraded: Tally = field(default_factory=Tally)
    gaps: Tally = field(default_factory=Tally)
    issues: list[Issue] = field(default_factory=list)
    broken: int = 0
    versions: set[str] = field(default_factory=set)
    place: str = ""
    _history: int = 0

    def begin(self, place: str) -> None:
        """The next record."""
        self.place, self._history = place, 0

    def history(self, messages: int) -> None:
        """A call of this record has a prompt of so many messages, which repeats those of others.

        Raises:
            BrokenRecord: they are too many in all for memory, of which a short log may ask for very much.
        """
        self._history += messages
        if self._history > MAX_HISTORY:
            raise BrokenRecord(
                f"more than {MAX_HISTORY} messages in the prompts of one conversation, each counted anew"
            )

    def broke(self, issue: Issue, number: int = 1) -> None:
        """A record that could not be read, or `number` that are read as one."""
        self.broken += number
        self.dropped_records.add("broken", str(issue), number)
        if len(self.issues) < MAX_ISSUES:
            self.issues.append(issue)

    def skip(self, reason: str, number: int = 1) -> None:
        """A record that tells nothing of a call. Where several are read as one, a converter says so of each."""
        self.dropped_records.add(f"no call: {reason}", self.place, number)

    def drop(self, reason: str, detail: str = "") -> None:
        """A call that is no row."""
        self.dropped_calls.add(reason, self._case(detail))

    def lose(self, reason: str, number: int = 1) -> None:
        """Calls of which a record tells nothing but that they took place."""
        self.calls += number
        self.dropped_calls.add(reason, self.place, number)
        self.gap("lost_calls", reason, number)

    def version(self, text: str | None) -> None:
        """Which version of its format a record is of, in the log's own words."""
        if text is not None and len(self.versions) < MAX_ISSUES:
            self.versions.add(text)

    def degrade(self, reason: str, detail: str = "", number: int = 1) -> None:
        """A row that lost something; `detail` says both values where there are two."""
        self.degraded.add(reason, self._case(detail), number)

    def gap(self, code: str, detail: str = "", number: int = 1) -> None:
        """What the source could not tell; `code` is a word of `memopd_trace.convert.gaps`."""
        assert code in GAPS, code
        self.gaps.add(code, detail, number)

    def balanced(self) -> bool:
        """Whether everything that came in is accounted for."""
        return (
            self.records == self.converted + self.dropped_records.total
            and self.calls == self.rows + self.dropped_calls.total
        )

    def to_json(self) -> dict[str, Any]:
        """The table as plain values."""
        return {
            "records": {"in": self.records, "converted": self.converted, "dropped": _plain(self.dropped_records)},
            "calls": {"in": self.calls, "rows": self.rows, "dropped": _plain(self.dropped_calls)},
            "episodes": self.episodes,
            "degraded": _plain(self.degraded),
            "gaps": _plain(self.gaps),
            "broken": [{"place": i.place, "reason": i.reason} for i in self.issues],
            "broken_total": self.broken,
        }

    def to_text(self) -> str:
        """The table for a person."""
        lines = [
            f"records   {self.records} in, {self.converted} converted, {self.dropped_records.total} dropped",
            *_lines(self.dropped_records),
            f"calls     {self.calls} in, {self.rows} {_plural('row', self.rows)} in "
            f"{self.episodes} {_plural('episode', self.episodes)}, "
            f"{self.dropped_calls.total} dropped",
            *_lines(self.dropped_calls),
        ]
        if self.degraded:
            lines += ["degraded", *_lines(self.degraded)]
        if self.gaps:
            lines += ["gaps", *_lines(self.gaps)]
        if self.issues:
            lines += ["broken", *(f"  {issue}" for issue in self.issues[:MAX_SHOWN])]
        if self.broken > MAX_SHOWN:
            lines.append(f"  … and {self.broken - MAX_SHOWN} more")
        return "\n".join(lines) + "\n"

    def _case(self, detail: str) -> str:
        return f"{self.place}: {detail}" if detail else self.place


def _plural(word: str, number: int) -> str:
    return word if number == 1 else f"{word}s"


def _lines(tally: Tally) -> list[str]:
    shown = [(count.number, reason, count.example) for reason, count in tally.items()]
    return [
        f"  {number:>8}  {printable(reason)}" + (f" ({printable(example, 300)})" if example else "")
        for number, reason, example in shown
    ]


def _plain(tally: Tally) -> dict[str, Any]:
    return {reason: {"count": count.number, "example": count.example} for reason, count in tally.items()}
