"""Session files, of which no line can be read alone: line by line, and with the files that belong to them.

A line that is broken is reported as such, one that tells nothing of a call is counted, and the others go on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from memopd_trace.convert.draft import MAX_DEPTH, Draft, is_too_deep
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import MAX_RECORD, READ_FAULTS, Record, json_files, open_text, size_of

HEAD = 2**16  # bytes of a file in which its names are looked for


def each_line(records: Iterable[Record], losses: Losses, step: Callable[[Fields], None]) -> None:
    """Call `step` with each line. It raises `BrokenRecord` or `NotACall` before it changes anything."""
    for record in records:
        losses.place = record.place
        try:
            if is_too_deep(Draft(episode_id="", extra={"line": record.value})):
                raise BrokenRecord(f"is nested in more than {MAX_DEPTH} levels")
            step(Fields(record.value, losses))
        except NotACall as reason:
            losses.skip(str(reason))
        except BrokenRecord as error:
            losses.broke(Issue(record.place, str(error)))


def families(files: Iterable[Path], *names: re.Pattern[bytes]) -> Iterator[Record | Issue]:
    """Files that share what one of `names` finds first in them, as one record: the list of the records of all, in the
    order of the files. A family too large for memory is read file by file."""
    for family in _joined(list(files), names):
        parts = [family] if sum(map(size_of, family)) <= MAX_RECORD else [[f] for f in family]
        for part in parts:
            lines: list[Record] = []
            length = 0
            for found in json_files(part):
                if not isinstance(found, Record):
                    yield found
                    continue
                length += found.length
                if lines and length > MAX_RECORD:  # the files are packed, and there is more in them
                    yield Record(str(part[0]), lines, len(lines))
                    lines, length = [], found.length
                lines += found.value
            if lines:
                yield Record(str(part[0]), lines, len(lines))


def _joined(files: list[Path], names: Sequence[re.Pattern[bytes]]) -> list[list[Path]]:
    """The families, in the order of their first files."""
    family_of: dict[bytes, list[Path]] = {}
    families: list[list[Path]] = []
    for file in files:
        keys = _keys(file, names)
        known = [family_of[key] for key in keys if key in family_of]
        family = known[0] if known else []
        if not known:
            families.append(family)
        for other in known[1:]:
            if other is not family:  # this file ties two families together
                family += other
                families = [f for f in families if f is not other]
                family_of |= {key: family for key, value in family_of.items() if value is other}
        family.append(file)
        family_of |= dict.fromkeys(keys, family)
    return families


def _keys(file: Path, names: Sequence[re.Pattern[bytes]]) -> list[bytes]:
    try:
        with open_text(file) as stream:
            head = stream.read(HEAD)
    except READ_FAULTS:  # reported where the file is read
        return []
    return [match[0] for name in names if (match := name.search(head))]
