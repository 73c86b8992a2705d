"""Scores on disk: right, whole, and the same whether a run was killed or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_resume import episodes, make_toy, rows_of
from helpers_scorer import (
    SIZE,
    memory_episode,
    metadata_for,
    oracle,
    save_model,
    tiny_model,
)

from memopd_scorer.head import head_of
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.teacher import load
from memopd_trace.errors import InputError, UsageError
from memopd_trace.storage import read, write

SIGNALS = ("sampled", "topk", "hidden", "full")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(teacher folder, trace)."""
    return make_toy(tmp_path_factory.mktemp("toy"), 6)


def test_every_sampled_token_has_the_oracles_signals(toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    result = score(trace, teacher, tmp_path / "scores", signals=SIGNALS, topk=4, max_tokens=200, shard_bytes=20_000)
    assert result.shards > 1
    assert result.plan.executed_tokens < result.plan.logical_tokens
    reader = ScoresReader(tmp_path / "scores")
    model = load(teacher).model
    seen = 0
    for pack, hidden_RD in oracle(model, list(read(trace).iter_episodes())):
        state = pack.states[0]
        row = reader.get(state.episode_id, state.invocation_index)
        assert row is not None and row.hidden is not None and row.topk_logprobs is not None
        assert row.state_digest == state.digest
        np.testing.assert_array_equal(row.output_index, pack.target_output_M)
        hidden_MD = hidden_RD[torch.from_numpy(pack.target_row_M).long()]
        torch.testing.assert_close(row.hidden, hidden_MD, atol=1e-5, rtol=1e-5)
        logprobs = head_of(model, SIZE).logits(hidden_MD).log_softmax(-1).detach()
        ids = torch.from_numpy(pack.target_ids_M).long()
        np.testing.assert_allclose(row.logprob, logprobs.gather(1, ids[:, None])[:, 0], atol=1e-5)
        rebuilt = torch.cat(list(reader.logprobs(row, chunk=4)))
        torch.testing.assert_close(rebuilt, logprobs, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(row.topk_logprobs, logprobs.topk(4).values, atol=1e-5)
        reader.verify(row, pack.target_ids_M)
        seen += len(row.logprob)
    assert seen == result.plan.targets > 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_states_are_stored_in_the_teachers_dtype_without_loss(
    dtype: str, toy: tuple[Path, Path], tmp_path: Path
) -> None:
    teacher, trace = toy
    score(trace, teacher, tmp_path / "s", signals=("hidden",), dtype=dtype, layout="single")
    reader = ScoresReader(tmp_path / "s")
    model = load(teacher, dtype=dtype)
    for pack, hidden_RD in oracle(model.model, episodes()[:2]):
        row = reader.get(pack.states[0].episode_id, pack.states[0].invocation_index)
        assert row is not None and row.hidden is not None
        assert str(row.hidden.dtype) == f"torch.{dtype}"
        assert torch.equal(row.hidden, hidden_RD[torch.from_numpy(pack.target_row_M).long()])


def test_a_model_that_cannot_be_packed_is_scored_alone_and_right(tmp_path: Path) -> None:
    model = tiny_model("mamba")
    teacher = save_model(model, tmp_path / "mamba")
    write(tmp_path / "t.parquet", metadata_for(teacher), [i for e in episodes(2) for i in e])
    result = score(tmp_path / "t.parquet", teacher, tmp_path / "s", signals=("hidden",))
    assert result.plan.layout == "single"
    reader = ScoresReader(tmp_path / "s")
    for pack, hidden_RD in oracle(load(teacher).model, episodes(2)):
        row = reader.get(pack.states[0].episode_id, pack.states[0].invocation_index)
        assert row is not None and row.hidden is not None
        torch.testing.assert_close(row.hidden, hidden_RD[torch.from_numpy(pack.target_row_M).long()])


def test_scores_that_are_not_of_their_head_are_refused(toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    score(trace, teacher, tmp_path / "s")
    reader = ScoresReader(tmp_path / "s")
    row = reader.get("m0", 0)
    assert row is not None and row.hidden is not None
    row.hidden[0] += 0.5
    with pytest.raises(InputError, match="E-SCORES-CHECK"):
        reader.verify(row)


def test_shards_whose_boundaries_are_not_the_plans_are_scored_again(toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    options = {"max_tokens": 100, "shard_bytes": 1_000}
    score(trace, teacher, tmp_path / "s", **options)  # type: ignore[arg-type]
    expected = rows_of(tmp_path / "s")
    with pytest.MonkeyPatch.context() as patch:  # another release, which fills shards in another way
        patch.setattr("memopd_scorer.run.bytes_per_target", lambda *a, **k: 9)
        with pytest.raises(InputError, match="E-SCORES-DAMAGED.*not those of the plan"):
            score(trace, teacher, tmp_path / "s", **options)  # type: ignore[arg-type]
        score(trace, teacher, tmp_path / "s", repair=True, **options)  # type: ignore[arg-type]
        assert rows_of(tmp_path / "s") == expected


def test_a_refusal_lets_go_of_the_folder(toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    score(trace, teacher, tmp_path / "s", signals=("sampled",))
    (shard,) = (tmp_path / "s").glob("shard-*")
    shard.write_bytes(b"")
    with pytest.raises(InputError) as kept:  # the exception stays alive, as in a notebook
        score(trace, teacher, tmp_path / "s", signals=("sampled",))
    assert score(trace, teacher, tmp_path / "s", signals=("sampled",), repair=True).shards_scored == 1
    assert kept.value.code == "E-SCORES-DAMAGED"


def test_padded_ids_that_were_sampled_are_left_out_and_counted(tmp_path: Path) -> None:
    model = tiny_model("llama")
    teacher = save_model(model, tmp_path / "teacher")
    episode = memory_episode(np.random.default_rng(0), "m")
    first = episode.invocations[0]
    row = first.replace(output_ids=[*first.output_ids[:-1], SIZE + 2])
    write(tmp_path / "t.parquet", metadata_for(teacher), [row])
    result = score(tmp_path / "t.parquet", teacher, tmp_path / "s")
    assert (result.plan.targets, result.plan.left_out) == (5, 1)
    found = ScoresReader(tmp_path / "s").get("m", 0)
    assert found is not None and found.output_index.tolist() == [0, 1, 2, 3, 4]


def test_rows_without_targets_are_stored_and_read(tmp_path: Path) -> None:
    teacher = save_model(tiny_model("llama"), tmp_path / "teacher")
    forced = [i.replace(output_sampled=[False] * 6) for i in memory_episode(np.random.default_rng(0), "f")]
    sampled = list(memory_episode(np.random.default_rng(1), "s"))
    write(tmp_path / "t.parquet", metadata_for(teacher), [*forced, *sampled])
    score(tmp_path / "t.parquet", teacher, tmp_path / "s", signals=SIGNALS, max_tokens=60, shard_bytes=1)
    reader = ScoresReader(tmp_path / "s")
    empty, full = reader.get("f", 0), reader.get("s", 0)
    assert empty is not None and full is not None
    assert empty.topk_ids is not None and empty.topk_ids.shape == (0, 64)
    assert empty.logits is not None and empty.logits.shape == (0, SIZE)
    assert empty.hidden is not None and empty.hidden.shape == (0, 32)
    assert len(full.logprob) == 6
    write(tmp_path / "u.parquet", metadata_for(teacher), forced)
    with pytest.raises(InputError, match="E-NO-TARGETS"):
        score(tmp_path / "u.parquet", teacher, tmp_path / "u")
    assert not (tmp_path / "u").exists()


def test_a_trace_that_is_not_valid_is_not_scored(toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    reader = read(trace)
    write(tmp_path / "t.parquet", reader.metadata, [i.replace(position_ids=[7]) for i in reader.iter_invocations()])
    with pytest.raises(InputError, match="E-LENGTH-SEQUENCE"):
        score(tmp_path / "t.parquet", teacher, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_scores_are_not_written_into_a_trace_or_another_folder(toy: tuple[Path, Path], tmp_path: Path) -> None:
    teacher, trace = toy
    write(tmp_path / "folder", read(trace).metadata, list(read(trace).iter_invocations()))
    before = sorted(f.name for f in (tmp_path / "folder").iterdir())
    for place in (tmp_path / "folder", teacher, trace):
        with pytest.raises(UsageError, match=r"no run\.json|is a file"):
            score(trace, teacher, place)
    assert sorted(f.name for f in (tmp_path / "folder").iterdir()) == before
