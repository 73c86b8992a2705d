"""Reading with a memory: a document comes part by part, and one short memory is all that is kept of it.

Each call sees the question, the memory and one part of the document, and writes the memory anew; the last call
answers from the memory alone (the scheme of MemAgent and MEM1). The memory moves from call to call as the very ids
that were sampled, without their stop id. Reward: token F1 of the answer against the references.

The documents in `reading.json` are inventions, so that no model can know the answers beforehand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from memopd_trace.errors import UsageError
from memopd_trace.invocation import Invocation
from memopd_trace.record import Prompt
from memopd_trainer.environments import Outcome, Turn
from memopd_trainer.environments.chat import chat_frame, encode_text, kept_ids
from memopd_trainer.environments.metrics import exact_match, token_f1

SYSTEM = "You read a document part by part and keep a short memory of what helps to answer the question."
NO_MEMORY = "nothing yet"
WRITE = "\nWrite the new memory in one or two short sentences."
ANSWER = "\nAnswer the question from the memory in a few words."

Split = Literal["train", "held_out"]


@dataclass(frozen=True, slots=True)
class ReadingTask:
    """One question about one document. An episode makes `len(parts) + 1` calls."""

    task_id: str
    question: str
    answers: tuple[str, ...]
    parts: tuple[str, ...]


def reading_tasks(split: Split) -> list[ReadingTask]:
    """The built-in tasks, first questions of all documents before the second ones."""
    text = (resources.files("memopd_trainer.environments") / "reading.json").read_text(encoding="utf-8")
    documents = [d for d in json.loads(text) if d["split"] == split]
    return [
        ReadingTask(f"{d['id']}-{n}", d["questions"][n]["question"], (d["questions"][n]["answer"],), tuple(d["chunks"]))
        for n in range(max(len(d["questions"]) for d in documents))
        for d in documents
        if n < len(d["questions"])
    ]


class ReadingEnvironment:
    """The memory agent's environment for one tokenizer with a chat template that knows a system role.

    Raises:
        UsageError: there is no chat template, or it changes what the user says.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._head, self._tail = chat_frame(tokenizer, SYSTEM)
        self._task: ReadingTask | None = None
        self._first: Invocation | None = None
        self._calls = 0

    def reset(self, task: ReadingTask) -> Turn:
        """The call that reads the first part, with an empty memory."""
        self._task, self._first, self._calls = task, None, 0
        prompt = Prompt().add("system", self._head).add("task", self._encode(f"Question: {task.question}"))
        prompt.add("template", self._encode(f"\nMemory: {NO_MEMORY}"))
        return self._turn(prompt, task)

    def step(self, invocation: Invocation) -> Turn | Outcome:
        """The call for the next part, then the one that answers, then the reward."""
        task = self._task
        if task is None:
            raise UsageError("step() before reset()")
        self._calls += 1
        if self._calls > len(task.parts):
            return self._outcome(invocation, task)
        first = self._first = self._first or invocation
        assert first.segments is not None
        system, question = first.segments[:2]
        prompt = Prompt().copy("system", first, system.start, system.stop)
        prompt.copy("task", first, question.start, question.stop)
        prompt.add("template", self._encode("\nMemory: "))
        prompt.copy_output("memory", invocation, 0, kept_ids(invocation))
        return self._turn(prompt, task, rewrite_kind="memory")

    def _turn(self, prompt: Prompt, task: ReadingTask, rewrite_kind: str | None = None) -> Turn:
        reading = self._calls < len(task.parts)
        if reading:
            prompt.add("template", self._encode("\nPart: "))
            prompt.add("observation", self._encode(task.parts[self._calls]))
        prompt.add("template", [*self._encode(WRITE if reading else ANSWER), *self._tail])
        return Turn(prompt, rewrite_kind, "memory" if reading else "action")

    def _outcome(self, invocation: Invocation, task: ReadingTask) -> Outcome:
        ids = invocation.output_ids[: kept_ids(invocation)].tolist()
        answer = self._tokenizer.decode(ids, skip_special_tokens=True)
        f1 = token_f1(answer, task.answers)
        return Outcome(f1, {"f1": f1, "exact_match": exact_match(answer, task.answers)})

    def _encode(self, text: str) -> list[int]:
        return encode_text(self._tokenizer, text)
