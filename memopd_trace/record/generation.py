"""Record what a Transformers model samples by its own `generate`: prompts, sampled ids, exact log-probabilities.

A logits processor in front of the others sees each step's raw logits, once; of one step they are kept until its token
is known. So it costs one softmax over the vocabulary a step, and no more memory for long outputs.

Only sampling that the format can say is recorded: greedy, or temperature, top-k, top-p and min-p. Anything else that
shapes the distribution or the search (penalties, beams, assistants, guidance, …) is refused before anything is sampled.
`memopd_trace.record.transformers.generate` is another sampler, with a seed for each row.

Shape legend: B rows (prompts times `num_return_sequences`), P padded prompt length, T prompt and output, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from memopd_trace.behaviour import restricts
from memopd_trace.errors import UsageError
from memopd_trace.invocation import IDS, Sampling
from memopd_trace.pieces import Pieces
from memopd_trace.record.call import Sampled
from memopd_trace.record.hook import Hook, Into, now
from memopd_trace.record.recorder import TraceRecorder

DEFAULTS: dict[str, Any] = {  # Transformers' own, where neither the call nor the model's folder says anything
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None,
    "num_return_sequences": 1, "eos_token_id": None, "pad_token_id": None, "stop_strings": None,
}  # fmt: skip
HARMLESS = {  # change nothing of what is sampled, or only when it ends
    *DEFAULTS, "bos_token_id", "decoder_start_token_id", "max_length", "max_new_tokens", "max_time", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size",
    "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "transformers_version", "early_stopping", "length_penalty", "remove_invalid_values", "low_memory",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "max_matching_ngram_size", "continuous_batching_config",
}  # fmt: skip
NEUTRAL_ONE = {"repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"} | {
    "num_beams", "num_beam_groups",
}  # fmt: skip
REFUSED = ("logits_processor", "prefix_allowed_tokens_fn", "assistant_model", "negative_prompt_ids", "custom_generate")


class TransformersHook(Hook):
    """Records the calls of one model's `generate`. Use it in its place; everything else is the model's own.

    Example:
        with TraceRecorder("trace.parquet", metadata) as recorder:
            hook = TransformersHook(model, recorder)
            episode = recorder.episode("q1/0", group_id="q1", policy_version=0)
            with hook.into(episode):
                ids = hook.generate(**tokenizer("Name a fruit.", return_tensors="pt"), do_sample=True)
            episode.finish(reward=1.0)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recorder: TraceRecorder,
        *,
        pieces: Pieces | None = None,
        notice: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(recorder, pieces=pieces, notice=notice)
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **more: Any) -> Any:
        """As the model's `generate`, of token ids (int[B, P], padded on the left). Of several turns each takes one
        prompt with all of its sequences.

        Raises:
            UsageError: settings that cannot be recorded; a batch that is padded otherwise, or without a mask; several
                turns, and not as many as prompts. Nothing is sampled then.
        """
        into = self.current()
        if into is None:
            return self.model.generate(inputs, generation_config, **more)
        settings = _settings(self.model, generation_config, more)
        prompts = _prompts(inputs if inputs is not None else more.get("input_ids"), more, settings)
        into.turn(0, len(prompts))
        sampling = _sampling(settings)
        watch = _Watch(sampling)
        more = {**more, **{name: settings[name] for name in ("do_sample", "temperature", "top_k", "top_p", "min_p")}}
        criteria = list(more.pop("stopping_criteria", None) or ())
        if settings["stop_strings"] is not None:
            if more.get("tokenizer") is None:
                raise UsageError("stop_strings need the tokenizer", hint="generate(..., tokenizer=tokenizer)")
            criteria.append(StopStringCriteria(more.get("tokenizer"), settings["stop_strings"]))
            more["stop_strings"] = None
            generation_config = _without_stop_strings(self.model, generation_config)
        ends = [_End(c) for c in criteria]
        started = now()
        found = self.model.generate(
            inputs,
            generation_config,
            logits_processor=LogitsProcessorList([watch]),
            stopping_criteria=StoppingCriteriaList(ends),
            **more,
        )
        sequences_BT = found if isinstance(found, Tensor) else found.sequences
        with self.answered():
            self._take(into, prompts, sequences_BT, settings, sampling, watch, ends, started)
        return found

    def _take(
        self,
        into: Into,
        prompts: list[IDS],
        sequences_BT: Tensor,
        settings: dict[str, Any],
        sampling: Sampling,
        watch: _Watch,
        ends: list[_End],
        started: int,
    ) -> None:
        watch.finish(sequences_BT)
        copies, eos = len(sequences_BT) // len(prompts), _ids(settings["eos_token_id"])
        for number, prompt in enumerate(prompts):
            outputs = []
            for n in range(copies):
                row = number * copies + n
                ids = sequences_BT[row, watch.start :].cpu().numpy().astype(np.int32)
                stop = next((i + 1 for i, token in enumerate(ids) if int(token) in eos), None)
                cut = [length - watch.start for end in ends if (length := end.lengths.get(row)) is not None]
                length = min([len(ids), *([] if stop is None else [stop]), *cut])
                finish = "stop" if length in (stop, *(cut if settings["stop_strings"] else ())) else "length"
                outputs.append(watch.sampled(n, row, prompt, ids[:length], finish, copies))
            self.take(
                into,
                into.turn(number, len(prompts)),
                outputs,
                sampling=sampling,
                logprob_kind="raw",
                started=started,
            )


