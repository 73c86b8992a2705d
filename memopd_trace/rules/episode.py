"""`Run`: the rows of one episode as rules see them, and `EpisodesSeen`, all that is kept of earlier ones."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Model, TraceMetadata
from memopd_trace.pieces import Pieces
from memopd_trace.rules.registry import Inputs

MAX_RANGES = 64  # remembered of one episode, so that a file of scattered rows takes no more memory than another


@dataclass(slots=True)
class Run:
    """Neighbouring rows of one file with one `episode_id`, in file order. `rows` are their row numbers.

    `unsound` = a row is missing here because a required cell is null, or the keys are broken.
    """

    episode_id: str
    metadata: TraceMetadata
    invocations: list[Invocation] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    unsound: bool = False
    inputs: Inputs = field(default_factory=Inputs)
    _by_index: dict[int, Invocation] = field(default_factory=dict)

    def add(self, row: int, invocation: Invocation) -> None:
        """Add the next row."""
        self.rows.append(row)
        self.invocations.append(invocation)
        self.know(invocation)

    def know(self, invocation: Invocation) -> None:
        """Let the rows of this run refer to an invocation that is not judged here."""
        self._by_index.setdefault(invocation.invocation_index, invocation)

    @property
    def known(self) -> Collection[Invocation]:
        """The invocations of this run and those that it may refer to."""
        return self._by_index.values()

    def earlier(self, invocation: Invocation, index: int | None) -> Invocation | None:
        """The invocation `index` of this episode, if it comes before `invocation`."""
        if index is None or index >= invocation.invocation_index:
            return None
        return self._by_index.get(index)

    def parent(self, invocation: Invocation) -> Invocation | None:
        """The recorded parent, if it is an earlier row."""
        return self.earlier(invocation, invocation.parent_index)

    def model(self, invocation: Invocation) -> Model | None:
        """The metadata of the row's model, if it is known."""
        return self.metadata.models.get(invocation.model_id)

    def pieces(self, invocation: Invocation) -> Pieces | None:
        """The tokenizer that the validator was given, if it is that of the row's model."""
        model, given = self.model(invocation), self.inputs.tokenizer
        fits = given is not None and model is not None and model.tokenizer.fingerprint == given.fingerprint
        return given if fits else None


class EpisodesSeen:
    """The episodes of a trace that have passed: a digest for each, and its indices as ranges (about 200 bytes)."""

    def __init__(self) -> None:
        self._passed: dict[bytes, tuple[int, ...]] = {}  # the last file, then start and stop of each range

    def holds(self, episode_id: str) -> bool:
        """Whether rows of this episode have passed."""
        return _key(episode_id) in self._passed

    def indices(self, episode_id: str) -> list[range]:
        """Indices of this episode that have surely passed, in order; of one in very many pieces not all are known."""
        _, *ends = self._passed.get(_key(episode_id), (0,))
        return [range(*pair) for pair in zip(ends[::2], ends[1::2], strict=True)]

    def goes_on(self, run: Run) -> bool:
        """Whether the run brings new rows of an episode that has passed: it is split."""
        if not self.holds(run.episode_id):
            return False
        passed = self.indices(run.episode_id)
        return any(all(i.invocation_index not in each for each in passed) for i in run.invocations)

    def add(self, run: Run, file: int) -> bool:
        """Remember a run of file number `file`; whether its episode is new in that file."""
        key = _key(run.episode_id)
        before = self._passed.get(key)
        new = [range(i.invocation_index, i.invocation_index + 1) for i in run.invocations]
        ranges = _merged([*self.indices(run.episode_id), *new])
        self._passed[key] = file, *(end for each in ranges[:MAX_RANGES] for end in (each.start, each.stop))
        return before is None or before[0] != file

    def __len__(self) -> int:
        return len(self._passed)


def _merged(ranges: list[range]) -> list[range]:
    """The same indices in as few ranges as hold them, in order."""
    merged: list[range] = []
    for each in sorted(ranges, key=lambda r: r.start):
        if merged and each.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, each.stop))
        else:
            merged.append(each)
    return merged


def _key(episode_id: str) -> bytes:
    return hashlib.blake2b(episode_id.encode(), digest_size=16).digest()
