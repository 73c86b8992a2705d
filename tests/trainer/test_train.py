"""The trainer's invariants, on tiny models: exact in float64, bit for bit where it says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_scorer import SIZE, metadata_for, save_model, tiny_model
from helpers_trainer import Setup, equal_weights, exact, make_setup, rewarded_groups, with_behaviour
from torch import Tensor
from transformers import PreTrainedModel

from memopd_scorer.plan import LAYOUTS, Pack
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.teacher import LoadedModel, load, load_model
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode, Invocation, Sampling
from memopd_trace.storage import write
from memopd_trainer import evaluate_kl, train
from memopd_trainer.advantages import group_advantages, trained_mask
from memopd_trainer.batch import load_rollouts
from memopd_trainer.config import TrainConfig
from memopd_trainer.metrics import StepMetrics, StepSums
from memopd_trainer.objective import make_teacher, pack_loss
from memopd_trainer.packs import make_packs

Gradients = dict[str, Tensor]


def whole_loss(
    config: TrainConfig, layout: str, max_tokens: int = 8192, *, student: LoadedModel | None = None
) -> tuple[float, Gradients, StepMetrics]:
    """Loss and gradients of one step over all groups, by the code under test; the default student is `exact`."""
    rollouts = load_rollouts(config.trace, config.scores, policy=config.ppo.weight > 0)
    advantages = group_advantages(rollouts.groups).by_episode if config.ppo.weight else {}
    student = student or exact(config.student)
    assert student.layout(layout) == layout and rollouts.scores is not None
    sums, teacher = StepSums(), make_teacher(rollouts, config, student.head.weight_VD.device)
    for p in make_packs(rollouts, rollouts.groups, advantages, layout=layout, max_tokens=max_tokens):
        pack_loss(student, teacher, p, config, sums).backward()
    metrics = sums.finish(step=1, grad_norm=0.0, lr=0.0, seconds=0.0)
    return sums.loss, {n: p.grad for n, p in student.model.named_parameters() if p.grad is not None}, metrics


def reference_loss(config: TrainConfig, groups: list[list[Episode]]) -> tuple[float, Gradients]:
    """The same from the formulas: each invocation alone through the plain model, token by token."""
    model = exact(config.student).model
    assert config.scores is not None
    scores = ScoresReader(Path(config.scores))
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        mean = sum(e.episode_return or 0.0 for e in group) / len(group)
        for episode in group:
            tokens = sum(int(trained_mask(i).sum()) for i in episode)
            for i in episode:
                logits = model(torch.from_numpy(i.sequence_ids.astype(np.int64))[None]).logits[0, :, :SIZE]
                row = scores.get(*i.key)
                assert row is not None and row.hidden is not None and i.output_logprobs is not None
                for m in np.flatnonzero(trained_mask(i)):
                    p = logits[len(i.prompt_ids) + m - 1].softmax(0)
                    at = row.output_index.tolist().index(m)
                    q = scores.head().logits(row.hidden[at : at + 1])[0].softmax(0)
                    ratio = p[int(i.output_ids[m])] / np.exp(np.float64(i.output_logprobs[m]))
                    a = (episode.episode_return or 0.0) - mean
                    ppo = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
                    term = config.ppo.weight * ppo + config.divergence.weight * (p * (p / q).log()).sum()
                    total = total + term / (len(groups) * len(group) * tokens)
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_close(a: Gradients, b: Gradients, tolerance: float = 1e-8) -> None:
    assert a.keys() == b.keys() and len(a) > 10
    for name, left in a.items():
        scale = float(b[name].abs().max())
        assert scale > 0 and float((left - b[name]).abs().max()) <= tolerance * scale, name


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Two groups of two memory-rewriting rollouts; one token forced, one masked out, one attempt rejected."""
    episodes = [list(e) for e in rewarded_groups()]
    episodes[0][0] = episodes[0][0].replace(output_sampled=[True, True, False, True, True, True])
    episodes[1][0] = episodes[1][0].replace(output_loss_mask=[False, True, True, True, True, True])
    episodes[2][1] = episodes[2][1].replace(accepted=False)
    made = [Episode(e[0].episode_id, tuple(e)) for e in episodes]
    return make_setup(tmp_path_factory.mktemp("train"), made)