class _Watch(LogitsProcessor):
    """Sees the raw logits of every step; when the next step comes, its token is known."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._warpers = _warpers(sampling)
        self._last_BV: Tensor | None = None  # raw log-probabilities of the step whose token is not known yet
        self.start = 0  # P
        self._logprobs: list[Tensor] = []  # a [B] each step
        self._kept: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._last_BV is None:
            self.start = input_ids.shape[1]
        else:
            self._choose(input_ids[:, self.start + len(self._logprobs)])
        self._last_BV = scores.log_softmax(-1)
        if self._warpers is not None:
            cut_BV = self._warpers(input_ids, scores.clone()) == -torch.inf
            logprobs_BV = (scores / (self._sampling.temperature or 1.0)).log_softmax(-1)
            self._kept.append(logprobs_BV.masked_fill(cut_BV, -torch.inf).logsumexp(-1).clamp(max=0))
        return scores

    def _choose(self, tokens_B: Tensor) -> None:
        assert self._last_BV is not None
        self._logprobs.append(self._last_BV.gather(1, tokens_B[:, None])[:, 0])

    def finish(self, sequences_BT: Tensor) -> None:
        """The last step's token."""
        if self.start + len(self._logprobs) < sequences_BT.shape[1]:
            self._choose(sequences_BT[:, self.start + len(self._logprobs)])
        self._last_BV = None
        self._logprobs_BM = torch.stack(self._logprobs, 1).cpu().numpy()
        self._kept_BM = torch.stack(self._kept, 1).cpu().numpy() if self._kept else None

    def sampled(self, choice: int, row: int, prompt: IDS, ids: IDS, finish: str, copies: int) -> Sampled:
        """One row's output."""
        count = len(ids)
        kept = None if self._kept_BM is None else self._kept_BM[row, :count]
        extra = {"choice": str(choice)} if copies > 1 else {}
        return Sampled(choice, prompt, ids, self._logprobs_BM[row, :count], finish, extra, kept_logmass=kept)


class _End(StoppingCriteria):
    """Another criterion, and the length at which it ended each row first."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.lengths: dict[int, int] = {}
        if hasattr(inner, "eos_token_id"):  # by which `generate` knows that it pads what has ended
            self.eos_token_id = inner.eos_token_id

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        done_B: Tensor = self._inner(input_ids, scores, **kwargs)
        for row in torch.nonzero(done_B).flatten().tolist():
            self.lengths.setdefault(row, input_ids.shape[1])
        return done_B


def _settings(model: PreTrainedModel, given: Any, more: dict[str, Any]) -> dict[str, Any]:
    """The settings of a call, by name: the call's own, else those of its `generation_config`, else the model's.

    Raises:
        UsageError: one shapes the distribution in a way that the format cannot say.
    """
    found: dict[str, Any] = {}
    for config in (model.generation_config, given):
        if config is not None:
            found |= {k: v for k, v in config.to_dict().items() if v is not None}
    names = set(GenerationConfig().to_dict())
    found |= {k: v for k, v in more.items() if k in names and v is not None}
    refused = [name for name in REFUSED if more.get(name) is not None]
    refused += [name for name, value in found.items() if not _harmless(name, value)]
    if refused:
        raise UsageError(
            f"generate: '{refused[0]}' cannot be recorded",
            hint="greedy, or temperature, top-k, top-p and min-p; other calls are made outside of into()",
        )
    return DEFAULTS | found


def _harmless(name: str, value: Any) -> bool:
    if name in HARMLESS or name.startswith("_") or (name in NEUTRAL_ONE and value == 1):
        return True
    return value is False or value in (0, [])


def _prompts(ids_BP: Any, more: dict[str, Any], settings: dict[str, Any]) -> list[IDS]:
    """The ids of each prompt without its padding.

    Raises:
        UsageError: no ids, or padding that is not told or not on the left.
    """
    if not isinstance(ids_BP, Tensor) or ids_BP.ndim != 2 or more.get("inputs_embeds") is not None:
        raise UsageError("generate: the prompts are no token ids", hint="give input_ids, int[B, P]")
    mask_BP, pad = more.get("attention_mask"), settings["pad_token_id"]
    if mask_BP is None:
        if pad is not None and len(ids_BP) > 1 and bool((ids_BP == pad).any()):
            raise UsageError("generate: a prompt holds the padding id, and there is no attention_mask")
        mask_BP = torch.ones_like(ids_BP)
    if bool((mask_BP.diff(dim=1) < 0).any()) or not bool((mask_BP[:, -1] == 1).all()):
        raise UsageError("generate: a prompt is not padded on the left", hint="tokenizer.padding_side = 'left'")
    return [ids[mask.bool()].cpu().numpy().astype(np.int32) for ids, mask in zip(ids_BP, mask_BP, strict=True)]


def _sampling(settings: dict[str, Any]) -> Sampling:
    if not settings["do_sample"]:
        return Sampling(temperature=0.0)
    return Sampling(**{name: settings[name] for name in ("temperature", "top_k", "top_p", "min_p")})


def _warpers(sampling: Sampling) -> LogitsProcessorList | None:
    """What `generate` does to the logits before it samples; `None` where nothing is kept from being drawn."""
    if not restricts(sampling):
        return None
    found = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


def _without_stop_strings(model: PreTrainedModel, given: Any) -> Any:
    """The same settings; the strings are looked for by a criterion that remembers where it found them."""
    config = copy.deepcopy(given if given is not None else model.generation_config)
    config.stop_strings = None
    return config


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return {int(v) for v in values if v is not None}
