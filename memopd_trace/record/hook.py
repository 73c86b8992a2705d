"""What all hooks share: which episode takes a call, what its caller says of it, and how it becomes a row.

A hook wraps what an agent calls anyway (a model, an engine, a client) and changes neither its arguments nor what it
gives back. `Hook.into` says where the calls go that this thread (or task) makes next; a call outside of it goes through
and is not recorded. What no row can be made of is told once by reason (`notice`), and counted (`skipped`, `notes`).

Lineage is the caller's where it is declared and the ids bear it out, else the ids tell, as for the proxy
(docs/record.md). May be used from several threads at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memopd_trace.errors import UsageError, first_line
from memopd_trace.invocation import Invocation, Sampling, Segment
from memopd_trace.pieces import Pieces
from memopd_trace.record.call import CallRecord, DeclaredSegment, Labels, Sampled
from memopd_trace.record.recorder import EpisodeRecorder, TraceRecorder
from memopd_trace.record.rows import Earlier, make_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where a call goes and what its caller knows of it: as the columns of the same names. `parent` is a row of the
    episode; without it, the ids tell. `segments` cover the prompt, sources included."""

    episode: EpisodeRecorder
    parent: Invocation | None = None
    relation: str | None = None
    rewrite_kind: str | None = None
    segments: Sequence[Segment] | None = None
    reward: float | None = None
    policy_version: int | None = None


@dataclass(slots=True)
class Into:
    """Where the calls of one `with` block go, and the rows that became of them."""

    turns: tuple[Turn, ...]
    rows: list[Invocation] = field(default_factory=list)

    def turn(self, number: int, count: int) -> Turn:
        """The turn of one of `count` calls that are made together.

        Raises:
            UsageError: there are several turns, and not as many as calls.
        """
        if len(self.turns) not in (1, count):
            raise UsageError(f"{len(self.turns)} turns for {count} calls", hint="give one for all, or one for each")
        return self.turns[number if len(self.turns) > 1 else 0]


