"""The probe tells what a model can do; what it cannot do exactly is scored alone or refused by name, never silently."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_scorer import PACKABLE, PADDED, SIZE, growing_episode, memory_episode, save_model, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, PreTrainedModel

from memopd_scorer.attention import UnsupportedAttentionError, states_at_rows
from memopd_scorer.head import head_of
from memopd_scorer.plan import plan
from memopd_scorer.teacher import LoadedModel, load, probe
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode, Invocation


class Cumulative(nn.Module):
    """A layer that mixes every token into all later ones, wherever a pack's boundaries are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden + 0.1 * hidden.cumsum(1))


@pytest.mark.parametrize("kind", PACKABLE)
def test_attention_models_are_packable(kind: str) -> None:
    model = tiny_model(kind)
    capability = probe(model, head_of(model, SIZE))
    assert capability.layout == "tree"
    assert capability.error is not None and capability.error <= 1e-5


def test_a_recurrent_model_is_detected_and_scored_alone(tmp_path: Path) -> None:
    folder = save_model(tiny_model("mamba"), tmp_path / "mamba")
    teacher = load(folder)
    assert teacher.capability.layout == "single"
    assert "linear_attention" in teacher.capability.reason
    assert teacher.layout("tree") == "single"
    (pack, *_) = plan([growing_episode(np.random.default_rng(0), "e")], layout="single")
    assert teacher.states(pack).shape == (len(pack.rows_R), 32)


def test_a_layer_that_ignores_boundaries_is_found_out() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = Cumulative(model.model.layers[1].mlp)
    capability = probe(model, head_of(model, SIZE))
    assert capability.layout == "single"
    assert capability.error is not None and capability.error > 1e-3
    assert "differ" in capability.reason


def test_a_window_wider_than_the_probe_is_still_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gemma3")
    for module in [model.config, *model.modules()]:
        if getattr(module, "sliding_window", None):
            module.sliding_window = 400  # longer than any probe sequence
    monkeypatch.setattr("memopd_scorer.attention.sdpa.read_call", _without_window())
    assert probe(model, head_of(model, SIZE)).layout == "single"
    assert model.config.sliding_window == 400, "the probe must put windows back"


def _without_window() -> object:
    from memopd_scorer.attention.visibility import read_call

    def broken(module, query, key, value, attention_mask, options):  # type: ignore[no-untyped-def]
        options.pop("sliding_window", None)
        return read_call(module, query, key, value, attention_mask, options)

    return broken


def test_chunked_and_linear_layers_are_not_packed_on_the_probes_word() -> None:
    model = tiny_model("llama")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    assert "linear_attention" in probe(model, head_of(model, SIZE)).reason


def test_a_model_that_sees_the_tokens_after_a_token_is_refused() -> None:
    config = BertConfig(vocab_size=PADDED, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    model = BertLMHeadModel(config).eval()
    with pytest.raises(InputError, match="is not causal: a token's state changes by .* with the tokens after it"):
        probe(model, head_of(model, SIZE))


def test_a_model_that_does_not_repeat_itself_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].register_forward_hook(lambda module, given, out: out + 0.1 * torch.randn_like(out))
    with pytest.raises(InputError, match="does not repeat itself: two runs of the same tokens differ"):
        probe(model, head_of(model, SIZE))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_know_the_longest_sequence_are_not_packed(kind: str) -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {"full_attention": {"rope_type": kind}, "sliding_attention": None}
    capability = probe(model, head_of(model, SIZE))
    assert capability.layout == "single" and f"rotary embeddings of type {kind}" in capability.reason


def test_no_logits_are_made_on_the_way_to_the_states() -> None:
    model = tiny_model("llama")
    (pack,) = plan([memory_episode(np.random.default_rng(0), "e")])
    ran: list[str] = []
    model.lm_head.register_forward_hook(lambda module, given, out: ran.append("head"))
    model.model.norm.register_forward_hook(lambda module, given, out: ran.append("body"))
    assert states_at_rows(model, pack).shape == (len(pack.rows_R), 32)
    assert ran == ["body"]
    model(torch.tensor([[5, 6]]))
    assert ran == ["body", "body", "head"], "the model itself runs its head as before"


