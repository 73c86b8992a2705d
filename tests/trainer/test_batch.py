"""The join of rollouts and scores: by key, and only of what belongs together."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers_scorer import PADDED, SIZE, metadata_for, save_model, tiny_model
from helpers_trainer import Setup, code_of, make_setup, rewarded_groups, with_behaviour

from memopd_scorer.scores import ScoreRow, ScoresReader
from memopd_scorer.scoring import score
from memopd_trace.behaviour import behaviour_of
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode, Invocation, Media, Sampling
from memopd_trace.storage import write
from memopd_trainer.advantages import group_advantages
from memopd_trainer.batch import Rollouts, load_rollouts
from memopd_trainer.packs import make_packs
from memopd_trainer.train import train


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(tmp_path_factory.mktemp("batch"))


def rewritten(setup: Setup, folder: Path, key: tuple[str, int], **changes: Any) -> Path:
    """The trace with one row changed."""
    rows = [i.replace(**changes) if i.key == key else i for e in setup.episodes for i in e]
    write(folder / "changed.parquet", metadata_for(setup.student), rows)
    return folder / "changed.parquet"


def test_every_target_gets_the_values_of_its_own_state_and_output_index(setup: Setup) -> None:
    rollouts = load_rollouts(setup.trace, setup.scores, policy=True)
    by_key = {i.key: i for e in setup.episodes for i in e}
    advantages = {e.episode_id: float(n) for n, e in enumerate(setup.episodes)}
    packs = list(make_packs(rollouts, rollouts.groups, advantages, max_tokens=90))
    assert len(packs) > 1 and any(len(p.pack.states) > 1 for p in packs)
    shared_row = seen = 0
    reader = ScoresReader(setup.scores)
    for p in packs:
        assert p.behaviour_M is not None and p.teacher is not None and p.teacher.hidden_ME is not None
        shared_row += len(p.row_M) - len(set(p.row_M.tolist()))
        for m in range(len(p.row_M)):
            state = p.pack.states[p.pack.target_state_M[m]]
            output = int(p.pack.target_output_M[m])
            invocation = by_key[state.episode_id, state.invocation_index]
            row = reader.get(*invocation.key)
            assert row is not None and row.hidden is not None and invocation.output_logprobs is not None
            assert int(p.ids_M[m]) == invocation.output_ids[output]
            assert int(p.row_M[m]) == p.pack.target_row_M[m]
            assert float(p.behaviour_M[m]) == float(invocation.output_logprobs[output])
            assert float(p.advantage_M[m]) == advantages[state.episode_id]
            assert float(p.weight_M[m]) == pytest.approx(1 / (2 * 2 * 12))
            at = int(np.flatnonzero(row.output_index == output)[0])
            assert torch.equal(p.teacher.hidden_ME[m], row.hidden[at])
            seen += 1
    assert seen == 48
    assert sum(float(p.weight_M.sum()) for p in packs) == pytest.approx(1.0)


def test_scores_in_another_order_give_the_same_packs(setup: Setup) -> None:
    """The join goes by output index, not by place in the list."""

    class Reversed(ScoresReader):
        def get(self, episode_id: str, invocation_index: int) -> ScoreRow | None:
            row = super().get(episode_id, invocation_index)
            assert row is not None and row.hidden is not None
            names = ("output_index", "logprob", "logsumexp", "entropy")
            turned = {name: getattr(row, name)[::-1].copy() for name in names}
            return dataclasses.replace(row, hidden=row.hidden.flip(0), **turned)

    rollouts = load_rollouts(setup.trace, setup.scores, policy=False)
    other = dataclasses.replace(rollouts, scores=Reversed(setup.scores))

    def teachers(r: Rollouts) -> list[torch.Tensor | None]:
        return [p.teacher.hidden_ME for p in make_packs(r, r.groups, {})]

    for a, b in zip(teachers(rollouts), teachers(other), strict=True):
        assert a is not None and b is not None and len(a) > 6 and torch.equal(a, b)


def test_groups_are_formed_across_the_trace_and_an_episode_without_group_stands_alone(tmp_path: Path) -> None:
    a, b, c, d = rewarded_groups(groups=2, per_group=2)
    loose = [Episode(x.episode_id, tuple(i.replace(group_id=None) for i in x)) for x in (d,)]
    setup = make_setup(tmp_path, [a, c, b, *loose])
    rollouts = load_rollouts(setup.trace, None, policy=False)
    assert [[e.episode_id for e in g] for g in rollouts.groups] == [["g0e0", "g0e1"], ["g1e0"], ["g1e1"]]
    assert rollouts.episodes == 4


def test_episodes_that_only_name_their_task_are_compared_within_it(tmp_path: Path) -> None:
    tasks = {"g0e0": "first", "g0e1": "second", "g1e0": "first", "g1e1": None}
    episodes = [
        Episode(e.episode_id, tuple(i.replace(group_id=None, task_id=tasks[e.episode_id]) for i in e))
        for e in rewarded_groups()
    ]
    last = episodes[2].invocations[-1].replace(reward=0.5)
    episodes[2] = Episode("g1e0", (*episodes[2].invocations[:-1], last))
    setup = make_setup(tmp_path, episodes)
    rollouts = load_rollouts(setup.trace, setup.scores, policy=True)
    assert [[e.episode_id for e in g] for g in rollouts.groups] == [["g0e0", "g1e0"], ["g0e1"], ["g1e1"]]
    advantages = group_advantages(rollouts.groups)
    assert advantages.by_episode == {"g0e0": 0.25, "g1e0": -0.25, "g0e1": 0.0, "g1e1": 0.0} and advantages.alone == 2
    seen = {a for p in make_packs(rollouts, rollouts.groups, advantages.by_episode) for a in p.advantage_M.tolist()}
    assert seen == {0.25, -0.25, 0.0}


NO_MASK = [True] * 6


@pytest.mark.parametrize(
    "changes",
    [
        {"output_loss_mask": [False, *NO_MASK[1:]]},
        {"output_sampled": [False, *NO_MASK[1:]]},
        {"accepted": False},
        {"task_id": "t", "group_id": None},
        {"position_ids": np.arange(5, 39)},
        {"reward": 0.5},
        {"output_logprobs": np.full(6, -2.0, np.float32)},
        {"output_logprobs": [None, *[-2.0] * 5], "output_loss_mask": [False, *NO_MASK[1:]]},
        {"logprob_kind": "tempered"},
        {"logprob_kind": "tempered", "sampling": Sampling(temperature=0.8)},
        {"logprob_kind": "processed", "output_kept_logmass": np.full(6, -0.1, np.float32)},
    ],
    ids="+".join,
)  # fmt: skip
def test_the_digest_names_all_that_training_takes_from_a_row(
    setup: Setup, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The ids of the row are never changed."""
    row = setup.episodes[2].invocations[1]
    changed = rewritten(setup, tmp_path, row.key, **changes)
    if "group_id" in changes:  # an episode has one
        both = [i.replace(**changes) if i.episode_id == "g1e0" else i for e in setup.episodes for i in e]
        write(changed, metadata_for(setup.student), both, overwrite=True)
    with_policy = {load_rollouts(t, None, policy=True).digest for t in (setup.trace, changed)}
    without = {load_rollouts(t, None, policy=False).digest for t in (setup.trace, changed)}
    assert len(with_policy) == 2
    uses_behaviour = set(changes) <= {"reward", "output_logprobs", "logprob_kind", "sampling", "output_kept_logmass"}
    assert len(without) == (1 if uses_behaviour else 2), "without the policy term neither reward nor behaviour is used"


