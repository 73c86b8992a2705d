"""Each recipe, end to end on tiny models: what is trained, under which state, with which weight, what is written."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_scorer import SIZE
from helpers_trainer import Setup, equal_weights, exact, make_setup, rewarded_groups
from transformers import AutoTokenizer

from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.teacher import load
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode
from memopd_trace.views import persistent_history
from memopd_trainer import train
from memopd_trainer.batch import load_rollouts
from memopd_trainer.metrics import StepMetrics, StepSums
from memopd_trainer.objective import make_teacher, pack_loss
from memopd_trainer.packs import make_packs
from memopd_trainer.recipes import ORDER
from memopd_trainer.recipes.drawing import chosen_turns
from memopd_trainer.recipes.peers import write_peer_view


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Two groups of two rollouts of three calls; the student is what sampled them. Scores of both views."""
    made = make_setup(tmp_path_factory.mktemp("recipes"), rewarded_groups(calls=3), noise=0.0)
    score(made.trace, made.teacher, made.root / "flat", dtype="float64", view="persistent-history")
    write_peer_view(made.trace, made.root / "peers.parquet", AutoTokenizer.from_pretrained(made.student))
    peers = {"view": "successful-peer", "views": made.root / "peers.parquet"}
    score(made.trace, made.student, made.root / "peers", dtype="float64", **peers)
    return made


def run_of(setup: Setup, folder: Path, recipe: str, **changes: Any) -> list[dict[str, Any]]:
    """Train by a recipe; the lines of its metrics."""
    if recipe == "persistent_history":
        changes.setdefault("scores", str(setup.root / "flat"))
    if recipe == "sdpo":
        changes.setdefault("scores", str(setup.root / "peers"))
    if recipe == "one_shot":
        changes.setdefault("one_shot__task", "group0")
    config = setup.config(recipe=recipe, output=str(folder), steps=changes.pop("steps", 3), **changes)
    assert train(config).steps == config.steps
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", ORDER)
def test_a_recipe_trains_and_goes_on_with_the_same_bits(setup: Setup, tmp_path: Path, recipe: str) -> None:
    whole = run_of(setup, tmp_path / "whole", recipe)
    assert [line["step"] for line in whole] == [1, 2, 3] and all(line["grad_norm"] > 0 for line in whole)
    taught, rewarded = recipe != "ppo", recipe in ("ppo", "memopd", "persistent_history")
    assert (whole[0]["divergence"] is not None) == taught and (whole[0]["value_loss"] is not None) == rewarded
    run_of(setup, tmp_path / "parts", recipe, steps=2)
    parts = run_of(setup, tmp_path / "parts", recipe, steps=3)
    assert equal_weights(tmp_path / "whole/step-000003", tmp_path / "parts/step-000003")
    assert [p["measured"] for p in parts] == [w["measured"] for w in whole]


def test_a_run_by_another_recipe_is_another_run(setup: Setup, tmp_path: Path) -> None:
    run_of(setup, tmp_path, "tcod")
    with pytest.raises(UsageError, match="recipe = 'tcod', not 'reopd'"):
        run_of(setup, tmp_path, "reopd")


