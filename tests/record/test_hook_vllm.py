"""The hook of vLLM's `LLM`, over plain objects with the members of its 0.32 (see `test_hook_docs` for the real one)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers_hooks import metadata, rows

from memopd_trace.errors import UsageError
from memopd_trace.record import TraceRecorder
from memopd_trace.record.hook import Turn
from memopd_trace.record.vllm import VllmHook


@dataclass
class Params:
    """The settings that are read of `SamplingParams`."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None

    def clone(self) -> Params:
        return copy.copy(self)


@dataclass
class Engine:
    """Answers from `answers`; `asked` is what it was told."""

    answers: list[Any] = field(default_factory=list)
    mode: str = "raw_logprobs"
    asked: list[Any] = field(default_factory=list)

    @property
    def model_config(self) -> Any:
        return SimpleNamespace(logprobs_mode=self.mode)

    def get_default_sampling_params(self) -> Params:
        return Params(temperature=0.5)

    def generate(self, prompts: Any, params: Any, **more: Any) -> list[Any]:
        self.asked.append(params)
        if not self.answers:
            raise ValueError("the engine is dead")
        return self.answers

    chat = generate


def output(ids: list[int], index: int = 0, **more: Any) -> Any:
    places: list[Any] = [
        {i: SimpleNamespace(logprob=-0.5 - n), 1: SimpleNamespace(logprob=-9.0)} for n, i in enumerate(ids)
    ]
    members = {"finish_reason": "length", "stop_reason": None, "weight_versions": None, "routed_experts": None}
    shown = {"logprobs": places, "cumulative_logprob": -1.0}
    return SimpleNamespace(index=index, token_ids=tuple(ids), text="", **(members | shown | more))


def answer(prompt: list[int] | None, *outputs: Any, **more: Any) -> Any:
    members = {"request_id": "0", "lora_request": None, "encoder_prompt_token_ids": None}
    return SimpleNamespace(prompt_token_ids=prompt, outputs=list(outputs), **(members | more))


def record(path: Path, engine: Engine, prompts: Any, params: Any = None, **turn: Any) -> tuple[Any, VllmHook]:
    with TraceRecorder(path, metadata(), profile="core") as recorder:
        hook = VllmHook(engine, recorder, notice=lambda message: None)
        episode = recorder.episode("e")
        with hook.into(Turn(episode=episode, **turn)):
            found = hook.generate(prompts, params)
        episode.finish() if episode.invocations else episode.discard()
    return found, hook


def test_outputs_are_rows_and_the_caller_gets_what_it_asked_for(tmp_path: Path) -> None:
    engine = Engine([answer([5, 6], output([7, 8]), output([9, 2], 1, finish_reason="stop", stop_reason="."))])
    params = Params(n=2, top_k=-1, seed=3, presence_penalty=0.5, logit_bias={3: 1.0})
    found, hook = record(tmp_path / "t.parquet", engine, "a text", params, reward=0.25)
    assert params.logprobs is None and engine.asked[0].logprobs == 0, "asked for in a copy"
    assert [o.logprobs for o in found[0].outputs] == [None, None]
    one, two = rows(tmp_path / "t.parquet")
    assert (one.relation, two.relation, two.parent_index) == ("root", "fork", 0)
    assert one.output_logprobs is not None and one.output_logprobs.tolist() == [-0.5, -1.5]
    assert one.sampling is not None and (one.sampling.top_k, one.sampling.seed) == (0, 3)
    assert (one.reward, two.reward) == (0.25, None) and two.finish_reason == "stop"
    more = {"presence_penalty": "0.5", "constraints": "logit_bias", "response_id": "0"}
    assert two.extra == {"choice": "1", "stop_reason": ".", **more}
    assert not hook.skipped


@pytest.mark.parametrize(
    ("mode", "kind"), [("raw_logprobs", "raw"), ("processed_logprobs", "processed"), ("raw_logits", None)]
)
def test_the_engines_mode_says_what_its_numbers_are(tmp_path: Path, mode: str, kind: str | None) -> None:
    engine = Engine([answer([5], output([7]))], mode)
    found, _ = record(tmp_path / "t.parquet", engine, [5], Params(logprobs=1))
    (row,) = rows(tmp_path / "t.parquet")
    assert row.logprob_kind == kind and (row.output_logprobs is None) == (kind is None)
    assert found[0].outputs[0].logprobs is not None, "what the caller asked for is left as it is"