def test_the_digest_does_not_know_what_training_does_not_take(setup: Setup, tmp_path: Path) -> None:
    row = setup.episodes[2].invocations[1]
    written_out = {"accepted": True, "output_sampled": NO_MASK}
    unused = {"output_text": "x", "extra": {"a": "b"}, "rewards": {"f1": 1.0}, **written_out}
    changed = rewritten(setup, tmp_path, row.key, **unused)
    assert load_rollouts(changed, None, policy=True).digest == load_rollouts(setup.trace, None, policy=True).digest
    turned = [i for e in setup.episodes[::-1] for i in e]
    write(tmp_path / "turned.parquet", metadata_for(setup.student), turned)
    other = load_rollouts(tmp_path / "turned.parquet", None, policy=True)
    assert other.digest != load_rollouts(setup.trace, None, policy=True).digest, "the draws go by their order"


def test_only_trained_tokens_become_targets_and_only_states_that_have_some_are_run(
    setup: Setup, tmp_path: Path
) -> None:
    mask = np.array([True, False, True, False, False, True])
    rows = [list(e) for e in setup.episodes]
    rows[0][0] = rows[0][0].replace(output_loss_mask=mask)
    rows[1][1] = rows[1][1].replace(accepted=False)
    rows[2][1] = rows[2][1].replace(output_sampled=mask)
    write(tmp_path / "t.parquet", metadata_for(setup.student), [i for e in rows for i in e])
    score(tmp_path / "t.parquet", setup.teacher, tmp_path / "scores")
    rollouts = load_rollouts(tmp_path / "t.parquet", tmp_path / "scores", policy=True)
    packs = list(make_packs(rollouts, rollouts.groups, {}))
    found: dict[tuple[str, int], int] = {}
    for p in packs:
        chosen = set(zip(p.row_M.tolist(), p.ids_M.tolist(), strict=True))
        assert len(chosen) > 3
        for state in p.pack.states:
            found[state.episode_id, state.invocation_index] = 0
    assert ("g0e1", 1) not in found and len(found) == 7
    assert sum(len(p.row_M) for p in packs) == 48 - 3 - 6 - 3