@pytest.mark.parametrize("max_tokens", [60, 8192])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_equal_the_formulas_in_every_layout(setup: Setup, layout: str, max_tokens: int) -> None:
    config = setup.config(divergence__weight=0.7, ppo__weight=1.3)
    loss, gradients, metrics = whole_loss(config, layout, max_tokens)
    expected, references = reference_loss(config, [setup.episodes[:2], setup.episodes[2:]])
    assert loss == pytest.approx(expected, rel=1e-8) and abs(expected) > 0.1
    assert_close(gradients, references)
    # what this test must have seen: sharing, clipping on one side, ratios away from 1, and all kinds of masks
    assert (metrics.executed_tokens < metrics.logical_tokens) == (layout == "tree")
    assert metrics.clip_fraction and 0 < metrics.clip_fraction < 1
    assert metrics.ratio_min and metrics.ratio_max and metrics.ratio_min < 0.8 and metrics.ratio_max > 1.2
    assert metrics.trained_tokens == 48 - 1 - 1 - 6


# torch's grouped product of experts has no float64, so a mixture is not among them
@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "gpt2"])
def test_other_architectures_equal_the_formulas_on_the_tree(tmp_path: Path, kind: str) -> None:
    setup = make_setup(tmp_path, rewarded_groups(groups=1), kind=kind)
    config = setup.config()
    loss, gradients, metrics = whole_loss(config, "tree")
    expected, references = reference_loss(config, [setup.episodes])
    assert metrics.executed_tokens < metrics.logical_tokens
    assert loss == pytest.approx(expected, rel=1e-8) and abs(expected) > 0.1
    assert_close(gradients, references)


@pytest.mark.parametrize("behaviour", ["raw", "tempered", "processed"])
def test_with_lr_0_and_unmoved_weights_every_ratio_is_1_and_the_divergence_stays(
    tmp_path: Path, behaviour: str
) -> None:
    setup = make_setup(tmp_path, noise=0.0, behaviour=behaviour)
    seen: list[StepMetrics] = []
    result = train(setup.config(lr=0.0, weight_decay=0.1, steps=3), on_step=seen.append)
    assert equal_weights(setup.student, result.checkpoint)
    for step in seen:
        # the recorded log-probabilities are float32: 1e-5 is what the scorer promises there
        assert step.ratio_min == pytest.approx(1.0, abs=1e-5) and step.ratio_max == pytest.approx(1.0, abs=1e-5)
        assert step.clip_fraction == 0.0 and step.divergence == seen[0].divergence
        assert step.divergence is not None and step.divergence > 0.01 and step.grad_norm > 0.01


class Watched(LoadedModel):
    """A student that keeps the states of each pack, with their gradient."""

    kept: list[tuple[Pack, Tensor]]

    def states(self, pack: Pack) -> Tensor:
        hidden = super().states(pack)
        hidden.retain_grad()
        self.kept.append((pack, hidden))
        return hidden


def test_masked_tokens_have_exactly_zero_gradient(setup: Setup) -> None:
    config = setup.config()
    rollouts = load_rollouts(config.trace, config.scores, policy=True)
    advantages = group_advantages(rollouts.groups).by_episode
    plain = load(setup.student, dtype="float64")
    fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    student = Watched(**fields)
    object.__setattr__(student, "kept", [])
    assert rollouts.scores is not None
    for p in make_packs(rollouts, rollouts.groups, advantages):
        pack_loss(student, make_teacher(rollouts, config, torch.device("cpu")), p, config, StepSums()).backward()
    by_key = {i.key: i for e in setup.episodes for i in e}
    trained, untrained = set(), set()
    ((pack, hidden),) = student.kept
    for m, state in enumerate(pack.states[s] for s in pack.target_state_M):
        mask = trained_mask(by_key[state.episode_id, state.invocation_index])
        (trained if mask[pack.target_output_M[m]] else untrained).add(int(pack.target_row_M[m]))
    assert hidden.grad is not None
    only_masked = sorted(untrained - trained)
    assert only_masked and all(hidden.grad[r].any() for r in trained)
    assert not hidden.grad[only_masked].any()
    assert ("g1e0", 1) not in {(s.episode_id, s.invocation_index) for s in pack.states}


