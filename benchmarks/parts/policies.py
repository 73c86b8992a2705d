"""Four ways to go on with a context, on the same documents: what differs is what the next call still sees.

append    everything that was said; each prompt extends the call before
memory    the last output, rewritten each time, in place of everything else (`environments/reading.py`)
truncate  the task and the last WINDOW tokens of what followed it
strip     everything but the first half of each output, which stands for thinking (the model does not think)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memopd_trace.invocation import Invocation
from memopd_trace.record import Prompt
from memopd_trainer.environments import Environment, Outcome, Turn
from memopd_trainer.environments.chat import chat_frame, encode_text
from memopd_trainer.environments.reading import SYSTEM, ReadingEnvironment, ReadingTask

WINDOW = 160  # tokens
KINDS = {"append": None, "truncate": "truncate_left", "strip": "strip_thinking"}
POLICIES = ("append", "memory", "truncate", "strip")


class HistoryEnvironment:
    """A document part by part, with a history that is kept as `policy` says; nothing is rewarded."""

    def __init__(self, tokenizer: Any, policy: str) -> None:
        self._tokenizer, self._policy = tokenizer, policy
        self._head, self._tail = chat_frame(tokenizer, SYSTEM)
        self._parts: tuple[str, ...] = ()
        self._task_tokens = self._calls = 0

    def reset(self, task: ReadingTask) -> Turn:
        """The call that reads the first part."""
        self._parts, self._calls = task.parts, 0
        prompt = Prompt().add("system", self._head).add("task", self._encode(f"Question: {task.question}"))
        self._task_tokens = len(prompt)
        return self._turn(prompt, None)

    def step(self, invocation: Invocation) -> Turn | Outcome:
        """The call that reads the next part; the end after the last."""
        self._calls += 1
        if self._calls == len(self._parts):
            return Outcome(0.0)
        before, end = len(invocation.prompt_ids), len(invocation)
        prompt = Prompt()
        if self._policy == "append":
            prompt.copy("history", invocation)
        elif self._policy == "strip":
            prompt.copy("history", invocation, 0, before)
            prompt.copy("history", invocation, (before + end) // 2, end)
        else:
            prompt.copy("task", invocation, 0, self._task_tokens)
            prompt.copy("history", invocation, max(self._task_tokens, end - WINDOW), end)
        return self._turn(prompt, KINDS[self._policy])

    def _turn(self, prompt: Prompt, rewrite_kind: str | None) -> Turn:
        prompt.add("template", self._encode("\nPart: ")).add("observation", self._encode(self._parts[self._calls]))
        return Turn(prompt.add("template", self._tail), rewrite_kind)

    def _encode(self, text: str) -> list[int]:
        return encode_text(self._tokenizer, text)


def environment(policy: str, tokenizer: Any) -> Callable[[], Environment[ReadingTask]]:
    """What makes the environments of a policy."""
    if policy == "memory":
        return lambda: ReadingEnvironment(tokenizer)
    return lambda: HistoryEnvironment(tokenizer, policy)