@pytest.mark.parametrize("layout", ["tree", "packed", "single"])
def test_layouts_change_what_is_run_and_not_what_is_trained(setup: Setup, layout: str) -> None:
    rollouts = load_rollouts(setup.trace, setup.scores, policy=True)
    packs = list(make_packs(rollouts, rollouts.groups, {}, layout=layout))
    executed, logical = sum(len(p.pack) for p in packs), sum(p.pack.logical_tokens for p in packs)
    assert sum(len(p.row_M) for p in packs) == 48 and logical == 248
    assert executed < logical if layout == "tree" else executed == logical
    assert len(packs) == (8 if layout == "single" else 1)


def test_a_state_that_was_not_scored_is_refused(setup: Setup, tmp_path: Path) -> None:
    key = setup.episodes[1].invocations[1].key
    ids = setup.episodes[1].invocations[1].output_ids.copy()
    ids[3] = (ids[3] + 1) % SIZE
    changed = rewritten(setup, tmp_path, key, output_ids=ids)
    assert code_of(changed, setup.scores) == "E-SCORES-STATE"
    load_rollouts(changed, None, policy=True)


def test_missing_scores_are_refused(setup: Setup, tmp_path: Path) -> None:
    write(tmp_path / "part.parquet", metadata_for(setup.student), [i for e in setup.episodes[:3] for i in e])
    score(tmp_path / "part.parquet", setup.teacher, tmp_path / "part")
    assert code_of(setup.trace, tmp_path / "part") == "E-SCORES-MISSING"

    score(setup.trace, setup.teacher, tmp_path / "sampled", signals=["sampled"])
    assert code_of(setup.trace, tmp_path / "sampled") == "E-SCORES-MISSING"

    key = setup.episodes[0].invocations[1].key
    forced = rewritten(setup, tmp_path, key, output_sampled=[True, True, False, True, True, True])
    score(forced, setup.teacher, tmp_path / "forced")
    load_rollouts(forced, tmp_path / "forced", policy=True)
    assert code_of(setup.trace, tmp_path / "forced") == "E-SCORES-MISSING"
    assert code_of(setup.trace, tmp_path / "nowhere") == "E-NO-INPUT"


def test_another_tokenizer_is_refused(setup: Setup, tmp_path: Path) -> None:
    other = save_model(tiny_model("llama", seed=2), tmp_path / "other", words="v")
    write(tmp_path / "o.parquet", metadata_for(other), [i for e in setup.episodes for i in e])
    assert code_of(tmp_path / "o.parquet", setup.scores) == "E-TOKENIZER-MISMATCH"


def test_rows_of_several_models_are_not_trained_as_one_policy(setup: Setup, tmp_path: Path) -> None:
    mine = metadata_for(setup.student)
    both = mine.model_copy(update={"models": {"m": mine.models["m"], "judge": mine.models["m"]}})
    rows = [i.replace(model_id="judge") if i.invocation_index else i for e in setup.episodes for i in e]
    write(tmp_path / "both.parquet", both, rows)
    with pytest.raises(UsageError, match=r"4 of 'm', 4 of 'judge'.*split the trace by model"):
        load_rollouts(tmp_path / "both.parquet", None, policy=True)
    rows = [i.replace(output_loss_mask=[False] * 6) if i.model_id == "judge" else i for i in rows]
    write(tmp_path / "masked.parquet", both, rows)
    rollouts = load_rollouts(tmp_path / "masked.parquet", None, policy=True)
    assert list(rollouts.metadata.models) == ["m"]
    assert sum(len(p.row_M) for p in make_packs(rollouts, rollouts.groups, {})) == 24


