"""Scores under another prompt: the same sampled tokens, the view's state, and no view that is not for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers_scorer import (
    SIZE,
    growing_episode,
    memory_episode,
    metadata_for,
    save_model,
    sibling,
    tiny_model,
    write_trace,
)
from helpers_scores import rewritten

from memopd_scorer.plan import Layout
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.teacher import LoadedModel, load
from memopd_scorer.views import iter_states
from memopd_trace.cli import run
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.metadata import Producer, ViewInfo, ViewsMetadata
from memopd_trace.storage import read, write
from memopd_trace.validate import validate
from memopd_trace.viewfile import View, ViewsReader, ViewsWriter
from memopd_trace.views import PERSISTENT_HISTORY, persistent_history, under_prompt, write_persistent_history
from memopd_trainer.batch import load_rollouts
from memopd_trainer.config import parse_config
from memopd_trainer.student import evaluate_kl
from memopd_trainer.train import train

HINT = np.array([50, 51, 52, 53, 54], np.int32)  # what the teacher is told and the student was not


def episodes() -> list[Episode]:
    rng = np.random.default_rng(1)
    first = memory_episode(rng, "m0", group="g")
    return [first, sibling(first, "m1"), memory_episode(rng, "m2", group="h"), growing_episode(rng, "grow", calls=3)]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(teacher folder, trace)."""
    folder = tmp_path_factory.mktemp("toy")
    model = tiny_model("llama", seed=3)
    teacher = save_model(model, folder / "teacher")
    return teacher, write_trace(folder / "trace.parquet", teacher, model, episodes())


@pytest.fixture(scope="module")
def exact(toy: tuple[Path, Path]) -> LoadedModel:
    """The same teacher, computing in float64 throughout."""
    loaded = load(toy[0], dtype="float64")
    model = tiny_model("llama", torch.float64, seed=3)
    head = replace(loaded.head, weight_VD=model.get_output_embeddings().weight)
    return replace(loaded, model=model, head=head)


def hinted(row: Invocation) -> Invocation:
    """A row after the hint, with a gap in its positions; every second row forgets the hint before its last token."""
    n = len(row) + len(HINT)
    until = np.full(n, n, np.int32)
    until[: len(HINT)] = n - 2
    return row.replace(
        prompt_ids=np.r_[HINT, row.prompt_ids],
        position_ids=np.r_[np.arange(len(HINT)), np.arange(len(HINT), n) + 3],
        visible_until=until if row.invocation_index % 2 else None,
        segments=None,
    )


def views_of(trace: Path, rows: Sequence[Invocation], view: Callable[[Invocation], Invocation] = hinted) -> list[View]:
    """Each row's view `told`, and another one of every row, which must not be taken for it."""
    return [v for r in rows for v in (View.of(r, r.replace(prompt_ids=[9]), "other"), View.of(r, view(r), "told"))]


def write_views(path: Path, trace: Path, views: Sequence[View]) -> Path:
    (model,) = read(trace).metadata.models.values()
    metadata = ViewsMetadata(
        producer=Producer(name="tests"),
        tokenizer_fingerprint=model.tokenizer.fingerprint,
        required_features=["visibility"],
        views={"told": ViewInfo(description="with a hint"), "other": ViewInfo(description="without anything")},
    )
    with ViewsWriter(path, metadata) as writer:
        for view in views:
            writer.write(view)
    return path


@pytest.fixture
def told(toy: tuple[Path, Path], tmp_path: Path) -> Path:
    """A views file: `told` and `other` of all rows but the episode m2."""
    rows = [r for r in read(toy[1]).iter_invocations() if r.episode_id != "m2"]
    return write_views(tmp_path / "views.parquet", toy[1], views_of(toy[1], rows))


def plain_logprobs(model: torch.nn.Module, viewed: Invocation) -> np.ndarray:
    """What the model alone says of a row's output, from its ids, positions and a mask written out: float64 [m]."""
    n, first = len(viewed), len(viewed.prompt_ids)
    k, q = np.arange(n)[None, :], np.arange(n)[:, None]
    until = np.full(n, n) if viewed.visible_until is None else viewed.visible_until
    mask = torch.from_numpy(np.where((k <= q) & (q < until[None, :]), 0.0, -np.inf))
    positions = np.arange(n) if viewed.position_ids is None else viewed.position_ids
    ids, places = (torch.from_numpy(a.astype(np.int64))[None] for a in (viewed.sequence_ids, positions))
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=places, attention_mask=mask[None, None]).logits[0, :, :SIZE]
    return logits[first - 1 : -1].log_softmax(-1).gather(1, ids[0, first:, None])[:, 0].numpy()