def test_a_teacher_that_is_the_student_gives_no_loss_and_no_gradient(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, noise=0.0, same_teacher=True)
    same = load(setup.student, dtype="float64")
    loss, gradients, metrics = whole_loss(setup.config(ppo__weight=0.0), "tree", student=same)
    assert metrics.trained_tokens == 48 and metrics.ppo is None
    assert abs(loss) <= 1e-12 and max(float(g.abs().max()) for g in gradients.values()) <= 1e-12
    _, real, _ = whole_loss(setup.config(), "tree")
    assert max(float(g.abs().max()) for g in real.values()) > 1e-3, "the policy term alone does give one"
    kl = evaluate_kl(setup.student, setup.trace, setup.scores, dtype="float64")
    assert abs(kl["reverse_kl"]) <= 1e-12 and abs(kl["forward_kl"]) <= 1e-12 and kl["tokens"] == 48


def test_four_episodes_are_overfitted(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, dtype="float32")
    held_out = {"trace": str(setup.trace), "scores": str(setup.scores)}
    result = train(setup.config(steps=60, lr=1e-2, ppo__weight=0.0, grad_clip=10.0, held_out=held_out))
    assert result.episodes == 4 and result.held_out_before is not None and result.held_out_after is not None
    assert result.held_out_before["reverse_kl"] > 0.5
    assert result.held_out_after["reverse_kl"] <= result.held_out_before["reverse_kl"] / 10


def test_the_policy_term_alone_makes_rewarded_outputs_likelier_than_their_group(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, noise=0.0, dtype="float32")
    result = train(setup.config(steps=3, lr=1e-3, divergence__weight=0.0, scores=None))
    assert result.first is not None and result.first.divergence is None

    def gaps(folder: Path) -> list[float]:
        model = load_model(folder)
        logprobs = {}
        for e in with_behaviour(model, setup.episodes):
            logprobs[e.episode_id] = sum(float(np.sum(i.output_logprobs)) for i in e)
        return [logprobs[f"g{g}e0"] - logprobs[f"g{g}e1"] for g in (0, 1)]

    assert all(after > before + 0.1 for before, after in zip(gaps(setup.student), gaps(result.checkpoint), strict=True))


def test_an_episode_cut_into_more_invocations_trains_the_same(tmp_path: Path) -> None:
    """One call that samples 12 tokens, or three that each go on where the last one ended."""

    def build(pieces: list[int]) -> list[Episode]:
        rng = np.random.default_rng(3)
        made = []
        for name, reward in (("a", 1.0), ("b", 0.0)):
            prompt, output = rng.integers(3, SIZE, 15), rng.integers(3, SIZE, 12)
            rows, at = [], 0
            for index, length in enumerate(pieces if name == "a" else [12]):
                rows.append(
                    Invocation(
                        episode_id=name,
                        invocation_index=index,
                        model_id="m",
                        prompt_ids=np.r_[prompt, output[:at]],
                        output_ids=output[at : at + length],
                        parent_index=index - 1 if index else None,
                        relation="extend" if index else "root",
                        group_id="g",
                        token_source="engine",
                    )
                )
                at += length
            rows[-1] = rows[-1].replace(reward=reward, terminated=True)
            made.append(Episode(name, tuple(rows)))
        return made

    results = {}
    for number, pieces in enumerate(([12], [3, 4, 5])):
        (tmp_path / str(number)).mkdir()
        setup = make_setup(tmp_path / str(number), build(pieces))
        assert len(setup.episodes[0]) == len(pieces)
        results[number] = whole_loss(setup.config(), "tree")
    (whole, gradients, metrics), (cut, cut_gradients, cut_metrics) = results[0], results[1]
    assert cut == pytest.approx(whole, rel=1e-8) and abs(whole) > 0.1
    assert metrics.trained_tokens == cut_metrics.trained_tokens == 24
    assert cut_metrics.logical_tokens > metrics.logical_tokens
    assert_close(cut_gradients, gradients)