def test_states_that_do_not_give_their_stored_logprobs_are_refused(setup: Setup, tmp_path: Path) -> None:
    """A shard whose states were shifted by one token, with the right name and digest for its bytes."""
    shutil.copytree(setup.scores, tmp_path / "shifted")
    (shard,) = (tmp_path / "shifted").glob("shard-*.parquet")
    table = pq.read_table(shard)
    lists = table.column("hidden").combine_chunks()
    turned = pa.ListArray.from_arrays(lists.offsets, lists.values.take(np.roll(np.arange(len(lists.values)), 1)))
    table = table.set_column(table.column_names.index("hidden"), "hidden", turned)
    resign(tmp_path / "shifted", shard, table)
    assert code_of(setup.trace, tmp_path / "shifted") == "E-SCORES-CHECK"


def test_states_of_another_width_than_the_heads_are_refused(setup: Setup, tmp_path: Path) -> None:
    shutil.copytree(setup.scores, tmp_path / "narrow")
    (shard,) = (tmp_path / "narrow").glob("shard-*.parquet")
    table = pq.read_table(shard)
    lists = table.column("hidden").combine_chunks()
    states = lists.values.flatten().to_numpy().reshape(len(lists.values), -1)[:, :-1]
    narrow = pa.FixedSizeListArray.from_arrays(pa.array(states.reshape(-1)), states.shape[1])
    column = pa.ListArray.from_arrays(lists.offsets, narrow)
    table = table.set_column(table.column_names.index("hidden"), "hidden", column)
    resign(tmp_path / "narrow", shard, table)
    assert code_of(setup.trace, tmp_path / "narrow") == "E-SCORES-DAMAGED"


def resign(folder: Path, shard: Path, table: pa.Table) -> None:
    """Put a changed shard in the place of another, under the name and manifest that belong to its bytes."""
    pq.write_table(table, shard)
    name = f"{shard.name[:12]}-{hashlib.sha256(shard.read_bytes()).hexdigest()[:16]}.parquet"
    manifest = (folder / "manifest.json").read_text().replace(shard.name, name)
    shard.rename(folder / name)
    (folder / "manifest.json").write_text(manifest)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"token_source": "retokenized", "output_logprobs": None}, "E-NEEDS-LOGPROBS"),
        ({"token_source": "retokenized"}, "E-NEEDS-ENGINE-IDS"),
        ({"output_logprobs": None}, "E-NEEDS-LOGPROBS"),
        ({"output_logprobs": [-1.0, None, -1.0, -1.0, -1.0, -1.0]}, "E-LOGPROB-NULL"),
        ({"output_logprobs": np.full(6, np.nan, np.float32)}, "E-LOGPROB-NAN"),
        ({"output_logprobs": np.full(6, -9999.0, np.float32)}, "E-LOGPROB-SENTINEL"),
        ({"logprob_kind": "unknown"}, "E-LOGPROB-KIND"),
        ({"logprob_kind": "processed", "sampling": Sampling(temperature=1.0, top_k=5)}, "E-SUPPORT-UNKNOWN"),
        ({"logprob_kind": "tempered", "sampling": Sampling(temperature=0.0)}, "E-LOGPROB-KIND"),
        (
            {"logprob_kind": "tempered", "sampling": Sampling(temperature=0.7, repetition_penalty=1.1)},
            "E-LOGPROB-KIND",
        ),
    ],
)  # fmt: skip
def test_behaviour_that_gives_no_ratio_is_refused_with_the_policy_term_on(
    setup: Setup, tmp_path: Path, changes: dict[str, Any], code: str
) -> None:
    trace = rewritten(setup, tmp_path, setup.episodes[2].invocations[0].key, **changes)
    with pytest.raises(InputError) as caught:
        load_rollouts(trace, setup.scores, policy=True)
    assert caught.value.code in (code, "E-RETOKENIZED-LOGPROBS") and "g1e0" in str(caught.value)


def test_a_trace_without_behaviour_can_be_distilled(setup: Setup, tmp_path: Path) -> None:
    bare = {"output_logprobs": None, "logprob_kind": None, "sampling": None, "policy_version": None}
    rows = [i.replace(**bare) for e in setup.episodes for i in e]
    write(tmp_path / "bare.parquet", metadata_for(setup.student), rows)
    rollouts = load_rollouts(tmp_path / "bare.parquet", setup.scores, policy=False)
    (pack,) = make_packs(rollouts, rollouts.groups, {})
    assert pack.behaviour_M is None and pack.teacher is not None
    assert pack.teacher.hidden_ME is not None and len(pack.teacher.hidden_ME) == 48


