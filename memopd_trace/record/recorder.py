"""Record model calls as they happen: exact prompt ids, exact sampled ids, and how each state came about.

Invariants: an episode is on disk whole or not at all; nothing is derived from text; what the validator would find in a
row (a relation that the ids do not bear out, say) is refused when it is recorded, not found later. Needs no torch. May
be used from several threads at once: each call is taken whole, and in some order.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from numpy.typing import ArrayLike

from memopd_trace.errors import UsageError, first_line
from memopd_trace.invocation import Episode, Invocation, Sampling, Segment
from memopd_trace.metadata import TraceMetadata
from memopd_trace.record.checks import check_episode, check_row, lineage_of
from memopd_trace.record.prompt import Prompt, as_ids
from memopd_trace.rules.registry import Profile
from memopd_trace.storage import TraceWriter

FIXED = (
    "episode_id",
    "group_id",
    "task_id",
    "invocation_index",
    "parent_index",
    "rewrite_evidence",
    "state_digest",
    "terminated",
    "truncated",
)
AMENDABLE = ("accepted", "reward", "rewards", "output_loss_mask", "output_text", "extra")


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def _locked(method: MethodT) -> MethodT:
    """One at a time, over a recorder and all of its episodes."""

    @functools.wraps(method)
    def taken(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(MethodT, taken)


class TraceRecorder:
    """Writes a trace while its episodes run; they may interleave and finish in any order.

    File order does not follow who finishes first: groups stand in the order in which they were opened, and a group's
    episodes together, in the order in which they were opened. An episode is written once it is finished and nothing
    that goes before it is open; until then it is kept in memory. (An episode of a group that was written to its end
    before it was opened comes later.)

    What is written validates under `profile`; anything else is refused at the latest when its episode is finished. A
    run that is not meant for training (no log-probabilities, no reward) is recorded under `core` or `lineage`.

    As a context manager: leaving by an exception leaves no trace under `path` (of a folder, at most parts without a
    manifest). Leaving with open episodes is a mistake of the caller: the finished ones are written, the open ones are
    left out, and UsageError names them.

    Example:
        settings = {"sampling": Sampling(temperature=1.0), "finish_reason": "stop"}
        with TraceRecorder("trace.parquet", metadata) as recorder:
            episode = recorder.episode("q1/0", group_id="q1", task_id="q1", policy_version=0)
            first = episode.record(Prompt().add("task", ids), output, logprobs=logprobs, **settings)
            prompt = Prompt().copy("task", first, 0, len(ids)).copy_output("memory", first).add("user", more)
            episode.record(prompt, output, logprobs=logprobs, rewrite_kind="memory", **settings)
            episode.finish(reward=1.0)

    Raises:
        UsageError: as `TraceWriter`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: TraceMetadata,
        *,
        profile: Profile = "train",
        overwrite: bool = False,
    ) -> None:
        self.path, self.metadata, self.profile = Path(path), metadata, profile
        self.lock = threading.RLock()
        self._writer = TraceWriter(path, metadata, overwrite=overwrite)
        self._known: set[str] = set()
        self._waiting: dict[tuple[str, str], list[EpisodeRecorder]] = {}  # group -> its episodes, as opened

    @_locked
    def episode(
        self,
        episode_id: str,
        *,
        group_id: str | None = None,
        task_id: str | None = None,
        agent_id: str | None = None,
        model_id: str | None = None,
        policy_version: int | None = None,
    ) -> EpisodeRecorder:
        """Open an episode. The arguments hold for all its invocations; `model_id` may be left out where the
        metadata names one model.

        Raises:
            UsageError: the episode exists already, the model is not in the metadata, or the recorder is closed.
        """
        self._writer.must_be_open()
        if episode_id in self._known:
            raise UsageError(f"episode '{episode_id}' was opened before", hint="give every run its own episode_id")
        if model_id is None and len(self.metadata.models) == 1:
            model_id = next(iter(self.metadata.models))
        if model_id is None or model_id not in self.metadata.models:
            raise UsageError(
                f"episode '{episode_id}': model_id {model_id!r}, the metadata has {', '.join(self.metadata.models)}"
            )
        columns: dict[str, Any] = {
            "episode_id": episode_id,
            "model_id": model_id,
            "group_id": group_id,
            "task_id": task_id,
            "agent_id": agent_id,
            "policy_version": policy_version,
        }
        episode = EpisodeRecorder(self, columns)
        self._known.add(episode_id)
        key = ("episode", episode_id) if group_id is None else ("group", group_id)
        self._waiting.setdefault(key, []).append(episode)
        return episode

    def owns(self, episode: EpisodeRecorder) -> bool:
        """Whether an episode is one of this recorder's."""
        return episode._recorder is self

    @_locked
    def close(self) -> None:
        """Write what is finished and put the file in place.

        Raises:
            UsageError: episodes are open; they were left out.
        """
        still_open = [e for episodes in self._waiting.values() for e in episodes if not e.closed]
        for episode in still_open:
            episode.discard()
        self._writer.close()
        if still_open:
            names = ", ".join(f"'{e.episode_id}'" for e in still_open[:5]) + (", …" if len(still_open) > 5 else "")
            raise UsageError(
                f"{self.path}: {len(still_open)} episodes were never finished and were left out: {names}",
                hint="call finish() on each, with truncated=True where a limit cut it, or discard()",
            )

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.__exit__(kind, error, trace)

    def _write_ready(self) -> None:
        while self._waiting:
            key, episodes = next(iter(self._waiting.items()))
            while episodes and episodes[0].closed:
                episode = episodes.pop(0)
                if episode.invocations:
                    self._writer.write_episode(Episode(episode.episode_id, episode.invocations))
            if episodes:
                return
            del self._waiting[key]


