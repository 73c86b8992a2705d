"""Teachers whose weights are not in one place: the same scores, the same digests, and refusals by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_engines import TORCHRUN, Toy, content, run
from helpers_scorer import memory_episode, save_model, tiny_model

from memopd_scorer.attention.visibility import Visibility
from memopd_scorer.placement import runs_on
from memopd_scorer.plan import plan
from memopd_scorer.precision import in_float32
from memopd_scorer.scores import ScoresReader
from memopd_scorer.scoring import score
from memopd_scorer.teacher import load, load_model
from memopd_trace.errors import InputError, UsageError
from memopd_trace.record.fingerprint import config_digest, weights_digest
from memopd_trace.storage import read

ON_DISK = {
    "model.embed_tokens": "disk",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])  # an own head, and a tied one behind a softcap
def test_an_offloaded_teacher_is_the_same_teacher(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = save_model(tiny_model(kind, seed=3), tmp_path / "m")
    plain, spread = load(folder, dtype=dtype), load(folder, dtype=dtype, device_map=ON_DISK)
    assert spread.model.lm_head.weight.is_meta and not plain.model.lm_head.weight.is_meta
    assert runs_on(spread.model.get_input_embeddings()) == torch.device("cpu")
    assert spread.capability == plain.capability and plain.capability.layout == "tree"
    assert spread.head.digest() == plain.head.digest()
    assert (spread.head.logit_scale, spread.head.softcap) == (plain.head.logit_scale, plain.head.softcap)
    assert weights_digest(spread.model) == weights_digest(plain.model)
    assert config_digest(spread.model) == config_digest(plain.model)
    episodes = [memory_episode(np.random.default_rng(1), "m")]
    with torch.no_grad():
        for pack in plan(episodes, max_tokens=100):
            assert torch.equal(spread.states(pack), plain.states(pack))


def test_a_teacher_spread_by_a_map_leaves_the_folder_that_a_plain_one_leaves(toy: Toy, tmp_path: Path) -> None:
    small = {"max_tokens": 60, "shard_tokens": 60}
    score(toy.trace, toy.teacher, tmp_path / "plain", **small)  # type: ignore[arg-type]
    score(toy.trace, toy.teacher, tmp_path / "auto", device_map="auto", **small)  # type: ignore[arg-type]
    assert content(tmp_path / "auto") == content(tmp_path / "plain")
    spread = load(toy.teacher, device_map=ON_DISK)
    score(toy.trace, spread, tmp_path / "disk", **small)  # type: ignore[arg-type]
    assert content(tmp_path / "disk") == content(tmp_path / "plain")


def test_offloaded_weights_are_half_again_after_they_were_compared_in_float32(tmp_path: Path) -> None:
    folder = save_model(tiny_model("llama"), tmp_path / "m")
    model = load_model(folder, dtype="bfloat16", device_map=ON_DISK)
    seen: list[torch.dtype] = []
    layer = model.model.layers[1].mlp.down_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        with in_float32(model):
            wide = model(ids).logits
        half = model(ids).logits
    assert seen == [torch.float32, torch.bfloat16]
    assert (wide.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_a_packs_visibility_follows_the_layers_to_their_device() -> None:
    (pack,) = plan([memory_episode(np.random.default_rng(1), "m")])
    here = Visibility.of(pack, torch.device("cpu"))
    there = here.to("meta")
    assert here.to("cpu") is here
    assert there.path_K.is_meta and there.visible_from_K.is_meta and there.visible_until_K.is_meta
    assert here.to("meta") is there and there.spans is here.spans, "what a backend makes is made once a device"
    assert there.made is not here.made


def test_weights_that_a_map_would_have_to_write_to_disk_are_refused(tmp_path: Path) -> None:
    folder = save_model(tiny_model("mixtral"), tmp_path / "m")
    with pytest.raises(InputError, match="E-MODEL-LOAD.*offloaded to the disk"):
        load(folder, device_map=ON_DISK)


def test_a_map_and_a_plan_at_once_and_unknown_ones_are_refused(toy: Toy) -> None:
    with pytest.raises(UsageError, match="one of --device-map and --tp-plan"):
        load(toy.teacher, device_map="auto", tp_plan="auto")
    with pytest.raises(UsageError, match="tensor-parallel plan 'mine'"):
        load(toy.teacher, tp_plan="mine")
    with pytest.raises(InputError, match="E-MODEL-LOAD"):
        load(toy.teacher, device_map="nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_that_share_a_teacher_give_its_scores(dtype: str, toy: Toy, tmp_path: Path) -> None:
    score(toy.trace, toy.teacher, tmp_path / "plain", dtype=dtype, signals=("hidden",), max_tokens=60, shard_tokens=60)
    more = ["--tp-plan", "auto", "--dtype", dtype, "--signal", "hidden", "--format", "json"]
    ended = run([*TORCHRUN, "-m", "memopd_scorer", "--", *toy.options(tmp_path / "s", *more)])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("shards_scored_now") == 1
    plain, shared = ScoresReader(tmp_path / "plain"), ScoresReader(tmp_path / "s")
    assert (tmp_path / "s" / "run.json").read_bytes() == (tmp_path / "plain" / "run.json").read_bytes(), "one teacher"
    assert len(shared) == len(plain)
    tolerance = {"float32": 1e-5, "bfloat16": 0.1}[dtype]
    for row in read(toy.trace).iter_invocations():
        ours, theirs = shared.get(*row.key), plain.get(*row.key)
        assert ours is not None and theirs is not None
        np.testing.assert_allclose(ours.logprob, theirs.logprob, atol=tolerance)


@pytest.mark.slow
def test_a_teacher_whose_code_has_no_plan_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_model(tiny_model("gpt2"), tmp_path / "gpt2")
    toy = Toy(tmp_path / "toy", rollouts=1)
    options = [str(toy.trace), "--teacher", str(folder), "-o", str(tmp_path / "s"), "--tp-plan", "auto"]
    ended = run([*TORCHRUN, "-m", "memopd_scorer", "--", *options])
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert "E-MODEL-LOAD" in line and "has no `tp_plan`" in line and "exitcode  : 3" in ended.stderr
    assert not (tmp_path / "s").exists()