class Hook:
    """The part of a hook that does not depend on what it wraps.

    `pieces` are the tokenizer's (`memopd_trace.record.modelfolder.read_model`): with them a rewrite that only the ids
    show is named better. `notice` is told what is not recorded, the first time of each kind; by default it is a warning
    in the log.
    """

    def __init__(
        self, recorder: TraceRecorder, *, pieces: Pieces | None = None, notice: Callable[[str], None] | None = None
    ) -> None:
        self.recorder = recorder
        self.skipped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self._pieces = pieces
        self._notice = logging.getLogger(__name__).warning if notice is None else notice
        self._into: ContextVar[Into | None] = ContextVar("into", default=None)
        self._earlier: weakref.WeakKeyDictionary[EpisodeRecorder, Earlier] = weakref.WeakKeyDictionary()
        self._waiting: deque[tuple[Into, Turn, CallRecord]] = deque()
        self._taking: int | None = None  # the thread that makes rows

    @contextmanager
    def into(self, *turns: EpisodeRecorder | Turn) -> Iterator[list[Invocation]]:
        """Record the calls that this thread or task makes in the block; gives the list that their rows are added to, in
        the order in which they end. An episode stands for a turn that declares nothing. Of calls that are made together
        (a batch), each is one turn's, where several are given.

        Raises:
            UsageError: no turn, an episode of another recorder, or a reward that is no finite number.
        """
        found = tuple(Turn(episode=t) if isinstance(t, EpisodeRecorder) else t for t in turns)
        if not found or any(not self.recorder.owns(t.episode) for t in found):
            raise UsageError("into() needs episodes of this hook's recorder")
        for turn in found:
            if turn.reward is not None and not _is_finite(turn.reward):
                raise UsageError(f"a turn's reward is {turn.reward!r}, no finite number", hint="None = not scored")
        into = Into(found)
        token = self._into.set(into)
        try:
            yield into.rows
        finally:
            with contextlib.suppress(ValueError):  # a generator that is closed elsewhere: nothing was set there
                self._into.reset(token)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Read what a call gave: its caller is to get it, whatever is wrong with it here, so a fault is counted."""
        try:
            yield
        except UsageError as error:
            self.skip(f"no valid row ({error.code or error.message})")
        except Exception as error:  # of answers that no version of the server or engine that is known here gives
            self.skip(f"not understood ({type(error).__name__}: {first_line(error)})")

    def skip(self, reason: str) -> None:
        """Count a call that was made and is not recorded; the first of a kind is told."""
        self._count(self.skipped, "a call was not recorded", [reason])

    def current(self) -> Into | None:
        """Where a call goes that is made now; `None` (and counted) outside of `into`."""
        found = self._into.get()
        if found is None:
            self.skip("made outside of into()")
        return found

    def take(
        self,
        into: Into,
        turn: Turn,
        outputs: Sequence[Sampled],
        *,
        sampling: Sampling | None,
        logprob_kind: str,
        started: int,
        response_id: str | None = None,
        model: str | None = None,
        policy_version: int | None = None,
        accepted: bool | None = None,
        retry: int = 0,
        extra: dict[str, str] | None = None,
    ) -> None:
        """Make rows of the outputs of one finished call; times are microseconds since 1970. What cannot be a row is
        counted, and never raises: the caller's answer is not to be lost for it."""
        episode = turn.episode
        if model is not None and model != episode.model_id:
            self.skip(f"a model ({model}) that is not its episode's ({episode.model_id})")
            return
        given = (turn.policy_version, policy_version, episode.policy_version)
        record = CallRecord(
            episode=episode.episode_id,
            model_id=episode.model_id,
            response_id=response_id,
            labels=_labels(turn, episode, retry),
            outputs=tuple(outputs),
            sampling=sampling,
            logprob_kind=logprob_kind,
            policy_version=next((v for v in given if v is not None), None),
            started=started,
            ended=now(),
            accepted=accepted,
            extra=extra or {},
        )
        self._waiting.append((into, turn, record))
        if self._taking == threading.get_ident():
            return  # amid another call: an open stream was collected as garbage, or `notice` called; it comes next
        with self.recorder.lock:
            self._taking = threading.get_ident()
            try:
                while self._waiting:
                    self._make(*self._waiting.popleft())
            finally:
                self._taking = None

    def _make(self, into: Into, turn: Turn, record: CallRecord) -> None:
        if turn.episode.closed:
            self.skip("the episode has ended")
            return
        made: list[Invocation] = []
        for output in record.outputs:
            with self.answered():
                self._add(record, output, turn, made)
        into.rows += made

    def _add(self, record: CallRecord, output: Sampled, turn: Turn, made: list[Invocation]) -> None:
        episode, earlier = turn.episode, self._known(turn.episode)
        sibling = next((i for i in made if np.array_equal(i.prompt_ids, output.prompt)), None)
        found = make_row(record, output, earlier, sibling, self.recorder.metadata, self._pieces)
        self._count(self.notes, "not all of a call was recorded", found.notes)
        row = found.row
        if not made and record.accepted is not False and turn.reward is not None:
            row = row.replace(reward=turn.reward)
        made.append(episode.append(row))
        earlier = self._known(episode)
        if row.relation == "retry" and row.parent_index is not None and earlier.unused(row.parent_index):
            episode.give_up(row.parent_index)

    def _known(self, episode: EpisodeRecorder) -> Earlier:
        """The rows of an episode as parents are looked for; some may have been recorded, or amended, by hand."""
        earlier = self._earlier.setdefault(episode, Earlier())
        for index, row in enumerate(episode.invocations):
            if index == len(earlier.rows):
                earlier.add(row, _name(index), 0)
            elif earlier.rows[index] is not row:
                if row.accepted is False and earlier.rows[index].accepted is not False:
                    earlier.parents.give_up(index)
                earlier.rows[index] = row
        return earlier

    def _count(self, counts: Counter[str], what: str, reasons: Iterable[str]) -> None:
        for reason in reasons:
            counts[reason] += 1
            if counts[reason] == 1:
                self._notice(f"{what}: {reason} (told once)")


def now() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)  # also of NumPy's and torch's numbers
    except (TypeError, ValueError, OverflowError):
        return False


def _name(index: int) -> str:
    return f"#{index}"


def _labels(turn: Turn, episode: EpisodeRecorder, retry: int) -> Labels:
    segments = None
    if turn.segments is not None:
        segments = tuple(
            DeclaredSegment(
                s.start, s.stop, s.kind, None if s.source_index is None else _name(s.source_index), s.source_start
            )
            for s in turn.segments
        )
    return Labels(
        agent=episode.agent_id,
        parent=None if turn.parent is None else _name(turn.parent.invocation_index),
        relation=turn.relation,
        rewrite=turn.rewrite_kind,
        segments=segments,
        retry=retry,
    )