def test_versions_of_the_weights_are_the_engines(tmp_path: Path) -> None:
    spans = [SimpleNamespace(version="4", start=0, end=1)]
    engine = Engine([answer([5], output([7], weight_versions=spans))])
    record(tmp_path / "one.parquet", engine, "x")
    assert rows(tmp_path / "one.parquet")[0].policy_version == 4
    spans = [*spans, SimpleNamespace(version="5", start=1, end=2)]
    record(tmp_path / "two.parquet", Engine([answer([5], output([7, 8], weight_versions=spans))]), "x")
    (row,) = rows(tmp_path / "two.parquet")
    assert row.policy_version is None and (row.extra or {})["weight_versions"] == '[["4", 0, 1], ["5", 1, 2]]'


def test_a_token_without_a_number_is_not_trained(tmp_path: Path) -> None:
    filler = [{7: SimpleNamespace(logprob=-9999.0)}, {8: SimpleNamespace(logprob=-1.0)}]
    record(tmp_path / "t.parquet", Engine([answer([5], output([7, 8], logprobs=filler))]), "x")
    (row,) = rows(tmp_path / "t.parquet")
    assert row.output_logprobs is not None and np.ma.getmaskarray(row.output_logprobs).tolist() == [True, False]
    assert row.output_loss_mask is not None and row.output_loss_mask.tolist() == [False, True]


@pytest.mark.parametrize(
    ("prompt", "given", "reason"),
    [
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, answer([5], output([7])), "media"),
        ({"prompt_embeds": 1}, answer([5], output([7])), "prompt embeddings"),
        ("x", answer(None, output([7])), "the upstream gives no ids"),
        ("x", answer([5], output([])), "an output without ids"),
        ("x", answer([5], output([7]), encoder_prompt_token_ids=[1]), "an encoder's input"),
        (
            "x",
            answer([5], output([7]), lora_request=SimpleNamespace(lora_name="l")),
            "a model (l) that is not its episode's (toy)",
        ),
        ("x", answer([5], output([9999])), "no valid row (E-ID-RANGE)"),
    ],
)
def test_what_cannot_be_recorded_is_counted(tmp_path: Path, prompt: Any, given: Any, reason: str) -> None:
    found, hook = record(tmp_path / "t.parquet", Engine([given]), prompt)
    assert found == [given] and hook.skipped == {reason: 1}


def test_failed_calls_and_wrong_numbers_of_turns_leave_nothing(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.parquet", metadata(), profile="core") as recorder:
        engine = Engine()
        hook, one, two = VllmHook(engine, recorder), recorder.episode("one"), recorder.episode("two")
        with hook.into(one) as made, pytest.raises(ValueError, match="the engine is dead"):
            hook.chat([{"role": "user", "content": "x"}])
        with hook.into(one, two), pytest.raises(UsageError, match="2 turns for 3 calls"):
            hook.generate(["a", "b", "c"])
        with hook.into(one), pytest.raises(UsageError, match="1 sampling_params for 2 prompts"):
            hook.generate([[1, 2], [3]], [Params()])
        one.discard(), two.discard()
    assert not made and len(engine.asked) == 1


@pytest.mark.parametrize(
    ("prompts", "given", "reason"),
    [
        ([], [], None),
        (["a", "b"], [answer([5], output([7]))], "1 answers to 2 prompts"),
        ("a", [answer([5], output([10**12]))], "no valid row (output: id"),
        ("a", [answer(["x"], output([7]))], "no valid row (prompt: expected"),
        ("a", [answer([5], output([7], weight_versions=[object()]))], "not understood (AttributeError"),
        ("a", [answer([5], output([7], routed_experts="x"))], "not understood (ValueError"),
    ],
)
def test_what_the_engine_gave_reaches_its_caller_whatever_the_hook_makes_of_it(
    tmp_path: Path, prompts: Any, given: list[Any], reason: str | None
) -> None:
    class Silent(Engine):
        def generate(self, prompts: Any, params: Any, **more: Any) -> list[Any]:
            return self.answers

    found, hook = record(tmp_path / "t.parquet", Silent(given), prompts)
    assert found is given and len(hook.skipped) == (reason is not None)
    assert all(why.startswith(reason or "") for why in hook.skipped)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1"])
def test_a_reward_that_is_no_number_is_refused_before_anything_is_sampled(tmp_path: Path, reward: Any) -> None:
    engine = Engine([answer([5], output([7]))])
    with pytest.raises(UsageError, match="no finite number"):
        record(tmp_path / "t.parquet", engine, "x", reward=reward)
    assert not engine.asked