def test_a_branching_token_keeps_every_label_and_every_advantage(tmp_path: Path) -> None:
    """[1 2 | 4 5] with advantage +1 and [1 2 | 4 6] with -1: five tokens run, four loss terms, one state read
    by the labels 5 and 6, and the value of the unpacked sum, also when behaviour log-probabilities differ."""
    episodes = [
        Episode(name, (branch(name, [4, last], reward),)) for name, last, reward in (("r1", 5, 2.0), ("r2", 6, 0.0))
    ]
    setup = make_setup(tmp_path, episodes, noise=0.05)
    shifted = [i.replace(output_logprobs=i.output_logprobs - 0.3) for i in setup.episodes[1]]
    rows = [*setup.episodes[0], *shifted]
    write(tmp_path / "other.parquet", metadata_for(setup.student), rows)
    for trace, groups in (
        (setup.trace, [setup.episodes]),
        (tmp_path / "other.parquet", [[setup.episodes[0], Episode("r2", tuple(shifted))]]),
    ):
        config = setup.config(trace=str(trace))
        rollouts = load_rollouts(trace, setup.scores, policy=True)
        advantages = group_advantages(rollouts.groups).by_episode
        assert advantages == {"r1": 1.0, "r2": -1.0}
        (p,) = make_packs(rollouts, rollouts.groups, advantages)
        assert p.pack.token_ids_T.tolist() == [1, 2, 4, 5, 6] and p.ids_M.tolist() == [4, 5, 4, 6]
        assert p.row_M.tolist() == [0, 1, 0, 1] and p.advantage_M.tolist() == [1.0, 1.0, -1.0, -1.0]
        loss, gradients, metrics = whole_loss(config, "tree")
        expected, references = reference_loss(config, groups)
        assert metrics.trained_tokens == 4 and loss == pytest.approx(expected, rel=1e-8)
        assert_close(gradients, references)


def branch(name: str, output: list[int], reward: float) -> Invocation:
    return Invocation(
        episode_id=name,
        invocation_index=0,
        model_id="m",
        prompt_ids=[1, 2],
        output_ids=output,
        relation="root",
        group_id="g",
        token_source="engine",
        reward=reward,
        terminated=True,
    )


def test_recorded_positions_and_eviction_are_trained_in_their_own_state(tmp_path: Path) -> None:
    """Positions that start at 5 and two tokens that later ones do not see: the tree gives other numbers than
    the plain state, and the same as the pack of that state alone."""
    episodes = rewarded_groups(groups=1)
    first = episodes[0].invocations[0]
    n = len(first)
    until = np.full(n, n, np.int32)
    until[3:5] = n - 4
    special = first.replace(position_ids=np.arange(5, n + 5), visible_until=until)
    made = [Episode("g0e0", (special, *episodes[0].invocations[1:])), episodes[1]]
    losses = {}
    for name, rollouts in (("special", made), ("plain", episodes)):
        (tmp_path / name).mkdir()
        setup = make_setup(tmp_path / name, rollouts, features=("visibility",))
        losses[name] = [whole_loss(setup.config(), layout) for layout in ("tree", "single")]
    (tree, gradients, metrics), (single, single_gradients, _) = losses["special"]
    assert metrics.executed_tokens < metrics.logical_tokens and tree == pytest.approx(single, rel=1e-8)
    assert_close(gradients, single_gradients)
    assert abs(tree - losses["plain"][0][0]) > 1e-4


def test_students_that_cannot_be_trained_on_this_trace_are_refused(setup: Setup, tmp_path: Path) -> None:
    other = save_model(tiny_model("llama", seed=2), tmp_path / "other", words="v")
    with pytest.raises(InputError, match="E-TOKENIZER-MISMATCH"):
        train(setup.config(student=str(other), output=str(tmp_path / "run")))
    with pytest.raises(UsageError, match="quantised"):
        train(setup.config(student="model.gguf", output=str(tmp_path / "run")))
    with pytest.raises(InputError, match="E-MODEL-LOAD"):
        train(setup.config(student=str(tmp_path / "nowhere"), output=str(tmp_path / "run")))
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_recurrent_student_is_trained_one_invocation_at_a_time(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, kind="mamba", dtype="float32")
    result = train(setup.config(steps=1))
    assert result.layout == "single" and result.layout_reason != "packed equals alone"
    assert result.last is not None and result.last.executed_tokens == result.last.logical_tokens == 248
    assert not equal_weights(setup.student, result.checkpoint)


