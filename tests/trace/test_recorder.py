"""The recorder: what it derives, in which order it writes, and what is left after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_recorder import SAMPLING, VOCAB, call, extended, memory_run, metadata, recorded, start
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd_trace import Invocation, Segment, validate
from memopd_trace.errors import UsageError
from memopd_trace.record import Prompt, TraceRecorder


@pytest.fixture
def recorder(tmp_path: Path) -> TraceRecorder:
    return TraceRecorder(tmp_path / "trace.parquet", metadata())


@pytest.mark.parametrize("name", ["trace.parquet", "trace.arrow", "folder"])
def test_what_is_recorded_is_what_is_read_and_it_validates(tmp_path: Path, name: str) -> None:
    with TraceRecorder(tmp_path / name, metadata()) as recorder:
        episode = start(recorder, "q1/0", agent_id="reader")
        rows = memory_run(episode)
        episode.finish(reward=0.5, rewards={"f1": 0.5})
    (found,) = recorded(tmp_path / name)
    assert len(found) == 3
    for row, back in zip(rows, found, strict=True):
        assert back.prompt_ids.tolist() == row.prompt_ids.tolist()
        assert back.output_ids.tolist() == row.output_ids.tolist()
        assert back.segments == row.segments
        assert back.output_logprobs is not None and row.output_logprobs is not None
        assert back.output_logprobs.tolist() == row.output_logprobs.tolist()
        assert back.state_digest == row.compute_digest() == back.compute_digest()
        assert (back.agent_id, back.policy_version, back.token_source) == ("reader", 0, "engine")
        assert (back.logprob_kind, back.sampling, back.finish_reason) == ("raw", SAMPLING, "stop")
    assert [i.relation for i in found] == ["root", "rewrite", "rewrite"]
    assert [i.parent_index for i in found] == [None, 0, 1]
    assert [i.rewrite_evidence for i in found] == [None, "explicit", "explicit"]
    last = found.invocations[-1]
    assert (last.reward, last.rewards, last.terminated, last.truncated) == (0.5, {"f1": 0.5}, True, False)
    assert found.invocations[0].terminated is None, "only the last row says how the episode ended"
    report = validate(tmp_path / name, "train")
    assert report.clean, report.to_text()


def test_a_copied_memory_names_the_ids_it_was_copied_from(recorder: TraceRecorder) -> None:
    rows = memory_run(start(recorder, "e"))
    for row in rows[1:]:
        assert row.segments is not None
        memory = next(s for s in row.segments if s.kind == "memory")
        assert memory.source_index == row.invocation_index - 1 and memory.source_start is not None
        source = rows[memory.source_index].sequence_ids
        length = memory.stop - memory.start
        assert length == 2, "the stop id stays behind"
        assert (source[memory.source_start :][:length] == row.sequence_ids[memory.start : memory.stop]).all()
    assert rows[2].segments == (
        Segment(0, 2, "task", 0, 0),
        Segment(2, 4, "memory", 1, 5),
        Segment(4, 5, "observation"),
        Segment(5, 8, "action"),
    )


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_segments_of_any_prompt_cover_it_and_every_copy_is_exact(data: st.DataObject) -> None:
    ids = st.lists(st.integers(3, VOCAB - 1), max_size=6)
    rows: list[Invocation] = []
    for number in range(4):
        prompt = Prompt().add("task", [3])
        for _ in range(data.draw(st.integers(0, 4))):
            if rows and data.draw(st.booleans()):
                source = data.draw(st.sampled_from(rows))
                first = data.draw(st.integers(0, len(source)))
                prompt.copy("memory", source, first, data.draw(st.integers(first, len(source))))
            else:
                prompt.add("user", data.draw(ids))
        rows.append(
            Invocation(
                episode_id="e",
                invocation_index=number,
                model_id="m",
                prompt_ids=prompt.ids,
                output_ids=[4, 2],
                segments=prompt.segments,
            )
        )
    for row in rows:
        spans = [(s.start, s.stop) for s in row.segments or ()]
        assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])] and spans[-1][1] == len(row.prompt_ids)
        for s in row.segments or ():
            assert s.start < s.stop
            if s.source_index is not None and s.source_start is not None:
                source_ids = rows[s.source_index].sequence_ids[s.source_start :][: s.stop - s.start]
                assert (row.prompt_ids[s.start : s.stop] == source_ids).all()


def test_an_extension_is_recognised_even_where_a_rewrite_was_expected(recorder: TraceRecorder) -> None:
    episode = start(recorder, "e")
    first = call(episode, [5, 6], [7, 2])
    second = call(episode, Prompt().copy("history", first).add("user", [8]), [9, 2], rewrite_kind="memory")
    assert (second.relation, second.parent_index, second.rewrite_kind) == ("extend", 0, None)


def test_forks_retries_spawns_and_chosen_parents_are_kept(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.parquet", metadata()) as recorder:
        episode = start(recorder, "e")
        first = call(episode, [5, 6], [7, 2])
        bad = call(episode, [5, 6, 7, 2, 8], [9, 2])
        episode.amend(bad, accepted=False)
        again = call(episode, [5, 6, 7, 2, 8], [10, 2], relation="retry", parent=bad)
        side = call(episode, [40, 41], [42, 2], relation="spawn", agent_id="helper")
        fork = call(episode, [5, 12], [13, 2], relation="fork", parent=first)
        other = call(episode, [50], [51, 2], relation="root")
        back = call(episode, Prompt().copy("history", again).add("user", [3]), [4, 2], parent=again)
        episode.finish(reward=1.0)
    assert (again.relation, again.parent_index, again.attempt) == ("retry", 1, 1)
    assert (side.relation, side.parent_index, side.agent_id) == ("spawn", 2, "helper")
    assert (fork.relation, fork.parent_index) == ("fork", 0)
    assert (other.relation, other.parent_index) == ("root", None)
    assert (back.relation, back.parent_index) == ("extend", 2)
    (found,) = recorded(tmp_path / "t.parquet")
    assert [i.accepted for i in found][:3] == [None, False, None]
    assert validate(tmp_path / "t.parquet", "train").clean


def test_the_default_parent_is_not_a_rejected_attempt(recorder: TraceRecorder) -> None:
    episode = start(recorder, "e")
    call(episode, [5], [7, 2])
    episode.amend(call(episode, [5, 7, 2, 8], [9, 2]), accepted=False)
    third = call(episode, [5, 7, 2, 8], [10, 2])
    assert (third.relation, third.parent_index) == ("extend", 0)


def test_forced_tokens_may_lack_a_logprob(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.parquet", metadata()) as recorder:
        episode = start(recorder, "e")
        call(episode, [5], [7, 8, 2], logprobs=[-1.0, None, -2.0], output_sampled=[True, False, True])
        episode.finish(reward=0.0)
    (found,) = recorded(tmp_path / "t.parquet")
    logprobs = found.invocations[0].output_logprobs
    assert logprobs is not None and logprobs.tolist() == [-1.0, None, -2.0]


def test_rewards_on_the_way_and_at_the_end_add_up(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.parquet", metadata()) as recorder:
        episode = start(recorder, "e")
        rows = memory_run(episode)
        assert episode.amend(rows[0], reward=0.25).reward == 0.25
        episode.finish(reward=0.5)
        with pytest.raises(UsageError, match="is finished"):
            episode.amend(rows[1], reward=1.0)
        twice = start(recorder, "twice")
        twice.amend(extended(twice), reward=0.25)
        with pytest.raises(UsageError, match=r"reward 1\.0.* has 0\.25 already"):
            twice.finish(reward=1.0)
        twice.finish()
    assert [e.episode_return for e in recorded(tmp_path / "t.parquet")] == [0.75, 0.25]


@given(st.permutations(range(6)))
@settings(max_examples=30, deadline=None)
def test_the_order_in_the_file_does_not_depend_on_who_finishes_first(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    path = tmp_path_factory.mktemp("order") / "t.parquet"
    names = ["a/0", "b/0", "a/1", "c/0", "b/1", "a/2"]  # opened group by group in turns
    with TraceRecorder(path, metadata()) as recorder:
        episodes = [start(recorder, name, group=name[0]) for name in names]
        for _ in range(2):  # calls interleave
            for episode in episodes:
                rows = episode.invocations
                prompt = Prompt().copy("history", rows[-1]) if rows else Prompt().add("task", [5])
                call(episode, prompt.add("user", [6]), [7, 2])
        for number in order:
            episodes[number].finish(reward=float(number))
    found = recorded(path)
    assert [e.episode_id for e in found] == ["a/0", "a/1", "a/2", "b/0", "b/1", "c/0"]
    assert [e.episode_return for e in found] == [0.0, 2.0, 5.0, 1.0, 4.0, 3.0]
    assert all(len(e) == 2 for e in found)


def test_an_episode_is_written_as_soon_as_nothing_in_front_of_it_is_open(recorder: TraceRecorder) -> None:
    first, second = start(recorder, "a"), start(recorder, "b", group="h")
    for episode in (first, second):
        extended(episode)
    second.finish(reward=0.0)
    assert len(recorder._waiting) == 2, "b waits for a"
    first.finish(reward=0.0)
    assert not recorder._waiting


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="engine died"),
        TraceRecorder(tmp_path / "t.parquet", metadata()) as recorder,
    ):
        episode = start(recorder, "e")
        memory_run(episode)
        episode.finish(reward=1.0)
        start(recorder, "f")
        raise RuntimeError("engine died")
    assert list(tmp_path.iterdir()) == []


def test_open_episodes_are_named_and_left_out_but_finished_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with (
        pytest.raises(UsageError, match="1 episodes were never finished .*'open'"),
        TraceRecorder(path, metadata()) as r,
    ):
        open_one, done = start(r, "open"), start(r, "done")
        extended(open_one)
        extended(done)
        done.finish(reward=1.0)
    assert [e.episode_id for e in recorded(path)] == ["done"]
    assert validate(path, "train").clean


def test_discarded_episodes_leave_no_trace(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.parquet", metadata()) as recorder:
        dropped, kept = start(recorder, "dropped"), start(recorder, "kept")
        extended(dropped)
        dropped.discard()
        extended(kept)
        kept.finish(reward=1.0)
    assert [e.episode_id for e in recorded(tmp_path / "t.parquet")] == ["kept"]


def test_names_and_ends_are_checked(tmp_path: Path, recorder: TraceRecorder) -> None:
    episode = start(recorder, "e")
    with pytest.raises(UsageError, match="'e' was opened before"):
        start(recorder, "e")
    with pytest.raises(UsageError, match="has no invocation"):
        episode.finish(reward=1.0)
    extended(episode)
    with pytest.raises(UsageError, match="E-REWARD-NONFINITE.* got nan"):
        episode.finish(reward=float("nan"))
    episode.finish(reward=1.0)
    with pytest.raises(UsageError, match="is finished"):
        extended(episode)
    with pytest.raises(UsageError, match="model_id 'x', the metadata has m"):
        start(recorder, "x", model_id="x")
    two = TraceRecorder(tmp_path / "two.parquet", metadata("m", "n"))
    with pytest.raises(UsageError, match="model_id None, the metadata has m, n"):
        start(two, "e")
    assert start(two, "e", model_id="n").episode_id == "e"
