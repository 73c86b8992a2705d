"""The episodes of a recording, as its records make them: replaying the same records gives the same rows."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from memopd_trace.errors import UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.metadata import TraceMetadata
from memopd_trace.pieces import Pieces
from memopd_trace.record.call import CallRecord, Labels
from memopd_trace.record.proxy.records import Record, RewardRecord
from memopd_trace.record.rows import Earlier, make_row


@dataclass(slots=True)
class _Open:
    """An episode that has not ended."""

    earlier: Earlier = field(default_factory=Earlier)
    group: str | None = None
    task: str | None = None
    heard: float = 0.0  # when the last record came, by the monotonic clock

    @property
    def rows(self) -> list[Invocation]:
        return self.earlier.rows


class Episodes:
    """Open episodes are in memory, ended ones wait in `ended` to be written. `notes` counts what was left out of rows,
    `refused` the outputs of which no row could be made."""

    def __init__(self, metadata: TraceMetadata, pieces: Pieces | None = None) -> None:
        self._metadata, self._pieces = metadata, pieces
        self._open: dict[str, _Open] = {}
        self._closed: set[str] = set()
        self._under_way: Counter[str] = Counter()
        self.ended: list[Episode] = []
        self.rows = 0
        self.notes: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def close_known(self, episode_ids: set[str]) -> None:
        """These episodes are in the trace already: their records are passed over."""
        self._closed |= episode_ids

    def has_ended(self, episode_id: str) -> bool:
        """Whether nothing can be added to an episode any more."""
        return episode_id in self._closed

    def check(self, episode_id: str, labels: Labels) -> None:
        """Hold a call's labels against its episode.

        Raises:
            UsageError: another group or task than the episode's.
        """
        known = self._open.get(episode_id)
        for name in ("group", "task") if known else ():
            was, new = getattr(known, name), getattr(labels, name)
            if was is not None and new is not None and was != new:
                raise UsageError(f"X-Memopd-{name.title()}: '{new}', and the episode has '{was}'")

    def apply(self, record: Record) -> bool:
        """Take in a record; whether it changed anything (else it need not be kept).

        Raises:
            UsageError: a reward or an end that does not fit the episode.
        """
        if isinstance(record, CallRecord):
            return self._call(record)
        if record.episode not in self._open:
            raise UsageError(
                f"episode '{record.episode}' has {'ended' if self.has_ended(record.episode) else 'no recorded call'}"
            )
        if isinstance(record, RewardRecord):
            self._reward(self._open[record.episode], record)
            self._open[record.episode].heard = time.monotonic()
        else:
            self._end(record.episode, record.end)
        return True

    def begin_call(self, episode_id: str) -> None:
        """A call of an episode is under way, which is not idle while it is."""
        self._under_way[episode_id] += 1

    def end_call(self, episode_id: str) -> None:
        """It is not any more."""
        self._under_way[episode_id] -= 1
        if not self._under_way[episode_id]:
            del self._under_way[episode_id]
            if episode_id in self._open:
                self._open[episode_id].heard = time.monotonic()

    def idle(self, seconds: float) -> list[str]:
        """The open episodes of which nothing was heard for so long, and of which no call is under way."""
        until = time.monotonic() - seconds
        return [name for name, e in self._open.items() if e.heard <= until and name not in self._under_way]

    def end_all(self) -> None:
        """Hand over what is open; how these episodes ended is not known."""
        for episode_id in list(self._open):
            self._end(episode_id, None)

    def counts(self) -> dict[str, int]:
        """How many episodes are open and how many have ended, in this process and before."""
        return {"open": len(self._open), "ended": len(self._closed)}

    def _call(self, record: CallRecord) -> bool:
        if self.has_ended(record.episode):
            self.refused["the episode has ended"] += 1
            return False
        known = self._open.get(record.episode, _Open())
        made = self._outputs(record, known.earlier)
        if not made:
            return False
        known.heard = time.monotonic()
        known.group = known.group or record.labels.group
        known.task = known.task or record.labels.task
        self._open[record.episode] = known
        self.rows += len(made)
        if record.labels.reward is not None:
            self._set(known, made[0], reward=record.labels.reward)
        if record.labels.end is not None:
            self._end(record.episode, record.labels.end)
        return True

    def _outputs(self, record: CallRecord, earlier: Earlier) -> list[Invocation]:
        made: list[Invocation] = []
        for output in record.outputs:
            twins = (i for i in made if np.array_equal(i.prompt_ids, output.prompt))
            try:
                one = make_row(record, output, earlier, next(twins, None), self._metadata, self._pieces)
            except UsageError as error:
                self.refused[f"no valid row ({error.code or error.message})"] += 1
                continue
            self.notes.update(one.notes)
            made.append(one.row)
            earlier.add(one.row, record.response_id, output.choice)
            self._given_up(earlier, one.row)
        return made

    def _given_up(self, earlier: Earlier, row: Invocation) -> None:
        """An attempt that was sent again is not the one that was used, unless a call goes on from it."""
        if row.relation != "retry" or row.parent_index is None:
            return
        if earlier.unused(row.parent_index):
            earlier.give_up(earlier.rows[row.parent_index])

    def _reward(self, known: _Open, record: RewardRecord) -> None:
        row = known.earlier.named(record.response_id) if record.response_id is not None else known.rows[-1]
        if row is None:
            raise UsageError(f"episode '{record.episode}': no recorded call '{record.response_id}'")
        if record.reward is not None and row.reward is not None:
            raise UsageError(f"{row.name}: has a reward already ({row.reward})")
        parts = {**(row.rewards or {}), **(record.rewards or {})}
        self._set(known, row, reward=row.reward if record.reward is None else record.reward, rewards=parts or None)

    def _set(self, known: _Open, row: Invocation, **columns: object) -> None:
        known.rows[row.invocation_index] = known.rows[row.invocation_index].replace(**columns)

    def _end(self, episode_id: str, end: str | None) -> None:
        known = self._open.pop(episode_id)
        self._closed.add(episode_id)
        rows = [i.replace(group_id=known.group, task_id=known.task) for i in known.rows]
        if end is not None:
            rows[-1] = rows[-1].replace(terminated=end == "terminated", truncated=end == "truncated")
        self.ended.append(Episode(episode_id, tuple(rows)))