def test_teacher_and_ratio_are_taken_under_the_flattened_history(setup: Setup) -> None:
    config = setup.config(recipe="persistent_history", scores=str(setup.root / "flat"))
    rollouts = load_rollouts(config.trace, config.scores, policy=True, view=config.view)
    student, scores = exact(config.student), ScoresReader(setup.root / "flat")
    seen: dict[tuple[str, int], np.ndarray] = {}
    for pack in make_packs(rollouts, rollouts.groups, {}, view=config.student_view):
        hidden = student.states(pack.pack)[pack.row_M]
        logprob_M = student.head.logits(hidden).log_softmax(1).gather(1, pack.ids_M[:, None])[:, 0]
        assert pack.behaviour_M is not None and pack.teacher is not None and pack.teacher.hidden_ME is not None
        for number, state in enumerate(pack.pack.states):
            own = np.flatnonzero(pack.state_M == number)
            seen[state.key] = (logprob_M[own] - pack.behaviour_M[own]).detach().numpy()
            row = scores.get(*state.key)
            assert row is not None and row.hidden is not None
            assert torch.equal(pack.teacher.hidden_ME[own], row.hidden[pack.output_M[own]])
    far = 0
    for episode in setup.episodes:
        for invocation, prompt in zip(episode, persistent_history(episode), strict=True):
            ids = np.concatenate([prompt, invocation.output_ids]).astype(np.int64)
            with torch.no_grad():  # the same from the plain model, alone
                logits = student.model(torch.from_numpy(ids)[None]).logits[0, len(prompt) - 1 : -1, :SIZE]
            own = torch.from_numpy(invocation.output_ids.astype(np.int64))
            expected = logits.log_softmax(1).gather(1, own[:, None])[:, 0].numpy() - invocation.output_logprobs
            assert seen[invocation.key] == pytest.approx(np.asarray(expected), abs=1e-9)
            same = np.array_equal(prompt, invocation.prompt_ids)
            far += not same
            # the weights are those that sampled: a ratio away from 1 comes of the state alone
            assert (np.abs(seen[invocation.key]).max() < 1e-5) == same
    assert far == 8


def test_the_control_clips_falsely_where_memopd_does_not(setup: Setup, tmp_path: Path) -> None:
    (exact_state,) = run_of(setup, tmp_path / "memopd", "memopd", steps=1)
    (flattened,) = run_of(setup, tmp_path / "flat", "persistent_history", steps=1)
    assert exact_state["ratio_min"] == pytest.approx(1, abs=1e-5) and exact_state["clip_fraction"] == 0
    assert flattened["ratio_max"] > 1.2 and flattened["clip_fraction"] > 0.1


def test_the_control_needs_scores_of_its_view(setup: Setup, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="scored under the view 'recorded'"):
        run_of(setup, tmp_path, "persistent_history", scores=str(setup.scores))


def test_both_arms_are_measured_on_one_footing(setup: Setup, tmp_path: Path) -> None:
    held = {"trace": str(setup.trace), "scores": str(setup.scores), "view": "recorded"}
    values = [run_of(setup, tmp_path / r, r, held_out=held, lr=0.0)[0] for r in ("memopd", "persistent_history")]
    assert values[0]["held_out"] == values[1]["held_out"]


@pytest.mark.parametrize(("order", "turn"), [("f2b", 0), ("b2f", 2)])
def test_only_chosen_turns_are_packed(setup: Setup, order: str, turn: int) -> None:
    config = setup.config(recipe="tcod", tcod__order=order)
    rollouts = load_rollouts(config.trace, config.scores, policy=True, signal="sampled")
    chosen = chosen_turns(rollouts.groups, 1, config)
    packs = list(make_packs(rollouts, rollouts.groups, {}, chosen=chosen))
    assert {s.invocation_index for p in packs for s in p.pack.states} == {turn}
    assert float(sum(p.weight_M.sum() for p in packs)) == pytest.approx(1)


def test_the_flattened_history_of_a_later_turn_holds_the_turns_that_are_not_trained(setup: Setup) -> None:
    rollouts = load_rollouts(setup.trace, None, policy=False)
    (episode, *_), *_ = rollouts.groups
    key = (episode.episode_id, 2)
    (pack,) = make_packs(rollouts, [[episode]], {}, chosen={key}, view="persistent-history")
    (state,) = pack.pack.states
    prompt = persistent_history(episode)[2]
    assert state.ids.tolist() == [*prompt, *episode.invocations[2].output_ids]


