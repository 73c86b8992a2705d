"""Scale and softcap of a head are measured on the model's own logits; what is neither is refused by name."""

from __future__ import annotations

import pytest
import torch
from helpers_architectures import VOCABULARY, tiny
from helpers_scorer import SIZE, tiny_model
from torch import nn

from memopd_scorer.finish import finish_of
from memopd_scorer.head import head_of
from memopd_trace.errors import InputError


@pytest.mark.parametrize(
    ("name", "scale", "softcap"),
    [
        ("llama", 1.0, None),
        ("cohere", 0.75, None),  # multiplied by logit_scale
        ("granite", 0.4, None),  # divided by logits_scaling
        ("hyperclovax", 2.5, None),  # multiplied by logits_scaling
        ("minicpm3", 1.0, None),  # the states are divided before the head, which is handed them so
        ("falcon_h1", 1.25, None),  # multiplied by lm_head_multiplier
        ("gemma2", 1.0, 30.0),  # final_logit_softcapping
        ("recurrent_gemma", 1.0, 30.0),  # logits_soft_cap
        ("xlstm", 1.0, 30.0),  # output_logit_soft_cap
        ("phi", 1.0, None),  # a bias
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_scale_and_softcap_are_what_the_model_does(
    name: str, scale: float, softcap: float | None, dtype: torch.dtype
) -> None:
    head = head_of(tiny(name, dtype), VOCABULARY)
    assert (head.logit_scale, head.softcap) == (scale, softcap)
    assert (head.bias_V is not None) == (name == "phi")


def test_what_the_config_says_counts_only_if_the_model_does_it() -> None:
    model = tiny_model("llama")
    model.config.logit_scale, model.config.final_logit_softcapping = 0.5, 20.0
    assert finish_of(model, model.lm_head) == (1.0, None)


@pytest.mark.parametrize(
    "finish",
    [
        lambda z: z.clamp(-20, 20),
        lambda z: z + 0.01 * z**3,
        lambda z: z.log_softmax(-1),
        lambda z: z * torch.linspace(1, 2, z.shape[-1]),
        lambda z: z - z[..., :1],
        lambda z: z * float("nan"),
    ],
    ids=["clamped", "cubic", "normalised", "a scale for each token", "shifted", "nan"],
)
def test_another_finish_is_refused_by_name(finish: object) -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, given, out: finish(out))  # type: ignore[operator]
    with pytest.raises(InputError, match="LlamaForCausalLM: its logits are not scale and softcap") as error:
        head_of(model, SIZE)
    assert error.value.code == "E-MODEL-UNSUPPORTED"


def test_a_layer_with_a_forward_of_its_own_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="the linear layer that makes them .DoryLMHead."):
        head_of(tiny("dory"), VOCABULARY)


def test_a_model_that_cannot_be_run_on_ids_is_refused() -> None:
    model = tiny_model("llama")
    model.model.norm = nn.LayerNorm(7)
    with pytest.raises(InputError, match="cannot be run on token ids alone: RuntimeError"):
        head_of(model, SIZE)
