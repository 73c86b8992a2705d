"""In half precision the probe says what it says in float32: rounding hides no leak, and is not taken for one."""

from __future__ import annotations

import pytest
import torch
from helpers_architectures import TYPES, VARIANTS, VOCABULARY, tiny
from helpers_scorer import SIZE, tiny_model
from test_architectures import need_its_version, table
from torch import nn
from transformers import PreTrainedModel

from memopd_scorer import probing
from memopd_scorer.attention import sdpa
from memopd_scorer.head import head_of
from memopd_scorer.precision import in_float32
from memopd_scorer.probing import probe
from memopd_scorer.teacher import quiet_transformers
from memopd_trace.errors import InputError

HALF = [torch.bfloat16, torch.float16]
EXACT = ["llama", "gemma3_text", "gpt2", "gpt_oss", "mixtral", "deepseek_v3", "flint", "qwen2, windows"]
OTHERS = ["mamba", "bloom", "git", "roberta, decoder", "phi3, longrope", "llama4_text", "bert", "gemma3, bidirectional"]
VERDICTS = {"tree": "exact", "single": "alone"}
# Transformers mixes float32 and half precision in them, which torch refuses.
NOT_IN_HALF = {"inkling2_loop_text", "inkling2_text"}


def verdict(name: str, dtype: torch.dtype) -> str:
    model_type, overrides = VARIANTS.get(name, (name, {}))
    with quiet_transformers():
        model = tiny(model_type, dtype, **overrides)
        try:
            return VERDICTS[probe(model, head_of(model, VOCABULARY)).layout]
        except InputError:
            return "refused"


@pytest.mark.parametrize("name", [*EXACT, *OTHERS])
def test_a_type_is_judged_in_bfloat16_as_in_float32(name: str) -> None:
    need_its_version()
    expected = table()[name][1]
    assert (expected == "exact") == (name in EXACT)
    assert verdict(name, torch.bfloat16) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
def test_every_type_is_judged_in_half_precision_as_in_float32(dtype: torch.dtype) -> None:
    need_its_version()
    page = {name: said for name, (_, said) in table().items() if said != "not built"}
    assert page.keys() <= {*TYPES, *VARIANTS} and list(page.values()).count("alone") > 60
    page.update(dict.fromkeys(NOT_IN_HALF, "refused"))
    assert {name: verdict(name, dtype) for name in page} == page


class Leak(nn.Module):
    """Adds a little of every token to all later ones, wherever a pack's boundaries are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden + 3e-4 * hidden.cumsum(1))


def states_of(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The probe's states packed and alone, as the model's own dtype gives them."""
    states = probing._probe_states(SIZE, 12)
    (pack,) = probing.plan_states([states])
    with torch.no_grad():
        packed = probing._by_state(pack, probing.states_at_rows(model, pack))
        return torch.cat(packed), torch.cat(probing._alone(model, states))


@pytest.mark.parametrize("dtype", HALF, ids=["bfloat16", "float16"])
def test_a_leak_smaller_than_the_rounding_is_found(dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = Leak(model.model.layers[1].mlp)
    model = model.to(dtype)
    packed, alone = states_of(model)
    seen = float((packed - alone).abs().max() / alone.abs().max())
    assert seen < 3e-2, "a tolerance for rounding would have let it pass"
    capability = probe(model, head_of(model, SIZE))
    assert capability.layout == "single" and "differ" in capability.reason


def test_what_only_half_precision_gets_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sdpa.attend

    def wrong(module, query, key, value, *args, **options):  # type: ignore[no-untyped-def]
        if value.dtype == torch.bfloat16:
            value = value + 0.02 * value.abs().amax() * torch.randn(
                value.shape, generator=torch.Generator().manual_seed(0)
            ).to(value)
        return right(module, query, key, value, *args, **options)

    model = tiny_model("llama", torch.float32).to(torch.bfloat16)
    head = head_of(model, SIZE)
    assert probe(model, head).layout == "tree"
    monkeypatch.setitem(probing_interface(), "memopd_by_span", wrong)
    capability = probe(model, head)
    assert capability.layout == "single" and "packed in bfloat16, its error is" in capability.reason


def probing_interface() -> dict[str, object]:
    from transformers import AttentionInterface

    return AttentionInterface._global_mapping


def test_a_model_is_run_in_float32_a_layer_at_a_time_and_is_what_it_was() -> None:
    model = tiny_model("llama", torch.float32, layers=4).to(torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wide: list[set[str]] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(
            lambda *_: wide.append({n for n, p in model.named_parameters() if p.dtype == torch.float32})
        )
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        rounded = model(ids).logits
        wide.clear()
        with in_float32(model):
            exact = model(ids).logits
        whole = tiny_model("llama", torch.float32, layers=4).to(torch.bfloat16).float()(ids).logits
        assert torch.equal(model(ids).logits, rounded)
    assert [{n.split(".")[2] for n in names} for names in wide[:4]] == [{"0"}, {"1"}, {"2"}, {"3"}]
    assert exact.dtype == torch.float32 and torch.equal(exact, whole)
    assert not torch.equal(exact, rounded.float())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, before[name]), name


def test_a_forward_that_breaks_off_leaves_the_weights_as_they_were() -> None:
    model = tiny_model("llama", torch.float32).to(torch.float16)
    model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), in_float32(model):
        model(torch.tensor([[5, 6]]))
    assert {p.dtype for p in model.parameters()} == {torch.float16}
