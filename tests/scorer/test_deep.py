"""When a group becomes deep packs: what that spares, what it may hold, and that `plan` and `score` decide alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers_scorer import SIZE, metadata_for, save_model, tiny_model

from memopd_scorer.cost import ModelCost, bytes_of
from memopd_scorer.deep import KEPT_BYTES, Deep
from memopd_scorer.plan import Pack, plan
from memopd_scorer.scoring import score
from memopd_scorer.summary import PlanSummary
from memopd_scorer.teacher import cost_of, load
from memopd_trace.cli import run, teacher
from memopd_trace.errors import UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.look.sharing import PrefixTree
from memopd_trace.storage import write

COST = ModelCost(per_token=1000, per_pair=1, per_row=0, width=8, kept=10)


def stripped_history(name: str, calls: int = 8, kept: int = 40, thought: int = 20) -> Episode:
    """A growing history that drops the thinking of each call: every call is all answers so far and its own thinking."""
    rng = np.random.default_rng(len(name))
    history, rows = rng.integers(3, SIZE, 60), []
    for index in range(calls):
        output = rng.integers(3, SIZE, thought + kept)
        rewrite = {"relation": "rewrite", "rewrite_kind": "strip_thinking", "rewrite_evidence": "explicit"}
        rows.append(
            Invocation(
                episode_id=name, invocation_index=index, model_id="m", prompt_ids=history, output_ids=output,
                parent_index=index - 1 if index else None, token_source="engine", **(rewrite if index else {}),
            )
        )  # fmt: skip
        history = np.r_[history, output[thought:]]
    return Episode(name, tuple(rows))


def summary_of(packs: list[Pack], max_tokens: int, cost: ModelCost | None = COST) -> PlanSummary:
    summary = PlanSummary("tree", max_tokens, cost)
    for pack in packs:
        summary.add(pack)
    return summary


def distinct(*episodes: Episode) -> int:
    tree = PrefixTree()
    for episode in episodes:
        for invocation in episode:
            tree.add(invocation)
    tree.cut()
    return tree.distinct


def test_a_stripped_history_is_run_once_in_passes_of_the_budget() -> None:
    long = stripped_history("e", calls=24)
    assert max(map(len, long)) > 500
    torn = summary_of(list(plan([long], max_tokens=256)), 256)
    (pack,) = plan([long], max_tokens=256, deep=Deep(COST))
    deep = summary_of([pack], 256)
    assert torn.repeated_tokens > 0 and torn.longest_pack > 256, "whole, or again"
    assert deep.executed_tokens == distinct(long) == torn.executed_tokens - torn.repeated_tokens
    assert (deep.repeated_tokens, deep.spared_tokens, deep.deep_packs) == (0, torn.repeated_tokens, 1)
    assert 0 < deep.kept_tokens < max(map(len, long))
    assert deep.to_json()["kept_bytes"] == 4 * COST.kept * deep.kept_tokens
    assert pack.pass_tokens == 256 and deep.digest != torn.digest


def group(branches: int, shared: int, own: int) -> Episode:
    rng = np.random.default_rng(1)
    trunk = rng.integers(3, SIZE, shared)
    rows = [
        Invocation(
            episode_id="g", invocation_index=n, model_id="m", prompt_ids=np.r_[trunk, n % (SIZE - 3) + 3],
            output_ids=rng.integers(3, SIZE, own),
        )
        for n in range(branches)
    ]  # fmt: skip
    return Episode("g", tuple(rows))


@pytest.mark.parametrize(
    ("shared", "max_bytes", "kept", "is_deep"),
    [
        (900, KEPT_BYTES, 10, True),  # nine packs would run 900 tokens again
        (900, 1100 * 4 * 10, 10, True),
        (900, 1000 * 4 * 10, 10, False),  # its path of 1001 tokens may not be held
        (900, KEPT_BYTES, 2000, False),  # moving keys and values would take longer than running the prefix again
        (20, KEPT_BYTES, 10, False),  # too little to be run again
    ],
)
def test_a_group_is_deep_where_that_is_cheaper_and_fits(shared: int, max_bytes: int, kept: int, is_deep: bool) -> None:
    cost = ModelCost(per_token=1000, per_pair=0, per_row=0, width=8, kept=kept)
    calls = group(8 if shared > 100 else 12, shared, 100)
    packs = list(plan([calls], max_tokens=1024, deep=Deep(cost, 4, max_bytes)))
    assert [p.pass_tokens for p in packs] == ([1024] if is_deep else [None] * len(packs))
    assert len(packs) == 1 if is_deep else len(packs) > 1
    assert sum(p.repeated for p in packs) == 0 if is_deep else sum(p.repeated for p in packs) > 0


def test_a_group_that_a_pack_holds_is_never_deep() -> None:
    calls = group(8, 900, 10)
    assert [p.pass_tokens for p in plan([calls], max_tokens=1024, deep=Deep(COST))] == [None]


def test_without_a_models_cost_only_tokens_are_compared() -> None:
    assert [p.pass_tokens for p in plan([group(8, 900, 100)], max_tokens=1024, deep=Deep())] == [1024]
    assert len(list(plan([group(12, 20, 100)], max_tokens=1024, deep=Deep()))) == 2
    assert Deep().token_bytes == 0


def test_a_deep_pack_stands_apart_from_its_neighbours_and_holds_no_more_than_a_shard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = Episode("a", group(2, 5, 5).invocations)
    groups = [small, stripped_history("deep", calls=24), Episode("z", group(2, 6, 6).invocations)]
    packs = list(plan(groups, max_tokens=256, deep=Deep(COST)))
    assert [p.pass_tokens for p in packs] == [None, 256, None]
    monkeypatch.setattr("memopd_scorer.plan.DEEP_TOKENS", 1100)
    first, *parts, last = plan(groups, max_tokens=256, deep=Deep(COST))
    assert first.pass_tokens is last.pass_tokens is None
    assert len(parts) > 1 and {p.pass_tokens for p in parts} == {256} and max(map(len, parts)) <= 1100
    assert [p.repeated > 0 for p in parts] == [False] + [True] * (len(parts) - 1)
    assert sum(p.spared for p in parts) == packs[1].spared - sum(p.repeated for p in parts)


def test_the_numbers_of_kept_keys_and_values_follow_the_config() -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 10}
    assert ModelCost.of(shape).kept == 3 * 8 * 2 * 8
    assert ModelCost.of({**shape, "num_key_value_heads": 2, "head_dim": 16}).kept == 3 * 2 * 2 * 16
    compressed = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5, "num_key_value_heads": 1}
    assert ModelCost.of({**shape, **compressed}).kept == 3 * 8 * (6 + 2 + 5)
    assert ModelCost.of({"text_config": shape}) == ModelCost.of(shape)
    assert [bytes_of(name) for name in ("float32", "bfloat16", "float64")] == [4, 2, 8]
    with pytest.raises(UsageError, match="unknown dtype 'int4'"):
        bytes_of("int4")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(teacher folder, a trace of two stripped histories and a short group)."""
    folder = tmp_path_factory.mktemp("toy")
    model = save_model(tiny_model("llama", seed=3), folder / "teacher")
    rows = [i for e in (stripped_history("e1"), stripped_history("long")) for i in e]
    write(folder / "trace.parquet", metadata_for(model), rows)
    return model, folder / "trace.parquet"


