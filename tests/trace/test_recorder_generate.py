"""Sampling: recorded log-probabilities are the model's own, and a row of a batch is what it is alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import STOP, tiny_tokenizer
from helpers_scorer import PACKABLE, tiny_model
from helpers_scorer import PADDED as VOCAB
from numpy.typing import NDArray
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from memopd_trace import Sampling
from memopd_trace.errors import InputError, UsageError
from memopd_trace.record.fingerprint import (
    config_digest,
    json_digest,
    tokenizer_fingerprint,
    tokenizer_size,
    vocabulary_fingerprint,
    weights_digest,
)
from memopd_trace.record.sampling import Generated, draw
from memopd_trace.record.transformers import generate, model_metadata

NEW = 20
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def prompts(*lengths: int, seed: int = 0) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n) for n in lengths]


def sample(model: PreTrainedModel, ids: list[Any], **more: Any) -> list[Generated]:
    settings = {"sampling": Sampling(temperature=0.9), "seeds": range(len(ids)), "stop_ids": [STOP]}
    return generate(model, ids, **{"max_new_tokens": NEW, **settings, **more})


@torch.no_grad()
def plain_logits(model: PreTrainedModel, prompt: Any, output: NDArray[np.int32]) -> torch.Tensor:
    """[M, V]: logits before each output token, by one plain forward over prompt and output."""
    ids = torch.tensor(np.concatenate([prompt, output]).astype(np.int64))[None]
    return model(ids).logits[0, len(prompt) - 1 : -1]  # type: ignore[no-any-return]


def logprobs_of(logits_MV: torch.Tensor, ids: NDArray[np.int32]) -> NDArray[np.float64]:
    chosen = logits_MV.log_softmax(-1).gather(1, torch.tensor(ids.astype(np.int64))[:, None])
    return chosen[:, 0].double().numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", PACKABLE)
def test_a_plain_forward_gives_the_recorded_logprobs(kind: str, dtype: torch.dtype) -> None:
    model, ids = tiny_model(kind, dtype=dtype), prompts(5, 17, 1, 30)
    outputs = sample(model, ids)
    assert len({len(p) for p in ids}) == 4, "rows are padded"
    for prompt, output in zip(ids, outputs, strict=True):
        again = logprobs_of(plain_logits(model, prompt, output.output_ids), output.output_ids)
        assert len(again) == len(output.output_ids) > 0
        np.testing.assert_allclose(output.logprobs, again, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", PACKABLE)
def test_a_row_of_a_batch_is_what_it_is_alone(kind: str) -> None:
    model, ids = tiny_model(kind), prompts(5, 17, 1, 30, 17)
    ids[4] = ids[1]  # equal prompts share their prefill
    together = sample(model, ids)
    for number, prompt in enumerate(ids):
        (alone,) = sample(model, [prompt], seeds=[number])
        assert alone.output_ids.tolist() == together[number].output_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together[number].logprobs, rtol=0, atol=1e-5)
    assert together[1].output_ids.tolist() != together[4].output_ids.tolist(), "their seeds differ"


def test_rows_that_stop_leave_the_batch_and_the_others_go_on_undisturbed() -> None:
    model, ids = tiny_model(), prompts(*range(4, 12))
    stops = list(range(0, VOCAB, 8))
    outputs = sample(model, ids, stop_ids=stops)
    lengths = {len(o.output_ids) for o in outputs}
    assert len(lengths) > 3, "rows stop at different steps"
    for number, (prompt, output) in enumerate(zip(ids, outputs, strict=True)):
        inner, last = output.output_ids[:-1], output.output_ids[-1]
        assert not set(inner.tolist()) & set(stops), "nothing follows a stop id"
        assert output.finish_reason == ("stop" if last in stops else "length")
        assert output.finish_reason == "stop" or len(output.output_ids) == NEW
        (alone,) = sample(model, [prompt], seeds=[number], stop_ids=stops)
        assert alone.output_ids.tolist() == output.output_ids.tolist()


def test_one_seed_gives_one_output_wherever_its_row_stands() -> None:
    model, ids = tiny_model(), prompts(9, 9, 9)
    first, second = sample(model, ids, seeds=[7, 8, 9]), sample(model, ids[::-1], seeds=[9, 8, 7])
    for a, b in zip(first, second[::-1], strict=True):
        assert a.output_ids.tolist() == b.output_ids.tolist()
        assert a.sampling == b.sampling
    assert [o.sampling.seed for o in first] == [7, 8, 9]
    again = sample(model, ids[1:2], seeds=[first[1].sampling.seed])
    assert again[0].output_ids.tolist() == first[1].output_ids.tolist(), "one call is repeated from its own record"
    assert sample(model, ids, seeds=[17, 18, 19])[0].output_ids.tolist() != first[0].output_ids.tolist()


def test_temperature_zero_takes_the_most_likely_id() -> None:
    model, ids = tiny_model(), prompts(6, 11)
    for prompt, output in zip(ids, sample(model, ids, sampling=Sampling(temperature=0), seeds=None), strict=True):
        logits = plain_logits(model, prompt, output.output_ids)
        assert output.output_ids.tolist() == logits.argmax(-1).tolist()
        np.testing.assert_allclose(output.logprobs, logprobs_of(logits, output.output_ids), atol=1e-5)
        assert (output.sampling.seed, output.kept_logmass) == (None, None)


RESTRICTIONS = [
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.6),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05),
]


@pytest.mark.parametrize("sampling", RESTRICTIONS, ids=str)
def test_restrictions_keep_what_transformers_keeps_and_record_its_mass(sampling: Sampling) -> None:
    model, ids = tiny_model(dtype=torch.float64), prompts(6, 11, 3)
    warpers: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    cut = 0
    for prompt, output in zip(ids, sample(model, ids, sampling=sampling), strict=True):
        raw = plain_logits(model, prompt, output.output_ids)
        scores = raw
        for warper in warpers:
            scores = warper(None, scores)
        kept = scores.isfinite()
        chosen = torch.tensor(output.output_ids.astype(np.int64))
        assert kept.gather(1, chosen[:, None]).all(), "only kept ids are drawn"
        cut += int((~kept).sum())
        tempered = (raw / sampling.temperature).log_softmax(-1)
        mass = tempered.masked_fill(~kept, -math.inf).logsumexp(-1)
        assert output.kept_logmass is not None
        np.testing.assert_allclose(output.kept_logmass, mass.numpy(), rtol=0, atol=1e-9)
        np.testing.assert_allclose(output.logprobs, logprobs_of(raw, output.output_ids), rtol=0, atol=1e-10)
    assert cut > 0, "something was left out"


def test_samples_follow_the_tempered_distribution() -> None:
    model, (prompt,) = tiny_model(), prompts(8)
    n = 4000
    outputs = sample(model, [prompt] * n, sampling=Sampling(temperature=1.5), max_new_tokens=1, seeds=range(n))
    drawn = np.bincount([int(o.output_ids[0]) for o in outputs], minlength=VOCAB)
    expected = n * (plain_logits(model, prompt, np.zeros(1, np.int32)) / 1.5).softmax(-1)[0].double().numpy()
    large = expected >= 5
    statistic = (((drawn - expected)[large]) ** 2 / expected[large]).sum()
    degrees = int(large.sum()) - 1
    assert degrees > 10
    assert statistic < degrees + 4 * math.sqrt(2 * degrees), "chi-squared, four standard deviations"


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_the_ends_of_the_unit_interval_draw_no_impossible_id(uniform: float) -> None:
    logits = torch.tensor([[-50.0, 1.0, -50.0, 1.0, -50.0]])
    (token,), _, (kept,) = draw(logits, Sampling(temperature=1.0, min_p=0.5), np.array([uniform]))
    assert token == (1 if uniform == 0 else 3)
    assert kept == pytest.approx(0, abs=1e-6)


def test_a_given_size_is_the_whole_vocabulary() -> None:
    model, ids, size = tiny_model(), prompts(6, 9), 40
    ids = [p % size for p in ids]
    outputs = sample(model, ids, size=size, sampling=Sampling(temperature=2.0))
    assert max(int(o.output_ids.max()) for o in sample(model, ids, sampling=Sampling(temperature=2.0))) >= size
    for prompt, output in zip(ids, outputs, strict=True):
        assert output.output_ids.max() < size
        real = plain_logits(model, prompt, output.output_ids)[:, :size]
        np.testing.assert_allclose(output.logprobs, logprobs_of(real, output.output_ids), rtol=0, atol=1e-5)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no temperature": ({"sampling": Sampling()}, "temperature is None"),
    "a negative temperature": ({"sampling": Sampling(temperature=-1.0)}, "temperature is -1"),
    "top_p above 1": ({"sampling": Sampling(temperature=1.0, top_p=1.5)}, "top_p is 1.5"),
    "top_p of 0": ({"sampling": Sampling(temperature=1.0, top_p=0.0)}, "top_p is 0"),
    "a penalty": ({"sampling": Sampling(temperature=1.0, repetition_penalty=1.2)}, "repetition_penalty 1.2"),
    "no seeds": ({"seeds": None}, "0 seeds for 1 prompts"),
    "a negative seed": ({"seeds": [-1]}, "seed -1"),
    "no room": ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    "too long": ({"max_new_tokens": 510}, "514 tokens, the model has 512 positions"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_settings_that_cannot_be_run_are_refused(mistake: str) -> None:
    settings, message = MISTAKES[mistake]
    with pytest.raises(UsageError, match=message):
        sample(tiny_model(), prompts(4), **settings)


def test_models_that_cannot_be_sampled_are_refused() -> None:
    with pytest.raises(UsageError, match="prompt 1 is empty"):
        sample(tiny_model(), [[5], []])
    with pytest.raises(UsageError, match="training mode"):
        sample(tiny_model().train(), prompts(4))
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4)).eval()
    with pytest.raises(UsageError, match="MambaForCausalLM does not keep all of its state"):
        sample(mamba, prompts(4, 4))
    broken = tiny_model()
    with torch.no_grad():
        broken.get_input_embeddings().weight[5] = math.nan
    with pytest.raises(InputError, match="prompt 1: the model's logits after 0 tokens are not numbers"):
        sample(broken, [[6, 7], [5, 6]])
    assert sample(tiny_model(), []) == []


def test_metadata_describes_the_model_and_changes_with_it(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    model = tiny_model(vocab_size=size + 7)
    found = model_metadata(model, tokenizer, name="toy", policy_version=3)
    assert (found.name, found.dtype) == ("toy", "float32")
    assert found.policies["3"].weights_digest == found.weights_digest == weights_digest(model)
    t = found.tokenizer
    assert (t.size, t.vocab_size, t.bos_id, t.eos_ids, t.pad_id, t.stop_ids) == (size, size + 7, 1, [2], 0, [2])
    assert t.chat_template_digest == json_digest(tokenizer.chat_template)
    assert model_metadata(model, tokenizer, name="toy", stop_ids=[2, 3]).tokenizer.stop_ids == [2, 3]

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert weights_digest(loaded) == found.weights_digest, "the digest survives a save"
    assert config_digest(loaded) == found.config_digest
    with torch.no_grad():
        next(loaded.parameters())[0, 0] += 1e-3
    assert weights_digest(loaded) != found.weights_digest
    assert weights_digest(tiny_model(vocab_size=size + 7, dtype=torch.float64)) != found.weights_digest
    assert config_digest(tiny_model(layers=1)) != config_digest(tiny_model(layers=2))


def test_a_tokenizers_fingerprint_is_that_of_its_ids(tmp_path: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    before = tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == before, "it survives a save"
    tokenizer(["a", "longer one"], padding=True, truncation=True, max_length=3)
    assert tokenizer_fingerprint(tokenizer) == before, "settings of a call do not count"
    tokenizer.add_tokens(["<|tool|>"])
    assert tokenizer_fingerprint(tokenizer) != before, "a new id does"
    assert tokenizer_size(tokenizer) == len(tokenizer)
    assert vocabulary_fingerprint({"a": 0, "b": 1}) != vocabulary_fingerprint({"a": 1, "b": 0})
    assert tokenizer_size(type("Holes", (), {"get_vocab": lambda self: {"a": 0, "b": 9}})()) == 10
