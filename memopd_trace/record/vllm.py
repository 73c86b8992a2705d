"""Record what vLLM's offline `LLM` samples: `generate` and `chat`, batches and several outputs a prompt included.

The ids are the engine's own: the prompt as it consumed it (rendered, truncated), and every sampled id, the stop id
included. Each output is a row; of several to one prompt the further ones are forks of the first.

Written against vLLM 0.32; imports nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from memopd_trace.errors import UsageError
from memopd_trace.metadata import Model
from memopd_trace.pieces import Pieces
from memopd_trace.record.call import Logprobs, Sampled
from memopd_trace.record.fingerprint import config_digest, tokenizer_metadata
from memopd_trace.record.hook import Hook, Into, now
from memopd_trace.record.modelfolder import SETTINGS, sampling_of
from memopd_trace.record.prompt import as_ids
from memopd_trace.record.proxy.answer import FINISH, NO_IDS, as_logprob
from memopd_trace.record.proxy.request import CONSTRAINTS, has_media, shaped_by
from memopd_trace.record.recorder import TraceRecorder

KINDS = {"raw_logprobs": "raw", "processed_logprobs": "processed"}  # the others are no log-probabilities
SHAPED = (*CONSTRAINTS, "presence_penalty", "frequency_penalty")


class VllmHook(Hook):
    """Records the calls of one `LLM`. Use it in its place: `generate` and `chat` take and give what the engine's do,
    and everything else is the engine's own, and not recorded.

    Example:
        metadata = TraceMetadata(producer=producer, models={"m": model_metadata(llm, name="m")})
        with TraceRecorder("trace.parquet", metadata, profile="policy") as recorder:
            hook = VllmHook(llm, recorder)
            episodes = [recorder.episode(f"q{i}/0", group_id=f"q{i}", policy_version=0) for i in range(2)]
            with hook.into(*episodes) as rows:
                answers = hook.generate(["Name a fruit.", "Name a tree."], params)
    """

    def __init__(
        self,
        llm: Any,
        recorder: TraceRecorder,
        *,
        pieces: Pieces | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(recorder, pieces=pieces, notice=notice)
        self.llm = llm
        self.logprob_kind = KINDS.get(llm.model_config.logprobs_mode)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def generate(self, prompts: Any, sampling_params: Any = None, **more: Any) -> Any:
        """As `LLM.generate`. Of several turns each takes one prompt.

        Raises:
            UsageError: there are several turns, and not as many as prompts; what the engine raises.
        """
        several = not isinstance(prompts, str | dict) and not (len(prompts) and isinstance(prompts[0], int))
        asked = list(prompts) if several else [prompts]
        return self._call(self.llm.generate, prompts, asked, sampling_params, more)

    def chat(self, messages: Any, sampling_params: Any = None, **more: Any) -> Any:
        """As `LLM.chat`. Of several turns each takes one conversation.

        Raises:
            UsageError: there are several turns, and not as many as conversations; what the engine raises.
        """
        asked = [messages] if len(messages) and isinstance(messages[0], dict) else list(messages)
        return self._call(self.llm.chat, messages, asked, sampling_params, more)

    def _call(self, call: Any, first: Any, asked: Sequence[Any], params: Any, more: dict[str, Any]) -> Any:
        into = self.current()
        if into is None:
            return call(first, params, **more)
        into.turn(0, len(asked))
        given = self._params(params, len(asked))
        told = [_asking(p) if self.logprob_kind else p for p in given]
        started = now()
        answers = call(first, told if isinstance(params, Sequence) or not told else told[0], **more)
        if len(answers) != len(asked):
            self.skip(f"{len(answers)} answers to {len(asked)} prompts")
            return answers
        for number, (answer, prompt, mine) in enumerate(zip(answers, asked, given, strict=True)):
            with self.answered():
                self._take(into, number, len(asked), answer, prompt, mine, started)
            if self.logprob_kind and _silent(mine):
                _forget_logprobs(answer)
        return answers

    def _params(self, params: Any, count: int) -> list[Any]:
        """The settings of each prompt.

        Raises:
            UsageError: not as many as prompts.
        """
        if isinstance(params, Sequence):
            if len(params) != count:
                raise UsageError(f"{len(params)} sampling_params for {count} prompts")
            return list(params)
        return [self.llm.get_default_sampling_params() if params is None else params] * count

    def _take(self, into: Into, number: int, count: int, answer: Any, prompt: Any, params: Any, started: int) -> None:
        why_not = _why_not(answer, prompt)
        if why_not:
            self.skip(why_not)
            return
        turn = into.turn(number, count)
        ids = as_ids(answer.prompt_token_ids, "prompt")
        outputs = [_sampled(ids, o, self.logprob_kind, params.n) for o in answer.outputs if len(o.token_ids)]
        if len(outputs) < len(answer.outputs):
            self.skip("an output without ids")
        names = {name: getattr(params, name, None) for name in (*SETTINGS, "seed")}
        shaped = {name: getattr(params, name, None) for name in SHAPED}
        self.take(
            into,
            turn,
            outputs,
            sampling=sampling_of(names),
            logprob_kind=self.logprob_kind or "unknown",
            started=started,
            response_id=str(answer.request_id),
            model=getattr(answer.lora_request, "lora_name", None),
            policy_version=_version(answer.outputs),
            extra=shaped_by(shaped),
        )


def model_metadata(llm: Any, *, name: str) -> Model:
    """The model of an `LLM` and its tokenizer as the file metadata names them (its weights are not read)."""
    config = llm.model_config
    stop = config.try_get_generation_config().get("eos_token_id")
    stop_ids = None if stop is None else [stop] if isinstance(stop, int) else list(stop)
    return Model(
        name=name,
        config_digest=config_digest(SimpleNamespace(config=config.hf_config)),
        dtype=str(config.dtype).removeprefix("torch."),
        tokenizer=tokenizer_metadata(llm.get_tokenizer(), vocab_size=config.get_vocab_size(), stop_ids=stop_ids),
    )


def _silent(params: Any) -> bool:
    """Whether settings ask for no log-probabilities."""
    return params.logprobs is None and params.logprob_token_ids is None


def _asking(params: Any) -> Any:
    """The same settings, and log-probabilities of what is sampled, which change nothing of it."""
    if not _silent(params):
        return params
    asking = params.clone()
    asking.logprobs = 0
    return asking


def _forget_logprobs(answer: Any) -> None:
    for output in answer.outputs:
        output.logprobs = output.cumulative_logprob = None


def _why_not(answer: Any, prompt: Any) -> str | None:
    """Why an answer cannot be recorded as the policy's own samples."""
    if isinstance(prompt, dict) and prompt.get("multi_modal_data"):
        return "media"
    if isinstance(prompt, list) and has_media(prompt):
        return "media"
    if isinstance(prompt, dict) and prompt.get("prompt_embeds") is not None:
        return "prompt embeddings"
    if answer.encoder_prompt_token_ids is not None:
        return "an encoder's input"
    return None if answer.prompt_token_ids else NO_IDS