def stored_logprobs(reader: ScoresReader, row: Invocation) -> np.ndarray:
    """The log-probabilities that the stored float64 states give; the column itself, in float32, must agree."""
    found = reader.get(*row.key)
    assert found is not None and found.hidden is not None and found.hidden.dtype == torch.float64
    assert found.output_index.tolist() == list(range(len(row.output_ids)))
    logprobs = torch.cat(list(reader.logprobs(found)))
    rebuilt = logprobs.gather(1, torch.from_numpy(row.output_ids.astype(np.int64))[:, None])[:, 0].numpy()
    np.testing.assert_allclose(found.logprob, rebuilt, atol=1e-5)
    return rebuilt


def rows_of(folder: Path) -> list[dict[str, object]]:
    """Every stored row, in order, as plain data."""
    files = [folder / part["name"] for part in json.loads((folder / "manifest.json").read_text())["files"]]
    return [row for file in files for row in pq.read_table(file).to_pylist()]


@pytest.mark.parametrize("layout", ["tree", "packed", "single"])
@pytest.mark.parametrize("view", [PERSISTENT_HISTORY, "told"])
def test_scores_under_a_view_are_the_plain_models_on_that_prompt(
    view: str, layout: Layout, toy: tuple[Path, Path], exact: LoadedModel, told: Path, tmp_path: Path
) -> None:
    views = told if view == "told" else None
    result = score(toy[1], exact, tmp_path / "s", layout=layout, max_tokens=150, view=view, views=views)
    assert result.plan.packs > 1
    assert (result.plan.sharing > 1.2) == (layout == "tree"), "the tree shared prefixes"
    reader, targets = ScoresReader(tmp_path / "s"), 0
    assert reader.metadata.view == view
    for episode in read(toy[1]).iter_episodes():
        for row, flat in zip(episode, persistent_history(episode), strict=True):
            viewed = hinted(row) if view == "told" else under_prompt(row, flat)
            if view == "told" and row.episode_id == "m2":
                assert reader.get(*row.key) is None, "a row without the view is not scored"
                continue
            expected = plain_logprobs(exact.model, viewed)
            np.testing.assert_allclose(stored_logprobs(reader, row), expected, rtol=0, atol=1e-10)
            if len(viewed) != len(row):
                assert np.abs(expected - plain_logprobs(exact.model, row)).max() > 1e-2, "the prompt matters"
            targets += len(expected)
    assert targets == result.plan.targets > 40


def test_rows_name_the_state_that_was_sampled_and_the_one_that_was_run(
    toy: tuple[Path, Path], told: Path, tmp_path: Path
) -> None:
    score(toy[1], toy[0], tmp_path / "s", signals=("sampled",), view="told", views=told)
    recorded = {i.key: i for i in read(toy[1]).iter_invocations()}
    rows = rows_of(tmp_path / "s")
    assert len(rows) == len(recorded) - 4
    for row in rows:
        invocation = recorded[row["episode_id"], row["invocation_index"]]  # type: ignore[index]
        assert row["view"] == "told"
        assert row["state_digest"] == invocation.compute_digest()
        assert row["view_digest"] == hinted(invocation).compute_digest() != row["state_digest"]
    score(toy[1], toy[0], tmp_path / "r", signals=("sampled",))
    assert all(row.get("view_digest") is None for row in rows_of(tmp_path / "r"))


@pytest.mark.parametrize("view", [PERSISTENT_HISTORY, "told"])
def test_the_validator_has_nothing_against_them(view: str, toy: tuple[Path, Path], told: Path, tmp_path: Path) -> None:
    if view == PERSISTENT_HISTORY:
        score(toy[1], toy[0], tmp_path / "s", signals=("topk", "hidden"), topk=4, view=view)  # builds it, and
        told = tmp_path / "flat.parquet"
        write_persistent_history(toy[1], told)  # this is the same
    else:
        score(toy[1], toy[0], tmp_path / "s", signals=("topk", "hidden"), topk=4, view=view, views=told)
    report = validate(toy[1], views=told, scores=tmp_path / "s")
    assert report.clean, report.to_text()
    status = {rule.code: rule.status for rule in report.rules}
    looked_at = ("E-VIEW-STATE", "E-VIEW-DIGEST", "E-SCORES-VIEW", "E-SCORES-MISSING", "E-SCORES-CHECK")
    assert [status[code] for code in looked_at] == ["pass"] * 5


