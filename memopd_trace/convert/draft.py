"""What a converter says: drafts of episodes, in the words of the format and no surer than the log.

`None` is "the log does not say". A converter never fills anything in: ids, relations and defaults that can be found out
are found out later, alike for all formats (`assemble`, `lineage`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopd_trace.invocation import IDS, MaskedFloats, Sampling

MAX_DEPTH = 200  # levels of JSON


@dataclass(slots=True, kw_only=True)
class Chat:
    """A prompt as messages, to be rendered by the tokenizer's own chat template: OpenAI's chat form.

    `tools` are those that the call could see; `options` further variables of the template (`enable_thinking`, say).
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a model, as the log has it.

    Either ids (`prompt_ids`, `output_ids`: int32, exactly the engine's) or text: `prompt` as messages or plain text and
    `answer` as an assistant's message or plain text. With both, ids hold and the text is compared with them.

    key: how other calls of the episode refer to this one (`parent`); two calls with one key are one call told twice.
    logprobs: masked float32[len(output_ids)], nats, masked where there is none.
    order: where the log numbers its calls and does not list them in that order.
    sampled: which output ids the policy chose; `trained`: which are to be trained.
    reasoned: the log says that the output holds reasoning, which chat templates remove from later prompts.
    relation, rewrite_kind: only what the log declares. What is left open is found by comparing ids.
    counts: (prompt tokens, output tokens) as the log counted them.
    extra: what the format has no column for; small values become `extra`, large ones go to the side file.
    """

    place: str
    key: str | None = None
    model: str | None = None
    prompt_ids: IDS | None = None
    output_ids: IDS | None = None
    prompt: Chat | str | None = None
    answer: dict[str, Any] | str | None = None
    logprobs: MaskedFloats | None = None
    logprob_kind: str | None = None
    sampled: NDArray[np.bool_] | None = None
    trained: NDArray[np.bool_] | None = None
    reasoned: bool = False
    sampling: Sampling | None = None
    finish_reason: str | None = None
    policy_version: int | None = None
    output_policy_versions: NDArray[np.int64] | None = None
    order: float | None = None
    parent: str | None = None
    relation: str | None = None
    rewrite_kind: str | None = None
    attempt: int | None = None
    accepted: bool | None = None
    agent_id: str | None = None
    reward: float | None = None
    rewards: dict[str, float] | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    counts: tuple[int | None, int | None] = (None, None)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Draft:
    """An episode, or with `whole=False` a piece of one: pieces of one `episode_id` are put together in the order of the
    log. `reward` is the episode's own, as opposed to rewards of its calls."""

    episode_id: str
    calls: list[Call] = field(default_factory=list)
    whole: bool = True
    group_id: str | None = None
    task_id: str | None = None
    reward: float | None = None
    rewards: dict[str, float] | None = None
    terminated: bool | None = None
    truncated: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def absorb(self, piece: Draft) -> list[str]:
        """Add a later piece of the same episode; of two values (of named rewards: of one name) the later one holds.
        Returns the names of those that differed, which are to be counted."""
        differ = []
        self.calls += piece.calls
        for name, value in (piece.rewards or {}).items():
            self.rewards = self.rewards or {}
            differ += [f"reward '{name}'"] if self.rewards.get(name, value) != value else []
            self.rewards[name] = value
        for name in ("group_id", "task_id", "reward", "terminated", "truncated"):
            old, new = getattr(self, name), getattr(piece, name)
            if new is not None:
                differ += [name] if old not in (None, new) else []
                setattr(self, name, new)
        for name, value in piece.extra.items():
            differ += [f"extra '{name}'"] if self.extra.get(name, value) != value else []
            self.extra[name] = value
        return differ


def is_too_deep(draft: Draft, limit: int = MAX_DEPTH) -> bool:
    """Whether text or leftovers of a draft are nested in more than `limit` levels: no JSON writer would take them."""
    level: list[Any] = [draft.extra]
    for call in draft.calls:
        chat = call.prompt if isinstance(call.prompt, Chat) else None
        level += [call.extra, call.answer, *((chat.messages, chat.tools, chat.options) if chat else ())]
    seen: set[int] = set()
    for _ in range(limit):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict | list) and id(value) not in seen:  # histories share their messages
                seen.add(id(value))
                inner += value.values() if isinstance(value, dict) else value
        level = [v for v in inner if isinstance(v, dict | list)]
        if not level:
            return False
    return True


FINISH_REASONS = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_calls": "tool_calls",
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "abort": "abort",
    "aborted": "abort",
    "content_filter": "content_filter",
    "refusal": "content_filter",
}


def finish_reason(word: str | None) -> str | None:
    """The format's word for why an output ended; `None` for a word that means nothing here."""
    return None if word is None else FINISH_REASONS.get(word)


def sampled_only(logprobs: MaskedFloats, sampled: NDArray[np.bool_]) -> MaskedFloats:
    """Without the numbers that a log fills in for ids that were not sampled (0.0, mostly): those are null."""
    return np.ma.masked_array(logprobs, mask=np.ma.getmaskarray(logprobs) | ~sampled, dtype=np.float32)
