"""State machines drive the recorder and the writer; whatever they leave on disk validates and is what went in."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_testing import differences
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from memopd_trace import Invocation, TraceMetadata, read, validate
from memopd_trace.errors import UsageError
from memopd_trace.invocation import Episode
from memopd_trace.record import EpisodeRecorder, TraceRecorder
from memopd_trace.schema import FEATURES
from memopd_trace.storage import TraceWriter
from memopd_trace.testing import KINDS, episodes, metadata, traces, traits

NAMES = ["trace.parquet", "trace.arrow", "folder"]
SET_BY_THE_RECORDER = (
    "episode_id", "group_id", "task_id", "invocation_index", "parent_index", "rewrite_evidence", "state_digest",
    "terminated", "truncated", "prompt_ids", "output_ids", "output_logprobs", "output_kept_logmass", "segments",
)  # fmt: skip
LATER = ("reward", "rewards", "output_text")  # told by `amend`
KINDS_DRAWN = st.sampled_from([set(KINDS), *({kind} for kind in KINDS)])
seen = Counter[str]()


class Running:
    """An episode that was drawn whole and is recorded call by call."""

    def __init__(self, episode: Episode, recorder: EpisodeRecorder) -> None:
        self.rows, self.recorder, self.done = list(episode), recorder, 0

    @property
    def next(self) -> Invocation:
        return self.rows[self.done]

    def arguments(self) -> dict[str, Any]:
        """What a harness would hand to `record` for the next call."""
        row = self.next
        columns = {n: v for n in Invocation.__dataclass_fields__ if (v := getattr(row, n)) is not None}
        columns = {n: v for n, v in columns.items() if n not in SET_BY_THE_RECORDER + LATER}
        segments = [s for s in row.segments or () if s.stop <= len(row.prompt_ids)]
        kinds = [s.kind for s in row.segments or () if s.stop > len(row.prompt_ids)]
        parent = None if row.parent_index is None else self.recorder.invocations[row.parent_index]
        return {
            **columns,
            "logprobs": row.output_logprobs,
            "kept_logmass": row.output_kept_logmass,
            "segments": segments if row.segments is not None else None,
            "output_kind": kinds[0] if kinds else "action",
            "parent": parent,
        }

    def record(self) -> None:
        row, last = self.next, self.done == len(self.rows) - 1
        made = self.recorder.record(row.prompt_ids, row.output_ids, **self.arguments())
        late = {n: getattr(row, n) for n in LATER if getattr(row, n) is not None and not (last and n.startswith("rew"))}
        if late:
            self.recorder.amend(made, **late)
        self.done += 1


class RecorderMachine(RuleBasedStateMachine):
    """Episodes open, run in turns, are retried, refused, finished and discarded; at the end the file is judged."""

    @initialize(meta=metadata(KINDS), name=st.sampled_from(NAMES))
    def start(self, meta: TraceMetadata, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.meta = meta.model_copy(update={"required_features": list(FEATURES)})
        self.recorder = TraceRecorder(self.folder / name, self.meta)
        self.open: list[Running] = []
        self.finished: dict[str, list[Invocation]] = {}
        self.count = 0

    @precondition(lambda self: len(self.open) < 3)
    @rule(data=st.data(), kinds=KINDS_DRAWN, group=st.sampled_from(["g", "h", None]))
    def open_an_episode(self, data: st.DataObject, kinds: set[str], group: str | None) -> None:
        name, self.count = f"e{self.count}", self.count + 1
        given = {"episode_id": name, "group_id": group, "task_id": None if group else "t"}
        episode = data.draw(episodes(self.meta, "train", kinds | {"extend"}, **given))
        first = episode.invocations[0]
        recorder = self.recorder.episode(
            name, group_id=group, task_id=given["task_id"], model_id=first.model_id, policy_version=None
        )
        self.open.append(Running(episode, recorder))

    def running(self, done: bool) -> list[Running]:
        return [run for run in self.open if (run.done == len(run.rows)) == done]

    @precondition(lambda self: self.running(done=False))
    @rule(data=st.data(), calls=st.integers(1, 4))
    def record_calls(self, data: st.DataObject, calls: int) -> None:
        run = data.draw(st.sampled_from(self.running(done=False)))
        for _ in run.rows[run.done :][:calls]:
            run.record()

    @precondition(lambda self: self.running(done=False))
    @rule(data=st.data(), fault=st.sampled_from(["id", "length", "parent", "relation", "column"]))
    def what_is_wrong_is_refused_and_nothing_is_recorded(self, data: st.DataObject, fault: str) -> None:
        run = data.draw(st.sampled_from(self.running(done=False)))
        row, arguments, before = run.next, run.arguments(), run.recorder.invocations
        prompt: Any = row.prompt_ids
        if fault == "id":
            prompt = np.append(row.prompt_ids, 10**6)
        elif fault == "length":
            arguments["position_ids"] = np.arange(len(row) + 1)
        elif fault == "relation":
            arguments["relation"] = "sibling"
        elif fault == "parent":
            arguments["parent"] = row.replace(episode_id="another")
        else:
            arguments["state_digest"] = bytes(32)
        with pytest.raises(UsageError):
            run.recorder.record(prompt, row.output_ids, **arguments)
        assert run.recorder.invocations == before
        seen["refused"] += 1

    @precondition(lambda self: self.running(done=True))
    @rule(data=st.data())
    def finish_an_episode(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.running(done=True)))
        last = run.rows[-1]
        truncated = bool(last.truncated)
        run.recorder.finish(
            reward=last.reward, rewards=last.rewards, truncated=truncated, terminated=bool(last.terminated)
        )
        self.finished[run.recorder.episode_id] = run.rows
        self.open.remove(run)
        seen.update(traits(self.meta, run.rows))

    @precondition(lambda self: len(self.open) == 3)
    @rule(data=st.data())
    def discard_an_episode(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.open))
        run.recorder.discard()
        self.open.remove(run)
        seen["discarded"] += 1

    @invariant()
    def nothing_is_there_before_it_is_closed(self) -> None:
        if hasattr(self, "recorder"):
            assert not self.recorder.path.is_file()

    def teardown(self) -> None:
        if not hasattr(self, "recorder"):
            return
        try:
            self.close_and_judge()
        finally:
            shutil.rmtree(self.folder)

    def close_and_judge(self) -> None:
        if self.open:
            with pytest.raises(UsageError, match="never finished"):
                self.recorder.close()
        else:
            self.recorder.close()
        report = validate(self.recorder.path, "train")
        assert report.codes == (set() if self.finished else {"W-NO-ROWS"}), report.to_text()
        found = {e.episode_id: list(e) for e in read(self.recorder.path).iter_episodes()}
        assert found.keys() == self.finished.keys()
        for name, rows in self.finished.items():
            for row, back in zip(rows, found[name], strict=True):
                changed = set(differences(row, back))
                assert changed <= {"rewrite_evidence", "terminated", "truncated"}, changed


class WriterMachine(RuleBasedStateMachine):
    """Rows in order and out of order; what was taken is what is read."""

    @initialize(trace=traces("train", max_episodes=4), name=st.sampled_from(NAMES), rows_per_part=st.integers(1, 4))
    def start(self, trace: Any, name: str, rows_per_part: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.meta, self.rows = trace
        self.writer = TraceWriter(self.folder / name, self.meta, rows_per_part=rows_per_part)
        self.written = 0

    @precondition(lambda self: self.written < len(self.rows))
    @rule()
    def write_the_next_row(self) -> None:
        self.writer.write(self.rows[self.written])
        self.written += 1

    @rule(data=st.data())
    def a_row_out_of_order_is_refused(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        at = self.written
        last = self.rows[at - 1] if at else None
        begins = row.invocation_index == 0 and row.episode_id not in {r.episode_id for r in self.rows[:at]}
        follows = last is not None and row.key == (last.episode_id, last.invocation_index + 1)
        if not (begins or follows):
            with pytest.raises(UsageError, match="expected"):
                self.writer.write(row)
            seen["out of order"] += 1

    @rule()
    def an_episode_that_is_only_begun_may_be_the_end(self) -> None:
        """Nothing to do: a file may end inside a drawn episode, whose rows so far are an episode of their own."""
        event("cut" if 0 < self.written < len(self.rows) else "whole")

    def teardown(self) -> None:
        if not hasattr(self, "writer"):
            return
        try:
            self.writer.close()
            report = validate(self.writer.path, "core")
            assert report.codes <= ({"W-NO-ROWS"} if not self.written else set()), report.to_text()
            found = list(read(self.writer.path).iter_invocations())
            assert [differences(a, b) for a, b in zip(self.rows[: self.written], found, strict=True)] == [
                []
            ] * self.written
            assert read(self.writer.path).metadata == self.meta
            seen["files"] += bool(self.written)
        finally:
            shutil.rmtree(self.folder)


def drive(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_is_recorded_validates() -> None:
    seen.clear()
    drive(RecorderMachine, 10, 20)
    assert min(seen[word] for word in ("refused", "discarded", "root")) >= 1, seen


def test_whatever_is_written_validates() -> None:
    seen.clear()
    drive(WriterMachine, 15, 10)
    assert min(seen[word] for word in ("out of order", "files")) >= 1, seen


@pytest.mark.slow
def test_whatever_is_recorded_validates_at_length() -> None:
    seen.clear()
    drive(RecorderMachine, 600, 50)
    words = ("refused", "discarded", "extend", "rewrite", "fork", "retry", "spawn", "eviction", "in_place", "media")
    assert min(seen[word] for word in words) >= 10, seen


@pytest.mark.slow
def test_whatever_is_written_validates_at_length() -> None:
    drive(WriterMachine, 400, 20)