def test_a_history_that_was_never_rewritten_is_the_recorded_one(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=3)
    teacher = save_model(model, tmp_path / "teacher")
    whole = growing_episode(np.random.default_rng(0), "grow", calls=5)
    append_only = Episode("grow", whole.invocations[:-1])  # the last one forks
    trace = write_trace(tmp_path / "t.parquet", teacher, model, [append_only])
    for name, view in (("r", "recorded"), ("f", PERSISTENT_HISTORY)):
        assert score(trace, teacher, tmp_path / name, view=view).plan.sharing > 1.5
    recorded, flat = rows_of(tmp_path / "r"), rows_of(tmp_path / "f")
    assert len(recorded) == 4
    for mine, theirs in zip(recorded, flat, strict=True):
        assert theirs.pop("view_digest") == theirs["state_digest"]
        assert theirs == {**mine, "view": PERSISTENT_HISTORY}, "bit for bit"


def test_it_is_continued_and_not_mixed_with_another_view(toy: tuple[Path, Path], told: Path, tmp_path: Path) -> None:
    options = {"signals": ("sampled",), "max_tokens": 60, "shard_bytes": 100}
    out = tmp_path / "s"
    first = score(toy[1], toy[0], out, view="told", views=told, **options)  # type: ignore[arg-type]
    before = rows_of(out)
    again = score(toy[1], toy[0], out, view="told", views=told, **options)  # type: ignore[arg-type]
    assert first.shards_scored == first.shards > 2 and again.shards_scored == 0
    sorted(out.glob("shard-*"))[1].unlink()
    assert score(toy[1], toy[0], out, view="told", views=told, **options).shards_scored == 1  # type: ignore[arg-type]
    assert rows_of(out) == before
    for view, views in (("recorded", None), (PERSISTENT_HISTORY, None), ("other", told)):
        with pytest.raises(InputError, match=f"E-SCORES-OTHER-RUN.*view is 'told' there and '{view}' now"):
            score(toy[1], toy[0], out, view=view, views=views, **options)  # type: ignore[arg-type]
    rows = list(read(toy[1]).iter_invocations())
    changed = views_of(toy[1], rows[:6], lambda r: r.replace(prompt_ids=np.r_[60, r.prompt_ids]))
    write_views(tmp_path / "changed.parquet", toy[1], changed)
    with pytest.raises(InputError, match=r"E-SCORES-OTHER-RUN.*plan_digest"):
        score(toy[1], toy[0], out, view="told", views=tmp_path / "changed.parquet", **options)  # type: ignore[arg-type]


def _state(view: View) -> View:
    return replace(view, state_digest=bytes(32))


def _stranger(view: View) -> View:
    return replace(view, episode_id="nobody")


def _far_id(view: View) -> View:
    return replace(view, prompt_ids=np.r_[view.prompt_ids[:-1], 104], view_digest=None)


def _short(view: View) -> View:
    return replace(view, position_ids=[0, 1], view_digest=None)