@pytest.mark.parametrize("kept_bytes", [0, 1, 10**5, KEPT_BYTES])
def test_plan_and_score_decide_alike(
    kept_bytes: int, toy: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-tokens", "100", "--kept-bytes", str(kept_bytes), "--format", "json"]
    assert run(["plan", str(toy[1]), "--teacher", str(toy[0]), *options]) == 0
    planned = json.loads(capsys.readouterr().out)
    result = score(toy[1], toy[0], tmp_path / "s", signals=["sampled"], max_tokens=100, kept_bytes=kept_bytes)
    assert result.plan.digest == planned["plan_digest"]
    assert result.plan.deep_packs == planned["deep_packs"] == (2 if kept_bytes > 10**5 else 0)
    assert (planned["kept_bytes"] > 0) == (planned["deep_packs"] > 0)


def test_the_command_line_has_the_same_default() -> None:
    assert teacher.KEPT_BYTES == KEPT_BYTES


def test_the_cost_of_a_loaded_teacher_is_that_of_its_folder(toy: tuple[Path, Path]) -> None:
    loaded = load(toy[0])
    assert cost_of(loaded.model.config) == ModelCost.read(toy[0]) == ModelCost.of(loaded.model.config.to_dict())
    assert loaded.deep(1000) == Deep(ModelCost.read(toy[0]), 4, 1000)
    assert loaded.deep(0) is None


def test_a_run_that_is_continued_gives_the_same_bytes(toy: tuple[Path, Path], tmp_path: Path) -> None:
    def shards(folder: Path) -> dict[str, bytes]:
        return {f.name: f.read_bytes() for f in sorted(folder.glob("shard-*"))}

    for name in ("whole", "torn"):
        result = score(toy[1], toy[0], tmp_path / name, max_tokens=100, shard_bytes=1)
        assert result.plan.deep_packs == result.shards == 2
    whole = shards(tmp_path / "whole")
    for lost in range(2):
        list((tmp_path / "torn").glob("shard-*"))[lost].unlink()
        (tmp_path / "torn" / "manifest.json").unlink()
        again = score(toy[1], toy[0], tmp_path / "torn", max_tokens=100, shard_bytes=1)
        assert again.shards_scored == 1
        assert shards(tmp_path / "torn") == whole
