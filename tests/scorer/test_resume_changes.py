"""A folder is continued only by the run that began it: whatever changes a score is refused, and named; what does not is
no reason to score again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_resume import files_of, make_toy
from helpers_scorer import save_model, tiny_model

from memopd_scorer.scoring import score
from memopd_trace.errors import InputError
from memopd_trace.invocation import Invocation
from memopd_trace.storage import read, write
from memopd_trace.viewfile import View, ViewsWriter

Toy = tuple[Path, Path, Path]
OPTIONS: dict[str, Any] = {"max_tokens": 60, "shard_tokens": 50, "signals": ("sampled", "topk", "hidden"), "topk": 8}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """(teacher folder, trace, its scores)."""
    folder = tmp_path_factory.mktemp("toy")
    teacher, trace = make_toy(folder)
    score(trace, teacher, folder / "s", **OPTIONS)
    return teacher, trace, folder / "s"


def check_refused(toy: Toy, named: str, **changes: Any) -> None:
    """The folder is refused, with or without repair, by what differs; nothing in it changes."""
    before = files_of(toy[2])
    wish = {"trace": toy[1], "teacher": toy[0], "out": toy[2], **OPTIONS, **changes}
    for repair in (False, True):
        with pytest.raises(InputError, match=f"E-SCORES-OTHER-RUN.*{named}") as caught:
            score(**wish, repair=repair)
        assert "\n" not in str(caught.value)
    assert files_of(toy[2]) == before


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("signals is", {"signals": ("sampled",)}),
        ("topk is 8 there and 4 now", {"topk": 4}),
        ("hidden_tier is 'exact' there", {"states": "float16"}),
        ("dtype is 'float32' there and 'bfloat16' now", {"dtype": "bfloat16"}),
        ("layout is 'tree' there and 'packed' now", {"layout": "packed"}),
        ("max_tokens is 60 there and 61 now", {"max_tokens": 61}),
        ("shard_tokens is 50 there and 51 now", {"shard_tokens": 51}),
        ("shard_bytes is", {"shard_bytes": 10_000}),
        ("attention is 'sdpa' there and 'eager' now", {"attention": "eager"}),
        ("view is 'recorded' there and 'persistent-history' now", {"view": "persistent-history"}),
    ],
)
def test_another_option_is_refused(named: str, changes: dict[str, Any], toy: Toy) -> None:
    check_refused(toy, named, **changes)


def _one_weight(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1e-3


def _the_head(model: Any) -> None:
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.lm_head.weight.data[7, 3] += 1e-3


def _the_config(model: Any) -> None:
    model.config.rms_norm_eps *= 2


@pytest.mark.parametrize(
    ("change", "named"),
    [(_one_weight, "teacher.weights_digest"), (_the_head, "teacher.weights_digest"), (_the_config, "teacher.config")],
)
def test_another_teacher_is_refused(change: Callable[[Any], None], named: str, toy: Toy, tmp_path: Path) -> None:
    model = tiny_model("llama", seed=3)
    with torch.no_grad():
        change(model)
    check_refused(toy, named, teacher=save_model(model, tmp_path / "teacher"))


def test_another_tokenizer_is_refused_before_anything_is_looked_at(toy: Toy, tmp_path: Path) -> None:
    before = files_of(toy[2])
    other = save_model(tiny_model("llama", seed=3), tmp_path / "teacher", words="x")
    with pytest.raises(InputError, match="E-TOKENIZER-MISMATCH"):
        score(toy[1], other, toy[2], **OPTIONS)
    assert files_of(toy[2]) == before
    with pytest.raises(InputError, match="E-TOKENIZER-MISMATCH"):
        score(toy[1], other, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def _changed(toy: Toy, path: Path, change: Callable[[list[Invocation]], list[Invocation]]) -> Path:
    reader = read(toy[1])
    write(path, reader.metadata, change(list(reader.iter_invocations())))
    return path


def _token(rows: list[Invocation]) -> list[Invocation]:
    ids = rows[0].prompt_ids.copy()
    ids[0] += 1
    return [rows[0].replace(prompt_ids=ids), *rows[1:]]


def _sampled_token(rows: list[Invocation]) -> list[Invocation]:
    ids = rows[-1].output_ids.copy()
    ids[-1] = 3 if ids[-1] != 3 else 4
    return [*rows[:-1], rows[-1].replace(output_ids=ids)]


def _added(rows: list[Invocation]) -> list[Invocation]:
    return [*rows, rows[0].replace(episode_id="another", group_id=None)]


def _removed(rows: list[Invocation]) -> list[Invocation]:
    return rows[:-1]


def _renamed(rows: list[Invocation]) -> list[Invocation]:
    return [*rows[:-4], *(row.replace(episode_id="other name") for row in rows[-4:])]


def _reordered(rows: list[Invocation]) -> list[Invocation]:
    return [*rows[-4:], *rows[:-4]]


@pytest.mark.parametrize("change", [_token, _sampled_token, _added, _removed, _renamed, _reordered])
def test_another_trace_is_refused(change: Any, toy: Toy, tmp_path: Path) -> None:
    check_refused(toy, "plan_digest", trace=_changed(toy, tmp_path / "t.parquet", change))


def test_what_no_score_depends_on_may_change(toy: Toy, tmp_path: Path) -> None:
    """Rewards, recorded log-probabilities and policy versions come after scoring; a trace may be written anew."""

    def change(rows: list[Invocation]) -> list[Invocation]:
        return [row.replace(reward=0.5, output_logprobs=None, logprob_kind=None, policy_version=3) for row in rows]

    before = files_of(toy[2])
    result = score(_changed(toy, tmp_path / "t.arrow", change), toy[0], toy[2], **OPTIONS)
    assert result.shards_scored == 0
    assert files_of(toy[2]) == before


def test_the_views_file_is_part_of_the_run(toy: Toy, tmp_path: Path) -> None:
    from memopd_trace.metadata import Producer, ViewInfo, ViewsMetadata

    reader = read(toy[1])
    (model,) = reader.metadata.models.values()
    metadata = ViewsMetadata(
        producer=Producer(name="tests"),
        tokenizer_fingerprint=model.tokenizer.fingerprint,
        views={"told": ViewInfo()},
    )

    def views(name: str, first: int) -> Path:
        with ViewsWriter(tmp_path / name, metadata) as writer:
            for row in reader.iter_invocations():
                writer.write(View.of(row, row.replace(prompt_ids=np.r_[first, row.prompt_ids], segments=None), "told"))
        return tmp_path / name

    out, options = tmp_path / "s", {**OPTIONS, "view": "told"}
    score(toy[1], toy[0], out, views=views("a.parquet", 5), **options)
    assert score(toy[1], toy[0], out, views=views("same.arrow", 5), **options).shards_scored == 0
    with pytest.raises(InputError, match="E-SCORES-OTHER-RUN.*plan_digest"):
        score(toy[1], toy[0], out, views=views("b.parquet", 6), **options)