@pytest.mark.parametrize(
    ("change", "code"),
    [(_state, "E-VIEW-STATE"), (_stranger, "E-VIEW-ROW"), (_far_id, "E-VIEW-ID-RANGE"), (_short, "E-VIEW-LENGTH")],
)
def test_a_view_that_is_not_for_these_tokens_is_refused_by_its_code(
    change: Callable[[View], View],
    code: str,
    toy: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    views = views_of(toy[1], list(read(toy[1]).iter_invocations()))
    views[5] = change(views[5])
    file = write_views(tmp_path / "v.parquet", toy[1], views)
    command = ["score", str(toy[1]), "--teacher", str(toy[0]), "-o", str(tmp_path / "s")]
    assert run([*command, "--view", "told", "--views", str(file)]) == 3
    captured = capsys.readouterr()
    assert f"[{code}]" in captured.err and captured.err.count("\n") == 1
    assert captured.out == "" and not (tmp_path / "s").exists()


@pytest.mark.parametrize("change", [_state, _stranger])
def test_a_views_file_that_changes_after_it_was_checked_is_refused_as_well(
    change: Callable[[View], View], toy: tuple[Path, Path], tmp_path: Path
) -> None:
    views = views_of(toy[1], list(read(toy[1]).iter_invocations()))
    views[5] = change(views[5])
    file = write_views(tmp_path / "v.parquet", toy[1], views)
    with pytest.raises(InputError, match="E-VIEW-STATE" if change is _state else "E-VIEW-ROW"):
        list(iter_states(read(toy[1]), "told", ViewsReader(file)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"view": "told"}, "of which file"),
        ({"view": "untold", "views": True}, "no view 'untold'.*told, other"),
        ({"view": "recorded", "views": True}, "no view 'recorded'"),
    ],
)
def test_a_view_without_a_file_or_a_name_is_a_fault_of_the_call(
    options: dict[str, object], said: str, toy: tuple[Path, Path], told: Path, tmp_path: Path
) -> None:
    if options.get("views"):
        options = {**options, "views": told}
    with pytest.raises(UsageError, match=said):
        score(toy[1], toy[0], tmp_path / "s", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_the_command_line_scores_under_a_view(
    toy: tuple[Path, Path], told: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["score", str(toy[1]), "--teacher", str(toy[0]), "--signal", "sampled", "--format", "json", "-o"]
    assert run([*command, str(tmp_path / "a"), "--view", "persistent-history"]) == 0
    assert json.loads(capsys.readouterr().out)["view"] == "persistent-history"
    assert run([*command, str(tmp_path / "b"), "--view", "told", "--views", str(told)]) == 0
    assert json.loads(capsys.readouterr().out)["invocations"] == 8
    assert run([*command, str(tmp_path / "b"), "--view", "persistent-history"]) == 3
    assert "E-SCORES-OTHER-RUN" in capsys.readouterr().err
    assert run([*command, str(tmp_path / "c"), "--view", "told"]) == 2
    assert run(["validate", str(toy[1]), "--views", str(told), "--scores", str(tmp_path / "b")]) == 0


def test_expert_routes_of_the_recorded_sequence_are_not_taken_for_the_views(
    toy: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = list(read(toy[1]).iter_invocations())[:2]
    routed = [r.replace(routed_experts=np.ones(2 * (len(r) - 1), np.int16)) for r in rows]
    metadata = metadata_for(toy[0], ("routed_experts",))
    write(tmp_path / "t.parquet", metadata, routed)
    reader = read(tmp_path / "t.parquet")
    (recorded,), (flat,) = (list(iter_states(reader, view, None)) for view in ("recorded", PERSISTENT_HISTORY))
    assert all(s.routes is not None for s in recorded)
    assert all(s.routes is None for s in flat)


def test_scores_of_the_view_that_every_row_has_are_missed_without_a_views_file(
    toy: tuple[Path, Path], told: Path, tmp_path: Path
) -> None:
    score(toy[1], toy[0], tmp_path / "s", view=PERSISTENT_HISTORY, signals=("sampled",))
    for views in (None, told):  # the file is of other views
        report = validate(toy[1], scores=tmp_path / "s", views=views)
        assert report.clean, report.to_text()
        assert {r.code: r.status for r in report.rules}["E-SCORES-MISSING"] == "pass"

    def drop(row: dict[str, Any]) -> None:
        for name in ("output_index", "logprob", "logsumexp", "entropy"):
            row[name] = row[name][1:]

    broken = rewritten(tmp_path / "s", tmp_path / "broken", drop, row=0)
    for views in (None, told):
        report = validate(toy[1], scores=broken, views=views)
        assert report.codes == {"E-SCORES-MISSING"}, report.to_text()


def test_training_takes_scores_of_a_view_only_when_asked(toy: tuple[Path, Path], tmp_path: Path) -> None:
    score(toy[1], toy[0], tmp_path / "s", view=PERSISTENT_HISTORY)
    with pytest.raises(UsageError, match="under the view 'persistent-history', to be trained on is 'recorded'"):
        load_rollouts(toy[1], tmp_path / "s", policy=False)
    asked = load_rollouts(toy[1], tmp_path / "s", policy=False, view=PERSISTENT_HISTORY)
    assert asked.scores is not None and asked.scores.metadata.view == PERSISTENT_HISTORY
    settings = {
        "student": str(toy[0]),
        "trace": str(toy[1]),
        "scores": str(tmp_path / "s"),
        "output": "o",
        "steps": 1,
        "ppo": {"weight": 0},
    }
    with pytest.raises(UsageError, match="under the view"):
        train(parse_config(settings))
    with pytest.raises(UsageError, match="under the view"):
        evaluate_kl(toy[0], toy[1], tmp_path / "s")
    told = evaluate_kl(toy[0], toy[1], tmp_path / "s", view=PERSISTENT_HISTORY)
    assert told["forward_kl"] > 1e-2, "the very same weights, under another prompt"
