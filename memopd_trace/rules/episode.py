"""`Run`: the rows of one episode as rules see them, and `EpisodesSeen`, all that is kept of earlier ones."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field

from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Model, TraceMetadata
from memopd_trace.pieces import Pieces
from memopd_trace.rules.registry import Inputs


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
    """The episodes of a trace that have passed: a digest and two numbers for each (about 200 bytes)."""

    def __init__(self) -> None:
        self._rows: dict[bytes, tuple[int, int]] = {}

    def next_index(self, episode_id: str) -> int:
        """The index that would go on with this episode; 0 = it was not seen."""
        return self._rows.get(_key(episode_id), (0, 0))[0]

    def add(self, run: Run, file: int) -> bool:
        """Remember a run of file number `file`; whether its episode is new in that file."""
        key = _key(run.episode_id)
        before = self._rows.get(key)
        top = max((i.invocation_index + 1 for i in run.invocations), default=1)
        self._rows[key] = max(top, 1, before[0] if before else 0), file
        return before is None or before[1] != file

    def __len__(self) -> int:
        return len(self._rows)


def _key(episode_id: str) -> bytes:
    return hashlib.blake2b(episode_id.encode(), digest_size=16).digest()
