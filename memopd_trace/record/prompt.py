"""Prompts made of token ids: new ids, or copies of a stretch of an earlier invocation of the same episode.

Text never enters. Because a copy takes its ids from the invocation that it names, the segments of a recorded
prompt and their sources are exact without anybody having to search for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from memopd_trace.errors import UsageError
from memopd_trace.invocation import IDS, Invocation, Segment
from memopd_trace.lineage import final_ids


class Prompt:
    """A prompt built part by part; every method returns the prompt itself.

    Example:
        prompt = Prompt().add("task", [1, 2, 3]).copy_output("memory", earlier).add("template", [9])
    """

    def __init__(self) -> None:
        self._parts: list[IDS] = []
        self._segments: list[Segment] = []
        self._length = 0
        self._episode_id: str | None = None

    def add(self, kind: str, ids: ArrayLike) -> Prompt:
        """Append new ids (int[any length]) as one segment of kind `kind`; no ids, no segment.

        Raises:
            UsageError: `ids` is not a flat list of token ids.
        """
        return self._append(kind, as_ids(ids, f"prompt part '{kind}'"), None, None)

    def copy(self, kind: str, source: Invocation, start: int = 0, stop: int | None = None) -> Prompt:
        """Append the stretch `[start, stop)` of the sequence (prompt + output) of `source`; `stop=None` = its end.

        Raises:
            UsageError: the stretch is not inside the sequence, or `source` belongs to another episode than the
                sources so far.
        """
        sequence = final_ids(source)
        stop = len(sequence) if stop is None else stop
        if not 0 <= start <= stop <= len(sequence):
            raise UsageError(
                f"prompt part '{kind}': stretch [{start}, {stop}) of invocation {source.key}, which has "
                f"{len(sequence)} tokens"
            )
        if self._episode_id not in (None, source.episode_id):
            raise UsageError(
                f"prompt part '{kind}': copied from episode '{source.episode_id}', others from '{self._episode_id}'",
                hint="only invocations of one episode can be sources; add other ids with add()",
            )
        self._episode_id = source.episode_id
        return self._append(kind, sequence[start:stop], source.invocation_index, start)

    def copy_output(self, kind: str, source: Invocation, start: int = 0, stop: int | None = None) -> Prompt:
        """Append the stretch `[start, stop)` of the *output* of `source`; `stop=None` = its end.

        Raises:
            UsageError: as `copy`.
        """
        if start < 0:
            raise UsageError(f"prompt part '{kind}': the stretch begins at {start}, before the output")
        offset = len(source.prompt_ids)
        return self.copy(kind, source, offset + start, None if stop is None else offset + stop)

    @property
    def ids(self) -> IDS:
        """int32[prompt tokens]."""
        return np.concatenate(self._parts) if self._parts else np.zeros(0, np.int32)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """One segment a part, in order, without gaps."""
        return tuple(self._segments)

    @property
    def episode_id(self) -> str | None:
        """The episode of the copied parts; `None` when nothing was copied."""
        return self._episode_id

    def __len__(self) -> int:
        return self._length

    def _append(self, kind: str, ids: IDS, source: int | None, source_start: int | None) -> Prompt:
        if len(ids):
            start, self._length = self._length, self._length + len(ids)
            self._parts.append(ids)
            self._segments.append(Segment(start, self._length, kind, source, source_start))
        return self


def as_ids(value: Any, where: str) -> IDS:
    """`value` as int32 token ids.

    Raises:
        UsageError: not a flat list of integers in [0, 2^31), naming `where` and the first offender.
    """
    array = np.asarray(value)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{where}: expected a flat list of token ids, got shape {array.shape} of {array.dtype}")
    bad = np.flatnonzero((array < 0) | (array > np.iinfo(np.int32).max)) if array.size else array
    if len(bad):
        raise UsageError(f"{where}: id {array[bad[0]]} at index {bad[0]} is not in [0, 2^31)")
    return array.astype(np.int32)
