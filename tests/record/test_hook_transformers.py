"""A hooked model's `generate` gives what it would have given, and the trace holds what the model itself says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import STOP, tiny_tokenizer
from helpers_scorer import PACKABLE, PADDED, tiny_model
from transformers import MaxLengthCriteria, PreTrainedModel

from memopd_trace import TraceMetadata, read, validate
from memopd_trace.errors import UsageError
from memopd_trace.metadata import Producer
from memopd_trace.record import TraceRecorder
from memopd_trace.record.generation import TransformersHook
from memopd_trace.record.transformers import model_metadata

PAD = 0
IDS = torch.tensor([[PAD, PAD, 11, 12, 13], [21, 22, 23, 24, 25]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    found = tiny_model(PACKABLE[0])
    found.generation_config.pad_token_id = PAD
    found.generation_config.eos_token_id = STOP
    return found.eval()


def metadata(model: PreTrainedModel) -> TraceMetadata:
    entry = model_metadata(model, tiny_tokenizer(), name="m", stop_ids=[STOP])
    entry = entry.model_copy(update={"tokenizer": entry.tokenizer.model_copy(update={"size": PADDED})})
    return TraceMetadata(producer=Producer(name="test"), models={"m": entry})


def record(model: PreTrainedModel, path: Path, **more: Any) -> tuple[Any, list[Any]]:
    """(what `generate` gave, the rows in the trace): two prompts, an episode each, validated for training."""
    with TraceRecorder(path, metadata(model), profile="train") as recorder:
        hook = TransformersHook(model, recorder)
        episodes = [recorder.episode(f"e{i}", group_id=f"g{i}", task_id="t", policy_version=0) for i in range(2)]
        torch.manual_seed(3)
        with hook.into(*episodes):
            found = hook.generate(IDS, attention_mask=MASK, **more)
        for episode in episodes:
            episode.finish(reward=1.0)
    assert not hook.skipped and not hook.notes
    report = validate(path, "train")
    assert report.exit_code() == 0, report.to_text()
    return found, list(read(path).iter_invocations())


SETTINGS = [
    {"do_sample": False},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "temperature": 1.3, "top_k": 9, "top_p": 0.8},
    {"do_sample": True, "top_k": 0, "min_p": 0.05},
    {"do_sample": True, "temperature": 0.9, "num_return_sequences": 3},
]


@pytest.mark.parametrize("more", SETTINGS, ids=str)
def test_rows_hold_what_the_model_says_of_what_it_sampled(
    model: PreTrainedModel, tmp_path: Path, more: dict[str, Any]
) -> None:
    asked = {"max_new_tokens": 12, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    found, rows = record(model, tmp_path / "t.parquet", **asked, **more)
    torch.manual_seed(3)
    plain = model.generate(IDS, attention_mask=MASK, **asked, **more)
    assert found.sequences.tolist() == plain.sequences.tolist(), "the hook changes nothing of what is sampled"
    copies = more.get("num_return_sequences", 1)
    assert len(rows) == 2 * copies
    for place, row in enumerate(rows):
        prompt = IDS[place // copies][MASK[place // copies].bool()]
        assert row.prompt_ids.tolist() == prompt.tolist(), "without its padding"
        ids = row.output_ids.tolist()
        assert ids == plain.sequences[place, 5 : 5 + len(ids)].tolist()
        assert (
            row.finish_reason == ("stop" if ids[-1] == STOP else "length") and len(ids) in (ids.index(STOP) + 1,)
            if (STOP in ids)
            else len(ids) == 12
        )
        for t, token in enumerate(ids):
            raw = plain.logits[t][place].log_softmax(-1)
            assert row.output_logprobs[t] == pytest.approx(float(raw[token]), abs=1e-5)
            if row.output_kept_logmass is not None:
                tempered = (plain.logits[t][place] / more.get("temperature", 1.0)).softmax(-1)
                kept = float(tempered[plain.scores[t][place] > -torch.inf].sum().log())
                assert row.output_kept_logmass[t] == pytest.approx(kept, abs=1e-4)
    assert (rows[0].output_kept_logmass is None) == (not more["do_sample"] or more == SETTINGS[1])
    assert [i.relation for i in rows[:copies]] == ["root", *["fork"] * (copies - 1)]


def test_a_row_ends_where_it_was_stopped_and_not_where_the_batch_was(model: PreTrainedModel, tmp_path: Path) -> None:
    free, _ = record(model, tmp_path / "free.parquet", max_new_tokens=12, do_sample=True, top_k=0)
    tokenizer = tiny_tokenizer()
    word = tokenizer.decode(free[0, 7:8])
    assert word, "the third token of the first prompt has a text"
    found, rows = record(
        model,
        tmp_path / "t.parquet",
        max_new_tokens=12,
        do_sample=True,
        top_k=0,
        stop_strings=word,
        tokenizer=tokenizer,
    )
    torch.manual_seed(3)
    more = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "stop_strings": word, "tokenizer": tokenizer}
    assert found.tolist() == model.generate(IDS, attention_mask=MASK, **more).tolist()
    assert rows[0].finish_reason == "stop" and 1 <= len(rows[0].output_ids) <= 3
    assert rows[0].output_ids.tolist() == free[0, 5 : 5 + len(rows[0].output_ids)].tolist()
    assert len(rows[1].output_ids) > len(rows[0].output_ids), "the other one went on"


def test_a_criterion_of_the_caller_ends_rows_too(model: PreTrainedModel, tmp_path: Path) -> None:
    more = {"do_sample": False, "stopping_criteria": [MaxLengthCriteria(8)], "max_new_tokens": 12}
    _, rows = record(model, tmp_path / "t.parquet", **more)
    assert [(len(i.output_ids), i.finish_reason) for i in rows] == [(3, "length")] * 2


def test_a_cache_that_goes_on_is_the_same_call(model: PreTrainedModel, tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.parquet", metadata(model), profile="lineage") as recorder:
        hook, episode = TransformersHook(model, recorder), recorder.episode("e")
        more = {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 4, "eos_token_id": None}
        with hook.into(episode):
            first = hook.generate(IDS[1:], **more)
            again = torch.cat([first.sequences, torch.tensor([[31, 32]])], 1)
            hook.generate(again, past_key_values=first.past_key_values, **more)
        episode.finish()
    _, row = read(tmp_path / "t.parquet").iter_invocations()
    assert row.relation == "extend" and row.prompt_ids.tolist() == again[0].tolist()
    with torch.no_grad():
        logits = model(torch.tensor(row.sequence_ids[None].astype(np.int64))).logits[0, len(row.prompt_ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(row.output_ids[:, None].astype(np.int64)))[:, 0]
    assert np.abs(row.output_logprobs - expected.numpy()).max() < 1e-4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"num_beams": 2}, "'num_beams' cannot be recorded"),
        ({"repetition_penalty": 1.2}, "'repetition_penalty' cannot be recorded"),
        ({"min_new_tokens": 1}, "'min_new_tokens' cannot be recorded"),
        ({"no_repeat_ngram_size": 1}, "'no_repeat_ngram_size' cannot be recorded"),
        ({"prompt_lookup_num_tokens": 3}, "'prompt_lookup_num_tokens' cannot be recorded"),
        ({"assistant_model": object()}, "'assistant_model' cannot be recorded"),
        ({"logits_processor": [object()]}, "'logits_processor' cannot be recorded"),
        ({"attention_mask": None}, "holds the padding id, and there is no attention_mask"),
        ({"attention_mask": MASK.flip(1)}, "not padded on the left"),
        ({"inputs": None}, "no token ids"),
        ({"stop_strings": "x"}, "stop_strings need the tokenizer"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_anything_is_sampled(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("it was run"))
    asked = {"inputs": IDS, "attention_mask": MASK, "max_new_tokens": 2} | more
    with TraceRecorder(tmp_path / "t.parquet", metadata(model), profile="core") as recorder:
        hook, episode = TransformersHook(model, recorder), recorder.episode("e")
        with hook.into(episode) as made, pytest.raises(UsageError, match=message):
            hook.generate(**asked)
        episode.discard()
    assert not made