def test_a_head_that_is_not_the_models_is_refused() -> None:
    model = tiny_model("llama")
    head = head_of(model, SIZE)
    with torch.no_grad():
        other = type(head)(head.weight_VD.clone() * 1.5, None, head.logit_scale, head.softcap, head.size)
    with pytest.raises(InputError, match="E-MODEL-UNSUPPORTED"):
        probe(model, other)


def test_a_softcapped_head_is_honoured() -> None:
    head = head_of(tiny_model("gemma3"), SIZE)
    assert head.softcap == 10.0
    assert head.logits(torch.full((1, 32), 1e3)).abs().max() <= 10.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_what_the_backends_do_not_compute_is_refused_by_name(options: dict[str, object], named: str) -> None:
    from memopd_scorer.attention import Visibility
    from memopd_scorer.attention.sdpa import attend

    (pack,) = plan([memory_episode(np.random.default_rng(0), "e")])
    q = torch.zeros(1, 2, len(pack), 4)
    visibility = Visibility.of(pack, torch.device("cpu"))
    with pytest.raises(UnsupportedAttentionError, match=named):
        attend(nn.Identity(), q, q, q, None, memopd_visibility=visibility, **options)
    with pytest.raises(UnsupportedAttentionError, match="mask of the model's own"):
        attend(nn.Identity(), q, q, q, torch.zeros(1), memopd_visibility=visibility)
    with pytest.raises(UnsupportedAttentionError, match="drops unknown keyword arguments"):
        attend(nn.Identity(), q, q, q, None)


def test_recorded_visibility_needs_a_model_that_can_honour_it(tmp_path: Path) -> None:
    teacher = load(save_model(tiny_model("mamba"), tmp_path / "mamba"))
    row = memory_episode(np.random.default_rng(0), "e").invocations[0]
    until = [len(row)] * len(row)
    until[3] = 10
    (pack,) = plan([Episode("e", (row.replace(visible_until=until),))], layout="single")
    with pytest.raises(InputError, match="visibility"):
        teacher.states(pack)


def test_a_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    teacher = load(save_model(tiny_model("gpt2"), tmp_path / "gpt2"))
    (pack,) = plan([memory_episode(np.random.default_rng(0), "e")])
    once, twice = teacher.states(pack), teacher.states(pack)
    assert torch.equal(once, twice)
    teacher.model.train()
    with pytest.raises(UsageError, match="training mode"):
        teacher.states(pack)


def test_the_models_own_attention_is_put_back() -> None:
    model: PreTrainedModel = tiny_model("llama")
    before = model.config._attn_implementation
    (pack,) = plan([memory_episode(np.random.default_rng(0), "e")])
    states_at_rows(model, pack)
    assert model.config._attn_implementation == before
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            assert module.config._attn_implementation == before


@pytest.mark.parametrize("missing", ["nowhere", "./nowhere", "/nowhere/at/all"])
def test_a_missing_teacher_is_one_clear_line(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="cannot be loaded") as error:
        load(missing)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    folder = save_model(tiny_model("llama"), tmp_path / "pickled")
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="E-MODEL-LOAD"):
        load(folder)


def test_bad_names_are_usage_errors(tmp_path: Path) -> None:
    folder = save_model(tiny_model("llama"), tmp_path / "llama")
    for arguments in ({"dtype": "float8"}, {"backend": "fast"}, {"backend": "flash"}, {"device": "tpu:9"}):
        with pytest.raises(UsageError):
            load(folder, **arguments)  # type: ignore[arg-type]


def test_a_teacher_in_half_precision_is_probed_too(tmp_path: Path) -> None:
    teacher: LoadedModel = load(save_model(tiny_model("llama"), tmp_path / "llama"), dtype="bfloat16")
    assert teacher.capability.layout == "tree"