def test_the_curriculum_trains_more_tokens_as_it_grows(setup: Setup, tmp_path: Path) -> None:
    lines = run_of(setup, tmp_path, "tcod", steps=6)
    assert [line["measured"]["turns"] for line in lines] == [1, 1, 2, 2, 3, 3]
    assert [line["trained_tokens"] // lines[0]["trained_tokens"] for line in lines] == [1, 1, 2, 2, 3, 3]


def test_the_critics_chain_is_the_whole_episode(setup: Setup, tmp_path: Path) -> None:
    """The reward of a turn that is not trained counts: the reward sits on the last turn, the first is trained."""
    (line, *_) = run_of(setup, tmp_path, "ppo", tcod={"order": "f2b"})
    assert line["trained_tokens"] == sum(len(e.invocations[0].output_ids) for e in setup.episodes)
    assert line["value_loss"] == pytest.approx(0.25)  # (0 - 1)^2 / 2 for one of two episodes


def test_one_turn_of_each_episode_is_replayed(setup: Setup, tmp_path: Path) -> None:
    lines = run_of(setup, tmp_path, "reopd")
    per_turn = len(setup.episodes[0].invocations[0].output_ids)
    assert [line["trained_tokens"] for line in lines] == [4 * per_turn] * 3


def test_pruned_loss_is_that_of_weighted_tokens(setup: Setup) -> None:
    """Against the formulas, token by token, from the plain models."""
    config = setup.config(recipe="prune_opd", prune_opd={"k": 8, "gamma": 0.3, "w_drop": 0.4, "w_base": 0.25})
    rollouts = load_rollouts(config.trace, config.scores, policy=False)
    student, sums = exact(config.student), StepSums()
    teacher = make_teacher(rollouts, config, torch.device("cpu"))
    for pack in make_packs(rollouts, rollouts.groups, {}):
        pack_loss(student, teacher, pack, config, sums)
    expected, overlaps, lengths = _pruned_reference(setup, k=8, gamma=0.3, w_drop=0.4, w_base=0.25)
    assert sums.loss == pytest.approx(expected, rel=1e-9)
    assert sums.overlap == pytest.approx(np.mean(overlaps)) and sorted(sums.effective) == sorted(lengths)
    assert min(lengths) < 6 and min(overlaps) < 0.3 < max(overlaps)


@torch.no_grad()
def _pruned_reference(
    setup: Setup, *, k: int, gamma: float, w_drop: float, w_base: float
) -> tuple[float, list[float], list[int]]:
    models = [exact(setup.student).model, load(setup.teacher, dtype="float64").model]  # the teacher as it scored
    total, overlaps, lengths = 0.0, [], []
    for episode in setup.episodes:
        tokens = sum(len(i.output_ids) for i in episode)
        for i in episode:
            ids = torch.from_numpy(i.sequence_ids.astype(np.int64))[None]
            p, q = (m(ids).logits[0, len(i.prompt_ids) - 1 : -1, :SIZE].log_softmax(1) for m in models)
            bad = effective = 0
            for log_p, log_q in zip(p, q, strict=True):
                common = set(log_p.topk(k).indices.tolist()) & set(log_q.topk(k).indices.tolist())
                overlaps.append(len(common) / k)
                bad += len(common) / k < gamma
                w = min(max(1 - w_drop * bad, 0.0), 1.0)
                effective += w > 1e-8
                total += (w + w_base) * float((log_p.exp() * (log_p - log_q)).sum()) / (4 * tokens)
            lengths.append(effective)
    return total, overlaps, lengths


def test_a_student_that_is_its_teacher_is_not_pruned(tmp_path: Path) -> None:
    """In float32: the overlap is whole, and a gamma of 1 is not above it."""
    setup = make_setup(tmp_path, rewarded_groups(groups=1), dtype="float32", noise=0.0, same_teacher=True)
    (line,) = run_of(setup, tmp_path / "run", "prune_opd", steps=1, prune_opd={"k": 10, "gamma": 1.0})
    assert line["measured"]["overlap"] == pytest.approx(1) and line["measured"]["teacher_weight"] == pytest.approx(1.5)
    with pytest.raises(UsageError, match="prune_opd.k is 98, the vocabulary has 97 ids"):
        run_of(setup, tmp_path / "k", "prune_opd", steps=1, prune_opd={"k": 98})


def test_pruning_writes_its_length_and_goes_on_from_it(setup: Setup, tmp_path: Path) -> None:
    length = {"initial": 8, "minimum": 2, "maximum": 20, "step": 3, "margin": 0, "patience": 2}
    lines = run_of(setup, tmp_path, "prune_opd", prune_opd={"length": length}, steps=2)
    lines = run_of(setup, tmp_path, "prune_opd", prune_opd={"length": length}, steps=5)
    # outputs have 6 tokens: two misses at 8, then hits at 5 and misses at 8 again
    assert [line["measured"]["length"] for line in lines] == [8, 5, 8, 8, 5]
    assert [line["measured"]["length_misses"] for line in lines] == [1, 0, 0, 1, 0]
    assert all(0.5 <= line["measured"]["teacher_weight"] <= 1.5 for line in lines)


def test_one_task_reaches_some_states_of_a_full_run_and_absorbs_the_gap(setup: Setup, tmp_path: Path) -> None:
    one_shot = {"task": "group0", "rollouts": 1, "reference": str(setup.scores), "clusters": 40, "components": 8}
    lines = run_of(setup, tmp_path, "one_shot", one_shot=one_shot, steps=4)
    measured = [line["measured"] for line in lines]
    coverage = [m["coverage"] for m in measured]
    assert 0 < coverage[0] < coverage[1] < 1 and coverage[1:] == [coverage[1]] * 3  # two rollouts, then the same
    assert all(len(m["reached"]) == round(40 * m["coverage"]) for m in measured)
    run_of(setup, tmp_path / "parts", "one_shot", one_shot=one_shot, steps=1)
    parts = run_of(setup, tmp_path / "parts", "one_shot", one_shot=one_shot, steps=4)
    assert [line["measured"] for line in parts] == measured
    gaps = [m["teacher_gap"] for m in measured]
    assert "absorption" not in measured[0]
    for (before, after), m in zip(pairwise(gaps), measured[1:], strict=True):
        assert m["absorption"] == pytest.approx((before - after) / before)
    everything = run_of(setup, tmp_path / "all", "one_shot", one_shot=one_shot | {"task": "group1"}, steps=2)
    assert coverage[1] + everything[1]["measured"]["coverage"] >= 1  # the two tasks are all that there is


def test_the_gap_is_that_of_the_sampled_tokens(setup: Setup, tmp_path: Path) -> None:
    (line,) = run_of(setup, tmp_path, "one_shot", steps=1)
    scores = ScoresReader(setup.scores)
    gaps = []
    for episode in setup.episodes[:2]:
        for i in episode:
            row = scores.get(*i.key)
            assert row is not None and i.output_logprobs is not None
            gaps.append(np.abs(np.asarray(i.output_logprobs) - row.logprob).mean())
    assert line["measured"]["teacher_gap"] == pytest.approx(np.mean(gaps), rel=1e-4)


def test_coverage_needs_states_of_the_same_teacher(setup: Setup, tmp_path: Path) -> None:
    score(setup.trace, setup.student, tmp_path / "other", dtype="float64")
    with pytest.raises(InputError, match="another teacher"):
        run_of(setup, tmp_path / "run", "one_shot", one_shot__reference=str(tmp_path / "other"))
    score(setup.trace, setup.teacher, tmp_path / "bare", dtype="float64", signals=("sampled",))
    with pytest.raises(InputError, match="holds no states"):
        run_of(setup, tmp_path / "run", "one_shot", one_shot__reference=str(tmp_path / "bare"))


def test_every_rank_measures_the_same_lengths() -> None:
    left, right = StepSums(effective=[3, 4], overlap=0.25), StepSums(effective=[5], overlap=0.5)
    both = StepSums.plus([left, right, StepSums()])
    assert both.effective == [3, 4, 5] and both.overlap == 0.75 and both.teacher_gap is None


def test_metrics_without_a_recipe_measure_nothing_more(setup: Setup, tmp_path: Path) -> None:
    seen: list[StepMetrics] = []
    train(setup.config(output=str(tmp_path), steps=1), on_step=seen.append)
    assert seen[0].measured == {} and isinstance(setup.episodes[0], Episode)