def _sampled(prompt: Any, output: Any, kind: str | None, n: int) -> Sampled:
    ids = as_ids(list(output.token_ids), "output")
    logprobs: Logprobs | None = None
    if kind is not None and output.logprobs is not None and len(output.logprobs) == len(ids):
        chosen = [place.get(int(i)) for i, place in zip(ids, output.logprobs, strict=True)]
        logprobs = np.array([as_logprob(getattr(c, "logprob", None)) for c in chosen], np.float32)
    extra = {"choice": str(output.index)} if n > 1 else {}
    if output.stop_reason is not None:
        extra["stop_reason"] = str(output.stop_reason)
    finish = FINISH.get(output.finish_reason or "")
    if finish is None and output.finish_reason is not None:
        extra["finish_reason"] = str(output.finish_reason)
    spans = output.weight_versions or ()
    if len(spans) > 1:
        extra["weight_versions"] = json.dumps([[s.version, s.start, s.end] for s in spans])
    routes = output.routed_experts
    flat = None if routes is None else np.asarray(routes).reshape(-1).astype(np.int16)
    return Sampled(output.index, prompt, ids, logprobs, finish, extra, flat)


def _version(outputs: Sequence[Any]) -> int | None:
    """The version of the weights, where one number holds for all outputs."""
    found = {s.version for o in outputs for s in o.weight_versions or ()}
    version = next(iter(found)) if len(found) == 1 else ""
    return int(version) if version.isdecimal() and len(version) < 19 else None