@pytest.mark.parametrize(("kind", "limit"), [("gpt2", "512 positions"), ("llama", "512 positions")])
def test_a_state_longer_than_the_model_reaches_is_refused(kind: str, limit: str, tmp_path: Path) -> None:
    teacher = load(save_model(tiny_model(kind), tmp_path / kind))
    row = Invocation(episode_id="e", invocation_index=0, model_id="m", prompt_ids=[5] * 512, output_ids=[6])
    (pack,) = plan([Episode("e", (row,))])
    with pytest.raises(InputError, match=f"{limit}, episode 'e', invocation 0 needs position 512"):
        teacher.states(pack)
    (far,) = plan([Episode("e", (row.replace(prompt_ids=[5], position_ids=[0, 600]),))])
    with pytest.raises(InputError, match="needs position 600"):
        teacher.states(far)
    (wide,) = plan([Episode("e", (row.replace(prompt_ids=[500]),))])
    with pytest.raises(InputError, match="104 token ids.*needs token id 500"):
        teacher.states(wide)


@pytest.mark.parametrize("change", ["no head", "no layer", "fewer layers", "narrower"])
def test_weights_and_config_that_do_not_fit_each_other_are_refused(change: str, tmp_path: Path) -> None:
    folder = save_model(tiny_model("llama"), tmp_path / "model")
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if change == "no head":
        del weights["lm_head.weight"]
    elif change == "no layer":
        weights = {k: v for k, v in weights.items() if ".layers.1." not in k}
    elif change == "fewer layers":
        config["num_hidden_layers"] = 2
    else:
        weights["model.norm.weight"] = weights["model.norm.weight"][:16].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="E-MODEL-LOAD") as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [{"num_attention_heads": 0}, {"num_hidden_layers": "x"}, {"head_dim": 7}])
def test_a_config_that_makes_no_model_is_one_line(change: dict[str, object], tmp_path: Path) -> None:
    folder = save_model(tiny_model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match="E-MODEL-LOAD"):
        load(folder)


def test_cut_weights_are_one_line(tmp_path: Path) -> None:
    folder = save_model(tiny_model("llama"), tmp_path / "model")
    data = (folder / "model.safetensors").read_bytes()
    for length in (0, 7, 100, len(data) // 2, len(data) - 1):
        (folder / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(InputError, match="E-MODEL-LOAD"):
            load(folder)


def test_a_missing_local_folder_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(InputError, match="no such folder: models/teacher"):
        load("models/teacher")


def test_a_name_that_the_hub_does_not_give_is_one_line_without_its_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    def unreachable(*_: object, **__: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")
        raise OSError("We couldn't connect\nto the hub")

    told: list[str] = []
    handler, hub = Told(), logging.getLogger("huggingface_hub")
    hub.addHandler(handler)
    try:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", unreachable)
        with pytest.raises(InputError, match="no such folder is here, and from the hub: We couldn't connect "):
            load("nomodels/teacher")
        assert told == []
        logging.getLogger("huggingface_hub.utils._http").warning("heard again")
        assert told == ["heard again"]
    finally:
        hub.removeHandler(handler)


def test_a_model_with_few_positions_is_probed_within_them() -> None:
    model = tiny_model("gpt2")
    model.config.n_positions = 20
    assert probe(model, head_of(model, SIZE)).layout == "tree"
    model.config.n_positions = 8
    assert "too few" in probe(model, head_of(model, SIZE)).reason


def test_a_model_whose_states_are_all_zero_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    torch.nn.init.zeros_(model.model.norm.weight)
    with pytest.raises(InputError, match=r"E-MODEL-UNSUPPORTED.*all its states are 0"):
        load(save_model(model, tmp_path / "m"))


def test_a_model_of_one_position_is_refused() -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 1
    with pytest.raises(InputError, match=r"E-MODEL-UNSUPPORTED.*1 position"):
        probe(model, head_of(model, SIZE))