def test_a_lone_episode_has_no_advantage_and_is_counted(tmp_path: Path) -> None:
    episodes = rewarded_groups(groups=2)[:3]
    setup = make_setup(tmp_path, episodes)
    assert train(setup.config(steps=1)).episodes_alone == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", ["forced", "rejected"])
def test_a_group_without_any_trained_token_trains_nothing(tmp_path: Path, layout: str, fault: str) -> None:
    """A step of that group alone has no loss and no gradient; a step with another one trains that."""
    episodes = rewarded_groups(groups=2)
    changes = {"forced": {"output_sampled": [False] * 6}, "rejected": {"accepted": False}}[fault]
    untrained = [Episode(e.episode_id, (e.invocations[0].replace(**changes),)) for e in episodes[:2]]
    setup = make_setup(tmp_path, [*untrained, *episodes[2:]])
    seen: list[StepMetrics] = []
    train(setup.config(steps=2, groups_per_step=1, layout=layout), on_step=seen.append)
    assert sorted((m.trained_tokens, m.loss != 0, m.grad_norm > 0) for m in seen) == [
        (0, False, False),
        (24, True, True),
    ]
    both = train(setup.config(steps=1, output=str(tmp_path / "both"), layout=layout))
    assert both.last is not None and both.last.trained_tokens == 24


def test_held_out_divergence_equals_the_formulas(setup: Setup) -> None:
    student = exact(setup.student)
    measured = evaluate_kl(student, setup.trace, setup.scores, max_tokens=60)
    reverse, forward, count = dense_kl(student.model, setup)
    assert measured["tokens"] == count == 40
    assert measured["reverse_kl"] == pytest.approx(reverse, rel=1e-8)
    assert measured["forward_kl"] == pytest.approx(forward, rel=1e-8)
    assert abs(reverse - forward) > 1e-3, "the directions differ, so they cannot be confused"
    student.model.train()
    with pytest.raises(UsageError, match="training mode"):
        evaluate_kl(student, setup.trace, setup.scores)


@torch.no_grad()
def dense_kl(model: PreTrainedModel, setup: Setup) -> tuple[float, float, int]:
    scores = ScoresReader(setup.scores)
    reverse, forward = [], []
    for i in (i for e in setup.episodes for i in e if trained_mask(i).any()):
        logits = model(torch.from_numpy(i.sequence_ids.astype(np.int64))[None]).logits[0, :, :SIZE]
        row = scores.get(*i.key)
        assert row is not None and row.hidden is not None
        for m in np.flatnonzero(trained_mask(i)):
            p = logits[len(i.prompt_ids) + m - 1].softmax(0)
            q = (row.hidden[row.output_index.tolist().index(m)] @ scores.head().weight_VD[:SIZE].T).softmax(0)
            reverse.append(float((p * (p / q).log()).sum()))
            forward.append(float((q * (q / p).log()).sum()))
    return float(np.mean(reverse)), float(np.mean(forward)), len(reverse)


def test_training_lowers_the_divergence_on_rollouts_that_were_not_trained_on(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, dtype="float32")
    fresh = with_behaviour(load_model(setup.student), rewarded_groups(seed=5))
    write(tmp_path / "fresh.parquet", metadata_for(setup.student), [i for e in fresh for i in e])
    score(tmp_path / "fresh.parquet", setup.teacher, tmp_path / "fresh")
    held_out = {"trace": str(tmp_path / "fresh.parquet"), "scores": str(tmp_path / "fresh")}
    result = train(setup.config(steps=10, lr=3e-3, held_out=held_out))
    assert result.held_out_before is not None and result.held_out_after is not None
    assert result.held_out_after["reverse_kl"] < result.held_out_before["reverse_kl"] - 0.01


def test_sampling_settings_do_not_matter_where_raw_logprobs_are_recorded(setup: Setup, tmp_path: Path) -> None:
    hot = [i.replace(sampling=Sampling(temperature=1.5, top_p=0.5)) for e in setup.episodes for i in e]
    write(tmp_path / "hot.parquet", metadata_for(setup.student), hot)
    loss, _, _ = whole_loss(setup.config(), "tree")
    assert whole_loss(setup.config(trace=str(tmp_path / "hot.parquet")), "tree")[0] == loss
