"""States in fewer bytes, from the teacher to a reader: the same tokens, a measured loss, and nothing altered unseen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers_resume import make_toy
from helpers_scorer import (
    SIZE,
    memory_episode,
    metadata_for,
    oracle,
    save_model,
    tiny_model,
)
from helpers_scores import item, rewritten, roll

from memopd_scorer.head import head_of
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.teacher import load
from memopd_trace import read, validate, write
from memopd_trace.cli import run
from memopd_trace.errors import InputError, UsageError
from memopd_trace.metadata import Model, Producer, TraceMetadata
from memopd_trace.scorefolder import HEAD

LOSSY = ("float16", "int8")
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(teacher folder, trace)."""
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def scored(toy: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of several shards for each tier."""
    folder = tmp_path_factory.mktemp("scored")
    for tier in ("exact", *LOSSY):
        score(toy[1], toy[0], folder / tier, signals=("hidden",), states=tier, max_tokens=200, shard_bytes=5_000)
        assert len(list((folder / tier).glob("shard-*"))) > 1
    return {tier: folder / tier for tier in ("exact", *LOSSY)}


def target_ids(trace: Path) -> dict[tuple[str, int], np.ndarray]:
    return {i.key: i.output_ids for i in read(trace).iter_invocations()}


@pytest.mark.parametrize("tier", LOSSY)
def test_the_whole_vocabulary_is_rebuilt_to_the_measured_divergence(
    tier: str, toy: tuple[Path, Path], scored: dict[str, Path]
) -> None:
    teacher, trace = toy
    reader, model, seen = ScoresReader(scored[tier]), load(teacher).model, []
    for pack, hidden_RD in oracle(model, list(read(trace).iter_episodes())):
        row = reader.get(pack.states[0].episode_id, pack.states[0].invocation_index)
        assert row is not None and row.hidden is not None and row.hidden_kl is not None
        assert row.hidden.dtype == torch.float32
        hidden_MD = hidden_RD[torch.from_numpy(pack.target_row_M).long()]
        exact = head_of(model, SIZE).logits(hidden_MD).double().log_softmax(-1).detach()
        rebuilt = torch.cat(list(reader.logprobs(row, pack.target_ids_M, chunk=4))).double()
        mass = rebuilt.exp().sum(-1, keepdim=True)
        assert bool(((mass - 1).abs() < 1e-6).all())
        rebuilt -= mass.log()  # what float32 leaves of a mass of 1 would be as large as a small divergence
        divergence = (exact.exp() * (exact - rebuilt)).sum(-1)
        np.testing.assert_allclose(row.hidden_kl, divergence, rtol=0.05, atol=1e-9)  # float32 packs: see the contract
        ids = torch.from_numpy(pack.target_ids_M).long()
        np.testing.assert_allclose(row.logprob, exact.gather(1, ids[:, None])[:, 0], atol=1e-5)
        seen.append(row.hidden_kl)
    kl = np.concatenate(seen).astype(float)
    low, high = {"float16": (1e-9, 1e-5), "int8": (1e-6, 1e-2)}[tier]
    assert low < kl.mean() < high
    manifest = json.loads((scored[tier] / "manifest.json").read_text())
    assert manifest["hidden_kl"] == {"mean": pytest.approx(kl.mean()), "max": pytest.approx(kl.max())}


@pytest.mark.parametrize("tier", LOSSY)
def test_a_tier_takes_the_bytes_that_are_promised(
    tier: str, toy: tuple[Path, Path], scored: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["score", str(toy[1]), "--teacher", str(toy[0]), "-o", str(tmp_path / "s"), "--states", tier]
    assert run([*command, "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert printed["state_kl_mean"] == manifest["hidden_kl"]["mean"] > 0
    assert printed["state_kl_max"] == manifest["hidden_kl"]["max"] > printed["state_kl_mean"]
    (shard,) = (tmp_path / "s").glob("shard-*")
    table, targets = pq.read_table(shard), printed["targets"]
    columns = [c.name for c in table.schema if str(c.type).startswith("list")]
    leaves = [table.column(name).combine_chunks() for name in columns]
    stored = 0
    for leaf in leaves:
        while hasattr(leaf, "flatten") and str(leaf.type).startswith(("list", "fixed")):
            leaf = leaf.flatten()
        stored += len(leaf) * leaf.type.bit_width // 8
    assert stored == printed["bytes_per_target"] * targets
    assert ("hidden_scale" in columns) == ("hidden_kl" in columns) == ("hidden_logsumexp" in columns) is True


@pytest.mark.parametrize("tier", LOSSY)
def test_scores_of_a_tier_have_no_finding_and_its_rules_ran(
    tier: str, toy: tuple[Path, Path], scored: dict[str, Path]
) -> None:
    report = validate(toy[1], scores=scored[tier])
    assert report.clean, report.to_text()
    ran = {r.code: r.status for r in report.rules}
    assert ran["E-SCORES-TIER"] == ran["E-SCORES-CHECK"] == ran["E-SCORES-MANIFEST"] == "pass"


@pytest.mark.parametrize("tier", LOSSY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_teacher_has_tiers_as_well(
    tier: str, dtype: str, toy: tuple[Path, Path], tmp_path: Path
) -> None:
    result = score(toy[1], toy[0], tmp_path / "s", signals=("hidden",), states=tier, dtype=dtype)
    assert validate(toy[1], scores=tmp_path / "s").clean
    assert result.hidden_kl is not None
    assert (result.hidden_kl["max"] == 0) == (tier == "float16"), "16 bits come back as they were, 8 do not"


def change_code(row: dict[str, Any]) -> None:
    row["hidden"][1][0] = row["hidden"][1][0] // 2 if row["hidden"][1][0] else 60


def change_scale(row: dict[str, Any]) -> None:
    row["hidden_scale"][1] = [s * 2 for s in row["hidden_scale"][1]]


def understate(row: dict[str, Any]) -> None:
    row["hidden_kl"] = [0.0 for _ in row["hidden_kl"]]


def another_tokens(row: dict[str, Any]) -> None:
    roll("hidden", "hidden_scale", "hidden_logsumexp", "hidden_kl")(row)


# What stands against each is in the row itself, so that every hash may be right.
ALTERED: dict[str, Change] = {
    "a code": change_code,
    "a scale": change_scale,
    "the check value": item("hidden_logsumexp", 3.0),
    "the states of the next token, whole": another_tokens,
    "the log-probabilities of the next token": roll("logprob"),
}


@pytest.mark.parametrize("tier", LOSSY)
@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_row_is_refused_by_the_reader_and_found_by_the_validator(
    what: str, tier: str, toy: tuple[Path, Path], scored: dict[str, Path], tmp_path: Path
) -> None:
    broken = rewritten(scored[tier], tmp_path / "s", ALTERED[what], row=0)
    reader = ScoresReader(broken)
    key = next(iter(reader._where))
    row, ids = reader.get(*key), target_ids(toy[1])[key]
    assert row is not None and len(row.logprob) == len(ids) > 2
    with pytest.raises(InputError, match="E-SCORES-CHECK"):
        list(reader.logprobs(row, ids))
    report = validate(toy[1], scores=broken)
    assert "E-SCORES-CHECK" in report.codes <= {"E-SCORES-CHECK", "E-SCORES-MANIFEST"}, report.to_text()


def test_without_states_the_vocabulary_is_read_from_the_stored_logits(
    toy: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score(toy[1], toy[0], tmp_path / "s", signals=("full",), max_tokens=200, shard_bytes=5_000)
    reader, exact = ScoresReader(tmp_path / "s"), oracle(load(toy[0]).model, list(read(toy[1]).iter_episodes()))
    monkeypatch.setattr("memopd_scorer.signals.CHUNK_CELLS", 3 * SIZE)
    for pack, hidden_RD in exact:
        row = reader.get(pack.states[0].episode_id, pack.states[0].invocation_index)
        assert row is not None and row.hidden is None
        reader.verify(row, pack.target_ids_M)
        chunks = list(reader.logprobs(row, pack.target_ids_M))
        assert len(chunks) > 1 and {len(c) for c in chunks[:-1]} == {3}, "as many cells as a chunk may have"
        hidden_MD = hidden_RD[torch.from_numpy(pack.target_row_M).long()]
        expected = head_of(load(toy[0]).model, SIZE).logits(hidden_MD).log_softmax(-1).detach()
        torch.testing.assert_close(torch.cat(chunks), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("change", "named"), [(roll("logits"), "logsumexp"), (roll("logprob"), "logprob")])
def test_logits_that_are_not_those_of_the_other_numbers_are_refused(
    change: Change, named: str, toy: tuple[Path, Path], tmp_path: Path
) -> None:
    score(toy[1], toy[0], tmp_path / "s", signals=("full",))
    broken, (key, ids) = rewritten(tmp_path / "s", tmp_path / "broken", change), next(iter(target_ids(toy[1]).items()))
    with pytest.raises(InputError, match=f"E-SCORES-CHECK.*{named} recomputed from logits"):
        reader = ScoresReader(broken)  # what contradicts itself is refused here
        row = reader.get(*key)
        assert row is not None
        list(reader.logprobs(row, ids))


def test_without_states_and_logits_there_is_no_vocabulary(toy: tuple[Path, Path], tmp_path: Path) -> None:
    score(toy[1], toy[0], tmp_path / "s", signals=("topk",))
    reader = ScoresReader(tmp_path / "s")
    row = reader.get("m0", 0)
    assert row is not None
    with pytest.raises(UsageError, match="neither states nor logits are stored"):
        next(reader.logprobs(row))


def test_a_divergence_that_was_made_smaller_is_found(
    toy: tuple[Path, Path], scored: dict[str, Path], tmp_path: Path
) -> None:
    """By the manifest's sum, and where the sampled id's own change shows it, by the row."""
    broken = rewritten(scored["int8"], tmp_path / "s", understate)
    assert validate(toy[1], scores=broken).codes == {"E-SCORES-MANIFEST", "E-SCORES-CHECK"}
    reader, refused = ScoresReader(broken), 0
    for key, ids in target_ids(toy[1]).items():
        row = reader.get(*key)
        assert row is not None
        try:
            list(reader.logprobs(row, ids))
        except InputError as error:
            assert error.code == "E-SCORES-CHECK"
            refused += 1
    assert refused > 5


def test_every_chunk_of_exact_states_is_checked_too(
    toy: tuple[Path, Path], scored: dict[str, Path], tmp_path: Path
) -> None:
    reader = ScoresReader(scored["exact"])
    row, ids = reader.get("m0", 0), target_ids(toy[1])["m0", 0]
    assert row is not None and row.hidden is not None and row.hidden_kl is None
    assert len(torch.cat(list(reader.logprobs(row, ids, chunk=2)))) == 6
    row.hidden[4] += 0.5  # of the third chunk
    chunks = reader.logprobs(row, chunk=2)
    assert len(next(chunks)) == len(next(chunks)) == 2
    with pytest.raises(InputError, match=r"E-SCORES-CHECK.*output 4: logsumexp"):
        next(chunks)
    row = reader.get("m0", 0)
    assert row is not None
    with pytest.raises(InputError, match=r"E-SCORES-CHECK.*output 0: logprob"):
        next(reader.logprobs(row, ids[::-1].copy()))


def test_a_missing_shard_is_scored_again_to_the_same_bytes_and_sums(
    toy: tuple[Path, Path], scored: dict[str, Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"signals": ("hidden",), "states": "int8", "max_tokens": 200, "shard_bytes": 5_000}
    score(toy[1], toy[0], tmp_path / "s", **options)
    before = {f.name: f.read_bytes() for f in (tmp_path / "s").iterdir()}
    sorted((tmp_path / "s").glob("shard-*"))[1].unlink()
    again = score(toy[1], toy[0], tmp_path / "s", **options)
    assert again.shards_scored == 1
    assert {f.name: f.read_bytes() for f in (tmp_path / "s").iterdir()} == before
    assert (tmp_path / "s" / HEAD).is_file()


def test_a_tier_without_states_and_an_unknown_one_are_usage_errors(toy: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without the signal hidden"):
        score(toy[1], toy[0], tmp_path / "s", signals=("sampled",), states="int8")
    with pytest.raises(UsageError, match="unknown tier of states 'fp8'"):
        score(toy[1], toy[0], tmp_path / "s", states="fp8")
    assert not (tmp_path / "s").exists()


def test_a_folder_of_a_tier_to_come_is_refused_by_name(scored: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(scored["int8"], tmp_path / "s")
    run_file = tmp_path / "s" / "run.json"
    run_file.write_text(run_file.read_text().replace('"int8"', '"int4"'))
    with pytest.raises(InputError, match=r"E-SCORES-META.*tier 'int4'.*exact, float16, int8"):
        ScoresReader(tmp_path / "s")


@pytest.mark.parametrize("tier", LOSSY)
def test_rows_without_targets_are_stored_and_read(tier: str, tmp_path: Path) -> None:
    teacher = save_model(tiny_model("llama"), tmp_path / "teacher")
    forced = [i.replace(output_sampled=[False] * 6) for i in memory_episode(np.random.default_rng(0), "f")]
    sampled = list(memory_episode(np.random.default_rng(1), "s"))
    write(tmp_path / "t.parquet", metadata_for(teacher), [*forced, *sampled])
    score(tmp_path / "t.parquet", teacher, tmp_path / "s", states=tier, max_tokens=60, shard_bytes=1)
    empty = ScoresReader(tmp_path / "s").get("f", 0)
    assert empty is not None and empty.hidden is not None and empty.hidden.shape == (0, 32)
    assert empty.hidden_kl is not None and len(empty.hidden_kl) == 0
    assert validate(tmp_path / "t.parquet", scores=tmp_path / "s").clean


@pytest.mark.parametrize("tier", ["exact", "int8"])
def test_a_reader_holds_one_row_group_of_a_shard(
    tier: str, toy: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score(toy[1], toy[0], tmp_path / "one", signals=("hidden", "topk"), topk=3, states=tier)
    monkeypatch.setattr("memopd_scorer.store.GROUP_BYTES", 2_000)
    score(toy[1], toy[0], tmp_path / "many", signals=("hidden", "topk"), topk=3, states=tier)
    (shard,) = (tmp_path / "many").glob("shard-*")
    assert pq.read_metadata(shard).num_row_groups > 3
    one, many = ScoresReader(tmp_path / "one"), ScoresReader(tmp_path / "many")
    for key, ids in reversed(target_ids(toy[1]).items()):
        a, b = one.get(*key), many.get(*key)
        assert a is not None and b is not None and a.hidden is not None and b.hidden is not None
        assert torch.equal(a.hidden, b.hidden) and (a.state_digest, *key) == (b.state_digest, *key)
        np.testing.assert_array_equal(a.topk_ids, b.topk_ids)
        list(many.logprobs(b, ids))
        assert many._loaded is not None and len(many._loaded[1]) < len(many) / 3
    assert one._loaded is not None and len(one._loaded[1]) == len(one)


@pytest.mark.slow
def test_what_the_tiers_cost_on_a_real_model(smollm2: Path, tmp_path: Path) -> None:
    """The figures of spec/scores.md: `pytest -m slow -s tests/scorer/test_stored_tiers.py`."""
    from sweep_contract import real_episodes
    from transformers import AutoTokenizer

    teacher = load(smollm2)
    described = Model(name="SmolLM2-135M-Instruct", tokenizer=teacher.tokenizer)
    metadata = TraceMetadata(producer=Producer(name="tests"), models={"m": described})
    data = real_episodes(AutoTokenizer.from_pretrained(smollm2))
    write(tmp_path / "t.parquet", metadata, [i for e in data for i in e])
    limits = {"float16": (5e-7, 2e-5), "int8": (1e-3, 1e-2)}
    for tier in LOSSY:
        result = score(tmp_path / "t.parquet", teacher, tmp_path / tier, signals=("hidden",), states=tier)
        assert result.hidden_kl is not None
        mean, largest = result.hidden_kl["mean"], result.hidden_kl["max"]
        size = f"{result.plan.targets} targets of {result.bytes_per_target} bytes"
        print(f"{tier}: {size}, KL mean {mean:.2g}, max {largest:.2g} nats")
        assert 0 < mean <= limits[tier][0] and largest <= limits[tier][1]
        assert validate(tmp_path / "t.parquet", scores=tmp_path / tier).clean