def test_padded_ids_media_and_a_trace_with_nothing_to_train_are_refused(setup: Setup, tmp_path: Path) -> None:
    first = setup.episodes[0].invocations[0]
    padded = first.output_ids.copy()
    padded[2] = SIZE + 1
    assert SIZE + 1 < PADDED
    episodes = [e for e in setup.episodes if e.episode_id != "g0e0"]
    for name, row, code in (
        ("padded", first.replace(output_ids=padded), "E-ID-PADDED"),
        ("media", first.replace(media=[Media(0, 2, b"\0" * 32)]), "E-MODEL-UNSUPPORTED"),
    ):
        rows = [row, *(i for e in episodes for i in e)]
        write(tmp_path / f"{name}.parquet", metadata_for(setup.student, ("media",)), rows)
        assert code_of(tmp_path / f"{name}.parquet", None) == code
    rejected = [i.replace(accepted=False) for e in setup.episodes for i in e if i.invocation_index == 0]
    write(tmp_path / "none.parquet", metadata_for(setup.student), rejected)
    assert code_of(tmp_path / "none.parquet", None, policy=False) == "E-NO-TARGETS"


def test_an_invalid_trace_is_refused_with_the_validators_own_finding(setup: Setup, tmp_path: Path) -> None:
    key = setup.episodes[0].invocations[1].key
    trace = rewritten(setup, tmp_path, key, position_ids=[0, 1, 2])
    with pytest.raises(InputError, match=r"E-LENGTH-SEQUENCE.*'g0e0', invocation 1.*validate --profile core"):
        load_rollouts(trace, None, policy=False)


@pytest.mark.parametrize("kind", ["raw", "tempered", "processed"])
def test_behaviour_is_brought_to_the_whole_vocabulary_at_its_temperature(kind: str) -> None:
    """With unchanged weights log_softmax(z / T) gives the returned numbers, whatever the kind."""
    model = tiny_model("llama", torch.float64)
    episodes = rewarded_groups(groups=1, per_group=1)
    (episode,) = with_behaviour(model, episodes, kind)
    first: Invocation = episode.invocations[0]
    behaviour = behaviour_of(first)
    logprobs, temperature = behaviour.logprobs, behaviour.temperature
    assert behaviour.reason is None
    with torch.no_grad():
        logits = model(torch.from_numpy(first.sequence_ids.astype(np.int64))[None]).logits[0, :, :SIZE]
    expected = (logits[len(first.prompt_ids) - 1 : -1] / temperature).log_softmax(1)
    expected = expected.gather(1, torch.from_numpy(first.output_ids.astype(np.int64))[:, None])[:, 0]
    assert temperature == (1.0 if kind == "raw" else 0.7) and len(logprobs) == 6
    assert np.abs(logprobs - expected.numpy()).max() < 1e-6
    assert first.output_logprobs is not None
    assert kind != "processed" or np.abs(logprobs - first.output_logprobs).min() > 0.04


@pytest.mark.parametrize("tier", ["float16", "int8"])
def test_states_of_a_tier_are_trained_on_as_the_reader_rebuilds_them(tier: str, setup: Setup, tmp_path: Path) -> None:
    score(setup.trace, setup.teacher, tmp_path / "s", dtype="float64", states=tier)
    exact, rounded = (load_rollouts(setup.trace, s, policy=False) for s in (setup.scores, tmp_path / "s"))
    assert exact.scores_digest != rounded.scores_digest
    seen = 0
    for a, b in zip(*(make_packs(r, r.groups, {}) for r in (exact, rounded)), strict=True):
        assert a.teacher is not None and b.teacher is not None
        states, rebuilt = a.teacher.hidden_ME, b.teacher.hidden_ME
        assert states is not None and rebuilt is not None and rebuilt.dtype == torch.float32
        distance = (states - rebuilt).abs().max()
        assert 0 < float(distance) < (0.01 if tier == "float16" else 0.1)
        seen += len(rebuilt)
    assert seen == 48
    kls = [
        float(train(setup.config(scores=str(s), output=str(tmp_path / s.name), steps=1)).last.divergence)  # type: ignore[union-attr]
        for s in (setup.scores, tmp_path / "s")
    ]
    assert kls[0] != kls[1] and kls[1] == pytest.approx(kls[0], rel=1e-3 if tier == "float16" else 2e-2)