class EpisodeRecorder:
    """One agent run being recorded; made by `TraceRecorder.episode`."""

    def __init__(self, recorder: TraceRecorder, columns: Mapping[str, Any]) -> None:
        self._recorder, self._columns = recorder, columns
        self.lock = recorder.lock
        self._rows: list[Invocation] = []
        self.closed = False

    @property
    def episode_id(self) -> str:
        """The episode's id."""
        return str(self._columns["episode_id"])

    @property
    def model_id(self) -> str:
        """The model of its calls."""
        return str(self._columns["model_id"])

    @property
    def agent_id(self) -> str | None:
        """The agent of its calls, where one was named."""
        return self._columns["agent_id"]

    @property
    def policy_version(self) -> int | None:
        """The version of the weights that it was opened with."""
        return self._columns["policy_version"]

    @property
    def invocations(self) -> tuple[Invocation, ...]:
        """What was recorded so far, in commit order."""
        return tuple(self._rows)

    @_locked
    def record(
        self,
        prompt: Prompt | ArrayLike,
        output_ids: ArrayLike,
        *,
        logprobs: ArrayLike | None = None,
        kept_logmass: ArrayLike | None = None,
        sampling: Sampling | None = None,
        finish_reason: str | None = None,
        output_kind: str = "action",
        parent: Invocation | None = None,
        relation: str | None = None,
        rewrite_kind: str | None = None,
        **columns: Any,
    ) -> Invocation:
        """Add one model call and return its row.

        `logprobs` (nats, one per output id, `None` for a token that was not sampled) are raw ones unless
        `logprob_kind` says otherwise; `kept_logmass` belongs to top-k/top-p/min-p. A prompt given as plain ids has
        no segments unless `segments` gives them, sources included. Any further column of `Invocation` may be given.

        `parent` is the latest invocation that was not rejected unless given. The relation is derived: no parent,
        `root`; a prompt that begins with the parent's whole state, `extend`; else `rewrite`, for which
        `rewrite_kind` must say what the harness did (where the prompt turns out to be an extension, it is not
        needed and not recorded). `fork`, `retry`, `spawn` and a second `root` are declared by `relation`.

        Raises:
            UsageError: the row would not validate under any profile (lengths, ids outside the model's vocabulary, a
                copy that is not one, a relation that the ids do not bear out, …; the error carries the rule's code),
                or the call itself is wrong. Nothing is recorded then.
        """
        self._must_be_open()
        where = f"episode '{self.episode_id}', invocation {len(self._rows)}"
        fixed = next((name for name in FIXED if name in columns), None)
        if fixed is not None:
            raise UsageError(f"{where}: {fixed} is the recorder's to set")
        segments = columns.pop("segments", None)
        if isinstance(prompt, Prompt):
            if segments is not None:
                raise UsageError(f"{where}: segments given twice", hint="a Prompt has its own")
            if prompt.episode_id not in (None, self.episode_id):
                raise UsageError(f"{where}: the prompt copies from episode '{prompt.episode_id}'")
            prompt_ids, segments = prompt.ids, prompt.segments
        else:
            prompt_ids = as_ids(prompt, f"{where}: prompt_ids")
        output = as_ids(output_ids, f"{where}: output_ids")
        if segments is not None and len(output) and columns.get("output_slots") is None:
            sampled = Segment(len(prompt_ids), len(prompt_ids) + len(output), output_kind)
            segments = (*segments, sampled)
        fields: dict[str, Any] = {
            **self._columns,
            "invocation_index": len(self._rows),
            "prompt_ids": prompt_ids,
            "output_ids": output,
            "segments": segments,
            "output_logprobs": logprobs,
            "logprob_kind": None if logprobs is None else "raw",
            "output_kept_logmass": kept_logmass,
            "sampling": sampling,
            "finish_reason": finish_reason,
            "token_source": "engine",
            **columns,
        }
        row = _invocation(fields, where)
        row = row.replace(**lineage_of(row, self._rows, parent, relation, rewrite_kind))
        check_row(row, self._rows, self._recorder.metadata)
        self._rows.append(row)
        return row

    @_locked
    def append(self, row: Invocation) -> Invocation:
        """Add a row that was made elsewhere, behind this episode's last; its group and task are the episode's.

        Raises:
            UsageError: as `record`.
        """
        self._must_be_open()
        row = row.replace(group_id=self._columns["group_id"], task_id=self._columns["task_id"])
        check_row(row, self._rows, self._recorder.metadata)
        self._rows.append(row)
        return row

    @_locked
    def give_up(self, index: int) -> None:
        """The call was an attempt that nobody used: it is not accepted, and not trained.

        Raises:
            UsageError: the episode is finished.
        """
        self._must_be_open()
        self._rows[index] = self._rows[index].replace(accepted=False, output_loss_mask=None)

    @_locked
    def amend(self, invocation: Invocation, **changes: Any) -> Invocation:
        """Set what is known only after the call: `accepted`, `reward`, `rewards`, `output_loss_mask`, `output_text`,
        `extra`. Returns the row as it now is.

        Raises:
            UsageError: another column, a row of another episode, a finished episode, or a value that does not fit.
        """
        self._must_be_open()
        other = sorted(set(changes) - set(AMENDABLE))
        if other:
            raise UsageError(f"'{other[0]}' cannot be amended", hint=f"only {', '.join(AMENDABLE)}")
        index = invocation.invocation_index
        if invocation.episode_id != self.episode_id or index >= len(self._rows):
            raise UsageError(f"invocation {invocation.key} is not one of episode '{self.episode_id}'")
        row = _invocation(_fields(self._rows[index]) | changes, self._rows[index].name)
        check_row(row, self._rows[:index], self._recorder.metadata)
        self._rows[index] = row
        return row

    @_locked
    def finish(
        self,
        *,
        reward: float | None = None,
        rewards: Mapping[str, float] | None = None,
        truncated: bool = False,
        terminated: bool | None = None,
    ) -> None:
        """End the episode and hand it over for writing. `reward` and its named parts `rewards` are credited at the
        last invocation; an episode ends by itself (`terminated`) unless it was `truncated` by a limit.

        Raises:
            UsageError: no invocation was recorded, the last one has a reward already, the episode is finished, or it
                would not validate under the recorder's profile (the error carries the rule's code). It stays open.
        """
        self._must_be_open()
        if not self._rows:
            raise UsageError(f"episode '{self.episode_id}' has no invocation", hint="discard() an episode without one")
        last = self._rows[-1]
        if reward is not None and last.reward is not None:
            raise UsageError(
                f"episode '{self.episode_id}': reward {reward}, its last invocation has {last.reward} already",
                hint="give the whole of it once, by finish() or by amend()",
            )
        changes: dict[str, Any] = {} if reward is None else {"reward": reward}
        if rewards is not None:
            changes["rewards"] = dict(rewards)
        terminated = not truncated if terminated is None else terminated
        last = last.replace(terminated=terminated, truncated=truncated, **changes)
        check_episode([*self._rows[:-1], last], self._recorder.metadata, self._recorder.profile)
        self._rows[-1] = last
        self._close()

    @_locked
    def discard(self) -> None:
        """Leave the episode out of the trace.

        Raises:
            UsageError: the episode is finished.
        """
        self._must_be_open()
        self._rows.clear()
        self._close()

    def _close(self) -> None:
        self.closed = True
        self._recorder._write_ready()

    def _must_be_open(self) -> None:
        if self.closed:
            raise UsageError(f"episode '{self.episode_id}' is finished")


def _invocation(fields: dict[str, Any], where: str) -> Invocation:
    unknown = sorted(set(fields) - set(Invocation.__dataclass_fields__))
    if unknown:
        raise UsageError(f"{where}: no column '{unknown[0]}'")
    try:
        return Invocation(**fields)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{where}: {first_line(error)}") from None


def _fields(row: Invocation) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Invocation.__dataclass_fields__}
