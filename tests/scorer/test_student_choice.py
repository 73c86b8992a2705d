"""`topk` at the student's choice of ids: the student's best, the teacher's values, and the tail of all others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_scorer import (
    SIZE,
    growing_episode,
    memory_episode,
    metadata_for,
    oracle,
    save_model,
    sibling,
    tiny_model,
    write_trace,
)

from memopd_scorer.attention import states_at_rows
from memopd_scorer.choosing import chosen_ids
from memopd_scorer.head import head_of
from memopd_scorer.plan import plan, plan_states
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.teacher import load
from memopd_scorer.views import iter_states
from memopd_trace import read, validate, write
from memopd_trace.cli import run
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode
from memopd_trace.record.fingerprint import weights_digest

K = 7


def episodes() -> list[Episode]:
    rng = np.random.default_rng(1)
    rollout = memory_episode(rng, "m", group="g")
    return [rollout, sibling(rollout, "n"), growing_episode(rng, "grow")]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(teacher folder, trace)."""
    folder = tmp_path_factory.mktemp("toy")
    model = tiny_model("llama", seed=3)
    teacher = save_model(model, folder / "teacher")
    return teacher, write_trace(folder / "trace.parquet", teacher, model, episodes())


@pytest.fixture(scope="module", params=["llama", "mamba"])
def student(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that is exact in a tree, and one that is exact only alone."""
    kind = request.param
    return save_model(tiny_model(kind, seed=11), tmp_path_factory.mktemp("student") / kind)


def test_the_ids_are_the_students_and_the_values_the_teachers(
    toy: tuple[Path, Path], student: Path, tmp_path: Path
) -> None:
    teacher, trace = toy
    result = score(trace, teacher, tmp_path / "s", signals=("topk",), topk=K, student=student, max_tokens=100)
    assert result.plan.executed_tokens < result.plan.logical_tokens and result.plan.layout == "tree"
    reader, models = ScoresReader(tmp_path / "s"), [load(m).model for m in (student, teacher)]
    alone = [oracle(model, list(read(trace).iter_episodes())) for model in models]
    seen = rising = 0
    for (pack, theirs_RD), (_, ours_RD) in zip(*alone, strict=True):
        row = reader.get(pack.states[0].episode_id, pack.states[0].invocation_index)
        assert row is not None and row.topk_ids is not None
        rows = torch.from_numpy(pack.target_row_M).long()
        theirs = head_of(models[0], SIZE).logits(theirs_RD)[rows].double().log_softmax(-1).detach()
        ours = head_of(models[1], SIZE).logits(ours_RD)[rows].double().log_softmax(-1).detach()
        ids = theirs.topk(K, dim=-1).indices
        np.testing.assert_array_equal(row.topk_ids, ids)
        np.testing.assert_allclose(row.topk_logprobs, ours.gather(1, ids), atol=1e-5)
        tail = ours.scatter(1, ids, -torch.inf).logsumexp(-1)
        np.testing.assert_allclose(row.tail_logprob, tail, atol=1e-5)
        seen, rising = seen + len(rows), rising + int((ours.gather(1, ids).diff() > 0).any(1).sum())
    assert seen == result.plan.targets and rising > seen / 2, "the teacher would have chosen nearly the same"
    report = validate(trace, scores=tmp_path / "s")
    assert report.clean, report.to_text()
    ran = {r.code: r.status for r in report.rules}
    assert ran["E-SCORES-TOPK-MASS"] == ran["E-SCORES-TARGET"] == ran["E-SCORES-META"] == "pass"
    assert ran["E-SCORES-TOPK-ORDER"] == "not run"


def test_a_student_alone_and_in_a_tree_chooses_the_same(toy: tuple[Path, Path]) -> None:
    model = load(toy[0])
    only_alone = replace(model, capability=replace(model.capability, layout="single"))
    (pack,) = plan(episodes())
    assert np.bincount(pack.target_row_M).max() > 1, "no row is shared by states"
    alone = chosen_ids(only_alone, pack, K)
    assert torch.equal(alone, chosen_ids(model, pack, K)) and alone.shape == (len(pack.target_ids_M), K)
    assert torch.equal(alone, chosen_ids(model, pack, K, pass_tokens=20))


@torch.no_grad()
def test_under_a_view_the_student_still_chooses_where_it_sampled(
    toy: tuple[Path, Path], student: Path, tmp_path: Path
) -> None:
    """The teacher reads the flattened history, and is asked about the ids of a student that did not."""
    view = "persistent-history"
    score(toy[1], toy[0], tmp_path / "s", signals=("topk",), topk=K, student=student, view=view, max_tokens=150)
    reader, theirs_model, ours_model = ScoresReader(tmp_path / "s"), load(student).model, load(toy[0]).model
    theirs = {}
    for pack, hidden_RD in oracle(theirs_model, list(read(toy[1]).iter_episodes())):
        logits = head_of(theirs_model, SIZE).logits(hidden_RD)[torch.from_numpy(pack.target_row_M).long()]
        theirs[pack.states[0].key] = logits.topk(K, dim=-1).indices
    moved = seen = 0
    for pack in plan_states(iter_states(read(toy[1]), view, None, vocabulary=SIZE), layout="single"):
        (state,), rows = pack.states, torch.from_numpy(pack.target_row_M).long()
        hidden_RD = states_at_rows(ours_model, pack, backend="native")
        ours = head_of(ours_model, SIZE).logits(hidden_RD)[rows].double().log_softmax(-1)
        row, ids = reader.get(*state.key), theirs[state.key]
        assert row is not None
        np.testing.assert_array_equal(row.topk_ids, ids)
        np.testing.assert_allclose(row.topk_logprobs, ours.gather(1, ids), atol=1e-5)
        np.testing.assert_allclose(row.tail_logprob, ours.scatter(1, ids, -torch.inf).logsumexp(-1), atol=1e-5)
        under = states_at_rows(theirs_model, pack, backend="native")
        moved += not torch.equal(head_of(theirs_model, SIZE).logits(under)[rows].topk(K, dim=-1).indices, ids)
        seen += 1
    assert seen == len(theirs) == 9 and moved, "under the view the student would have chosen the same"
    assert validate(toy[1], scores=tmp_path / "s").clean


def test_the_metadata_names_the_student(toy: tuple[Path, Path], student: Path, tmp_path: Path) -> None:
    score(toy[1], toy[0], tmp_path / "s", signals=("topk",), topk=K, student=student)
    metadata = ScoresReader(tmp_path / "s").metadata
    assert metadata.topk_source == "student" and metadata.student is not None
    assert metadata.student.weights_digest == weights_digest(load(student).model)
    assert (metadata.student.name, metadata.student.dtype) == (student.name, "float32")
    score(toy[1], toy[0], tmp_path / "t", signals=("topk",), topk=K)
    assert ScoresReader(tmp_path / "t").metadata.student is None


def test_another_student_or_none_is_another_run(toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    students = [save_model(tiny_model("llama", seed=s), tmp_path / "students" / str(s) / "student") for s in (5, 6)]
    score(trace, teacher, tmp_path / "s", signals=("topk",), topk=K, student=students[0])
    again = score(trace, teacher, tmp_path / "s", signals=("topk",), topk=K, student=students[0])
    assert again.shards_scored == 0
    with pytest.raises(InputError, match=r"E-SCORES-OTHER-RUN.*student\.weights_digest"):
        score(trace, teacher, tmp_path / "s", signals=("topk",), topk=K, student=students[1])
    with pytest.raises(InputError, match=r"E-SCORES-OTHER-RUN.*topk_source is 'student' there and 'teacher' now"):
        score(trace, teacher, tmp_path / "s", signals=("topk",), topk=K)


def test_a_student_of_another_tokenizer_is_refused(toy: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_model(tiny_model("llama", seed=3), tmp_path / "other", words="x")
    with pytest.raises(InputError, match=r"E-TOKENIZER-MISMATCH.*'other'"):
        score(toy[1], toy[0], tmp_path / "s", signals=("topk",), student=other)
    assert not (tmp_path / "s").exists()


def test_a_student_that_is_not_to_be_asked_is_a_usage_error(toy: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without the signal topk"):
        score(toy[1], toy[0], tmp_path / "s", student=toy[0])


def test_a_students_logit_that_is_not_finite_is_told_of_the_student(toy: tuple[Path, Path], tmp_path: Path) -> None:
    model = tiny_model("llama", seed=5)
    student = load(save_model(model, tmp_path / "student"))
    with torch.no_grad():
        student.model.get_output_embeddings().weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"E-NONFINITE.*a logit of the student 'student' is not finite"):
        score(toy[1], toy[0], tmp_path / "s", signals=("topk",), student=student)


def test_on_the_command_line(toy: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student = save_model(tiny_model("llama", seed=5), tmp_path / "student")
    command = ["score", str(toy[1]), "--teacher", str(toy[0]), "-o", str(tmp_path / "s"), "--topk-of", str(student)]
    assert run(command) == 2
    assert "without the signal topk" in capsys.readouterr().err
    assert run([*command, "--signal", "sampled,topk", "--topk", "3", "--format", "json"]) == 0
    assert "state_kl_mean" not in json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "s" / "run.json").read_text())["student"]["name"] == "student"


def test_a_padded_student_and_a_padded_teacher_share_the_tokenizers_ids(tmp_path: Path) -> None:
    """Their heads differ in width; what is chosen are real ids."""
    teacher = save_model(tiny_model("llama", seed=1), tmp_path / "teacher")
    wide = tiny_model("llama", seed=2, vocab_size=160)
    with torch.no_grad():
        wide.get_output_embeddings().weight[SIZE:] *= 50  # ids that no tokenizer knows, and the student likes best
    student = save_model(wide, tmp_path / "student")
    write(tmp_path / "t.parquet", metadata_for(teacher), [i for e in episodes() for i in e])
    score(tmp_path / "t.parquet", teacher, tmp_path / "s", signals=("topk",), topk=K, student=student)
    row = ScoresReader(tmp_path / "s").get("m", 0)
    assert row is not None and row.topk_ids is not None and row.topk_ids.max() < SIZE
