"""What a format is: one entry, one function that reads a record, and what a person has to know before converting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from memopd_trace.convert.draft import Draft
from memopd_trace.convert.losses import Issue, Losses
from memopd_trace.convert.records import SUFFIXES, Record, json_records

Exactness = Literal["ids", "some ids", "text"]
EXACTNESS: dict[Exactness, str] = {
    "ids": "the engine's own ids",
    "some ids": "the engine's own ids, where the log has them; else text",
    "text": "text, encoded again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One log format.

    name: as the command line takes it.
    title: whose logs, in one line.
    exactness: `ids`, `some ids` or `text`; a text format needs a tokenizer.
    read: a record's value -> drafts of episodes (or pieces of them). Raises `BrokenRecord` for what the format does not
        allow, `NotACall` for a record that tells nothing of a call.
    unsaid: what no log of this format can tell: codes of `memopd_trace.convert.gaps`, each counted as one gap.
    note: what else a person has to know, in a sentence.
    records: files -> records; JSON unless the format has another form on disk.
    suffixes: which files of a folder are read.
    """

    name: str
    title: str
    exactness: Exactness
    read: Callable[[Any, Losses], Iterable[Draft]]
    unsaid: Sequence[str] = ()
    note: str = ""
    records: Callable[[Iterable[Path]], Iterator[Record | Issue]] = json_records
    suffixes: Sequence[str] = SUFFIXES

    def to_json(self) -> dict[str, Any]:
        """What a person has to know, as plain values."""
        return {
            "name": self.name,
            "title": self.title,
            "exactness": self.exactness,
            "tokenizer": {"ids": "optional", "some ids": "for calls without ids", "text": "needed"}[self.exactness],
            "cannot_tell": list(self.unsaid),
            "note": self.note,
        }
