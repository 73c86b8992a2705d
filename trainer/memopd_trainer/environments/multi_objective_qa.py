"""Several questions at once, a search tool, and a memory that is all that stays: MEM1's task in small.

An episode asks 1 to 16 questions of several hops over an invented knowledge base (`knowledge`). Each call thinks
first and acts then:

    <think>what to remember</think><search>a query</search>      or      <think>…</think><answer>a; b; c</answer>

The next prompt holds the questions, the last memory (`<think>…</think>`), the last search and what it found, and
nothing else. So what a search found is seen once: what the memory does not take over is gone, and every answer but the
last is needed turns later. A memory has a budget of tokens, too small for the texts found: what is beyond it is cut.

Memory and search move as the very ids that were sampled; a token in which one ends and the other begins goes with the
memory. Reward: the mean over the questions of exact match or F1 (SQuAD's) of the answers in order; one that is missing
counts 0. An episode that has not answered after `max_turns` calls is truncated, with reward 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

from memopd_trace.errors import UsageError
from memopd_trace.invocation import Invocation
from memopd_trace.record import Prompt
from memopd_trainer.environments import Outcome, Turn
from memopd_trainer.environments.chat import chat_frame, encode_text, kept_ids
from memopd_trainer.environments.knowledge import Chain, Knowledge, Split
from memopd_trainer.environments.metrics import exact_match, token_f1
from memopd_trainer.environments.search import Search

SYSTEM = (
    "You answer questions by searching. Keep what you need between <think> and </think>: you will see nothing else of "
    "this turn but your search and what it finds. Then either search, <search>a query</search>, or give all answers in "
    "order, <answer>first; second</answer>."
)
NOTHING_FOUND = "Nothing was found."
NO_ACTION = "Your last turn had neither a search nor an answer."
MOST_QUESTIONS = 16

Reward = Literal["f1", "exact_match"]


@dataclass(frozen=True, slots=True)
class QaTask:
    """Questions to be answered together."""

    task_id: str
    chains: tuple[Chain, ...]

    @property
    def searches(self) -> int:
        """How many searches an agent needs that looks one thing up at a time."""
        return sum(len(c.relations) for c in self.chains)


def qa_tasks(
    knowledge: Knowledge, count: int, *, objectives: int = 2, hops: int = 2, split: Split = "train", seed: int = 0
) -> list[QaTask]:
    """`count` tasks of so many different questions each; what is asked in one split is never asked in the other.

    Raises:
        UsageError: objectives that are not 1 to 16, or more than the split has questions.
    """
    questions = knowledge.questions(split, hops)
    if not 1 <= objectives <= min(MOST_QUESTIONS, len(questions)):
        raise UsageError(f"{objectives} objectives, {len(questions)} questions", hint=f"1 to {MOST_QUESTIONS}")
    tasks = []
    for n in range(count):
        chosen = np.random.default_rng([seed, n]).permutation(len(questions))[:objectives]
        tasks.append(QaTask(f"{split}-{objectives}x{hops}-{seed}-{n}", tuple(questions[c] for c in chosen)))
    return tasks


@dataclass(slots=True)
class QaEnvironment:
    """The environment for one tokenizer whose chat template knows a system role.

    `memory_tokens` is the memory's budget (tags included), `found` how many texts a search gives; `max_turns` `None` =
    the searches that a task needs, two more, and the answer.

    Raises:
        UsageError: the chat template cannot be used, a number below 1, or an unknown reward.
    """

    tokenizer: Any
    search: Search
    memory_tokens: int = 64
    found: int = 1
    max_turns: int | None = None
    reward: Reward = "f1"
    _frame: tuple[list[int], list[int]] = field(init=False)
    _task: QaTask | None = field(init=False, default=None)
    _first: Invocation | None = field(init=False, default=None)
    _left: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._frame = chat_frame(self.tokenizer, SYSTEM)
        for name, number in (
            ("memory_tokens", self.memory_tokens),
            ("found", self.found),
            ("max_turns", self.max_turns),
        ):
            if number is not None and number < 1:
                raise UsageError(f"{name} is {number}", hint="at least 1")
        if self.reward not in get_args(Reward):
            raise UsageError(f"no reward '{self.reward}'", hint=f"one of {', '.join(get_args(Reward))}")

    def reset(self, task: QaTask) -> Turn:
        """The first call: the questions alone."""
        self._task, self._first = task, None
        self._left = task.searches + 3 if self.max_turns is None else self.max_turns
        questions = "\n".join(f"{n}. {chain.question}" for n, chain in enumerate(task.chains, 1))
        prompt = Prompt().add("system", self._frame[0]).add("task", self._encode(questions))
        return self._turn(prompt)

    def step(self, invocation: Invocation) -> Turn | Outcome:
        """Judge the answer, or search and go on from memory, search and what was found."""
        if self._task is None:
            raise UsageError("step() before reset()")
        self._first = self._first or invocation
        self._left -= 1
        whole = self._text(invocation)
        _, thought, rest = whole.partition("</think>")
        text = rest if thought else whole  # a tag within a thought is not meant
        answer = between(text, "<answer>", "</answer>")
        if answer is not None:
            return self._judge(answer, self._task)
        if not self._left:
            return Outcome(0.0, {"f1": 0.0, "exact_match": 0.0}, truncated=True)
        query = between(text, "<search>", "</search>")
        texts = [NO_ACTION] if query is None else self.search.best(query, self.found) or [NOTHING_FOUND]
        return self._turn(self._rewritten(invocation, "\n".join(texts)), "memory")

    def _rewritten(self, invocation: Invocation, information: str) -> Prompt:
        first = self._first
        assert first is not None and first.segments is not None
        system, questions = first.segments[:2]
        prompt = Prompt().copy("system", first, system.start, system.stop)
        prompt.copy("task", first, questions.start, questions.stop).add("template", self._encode("\n"))
        memory, stop = self._memory_ids(invocation), kept_ids(invocation)
        prompt.copy_output("memory", invocation, 0, min(memory, self.memory_tokens))
        if memory > self.memory_tokens:
            prompt.add("template", self._encode("</think>"))
        prompt.copy_output("action", invocation, memory, stop)
        prompt.add("template", self._encode("\n<information>")).add("observation", self._encode(information))
        return prompt.add("template", self._encode("</information>"))

    def _turn(self, prompt: Prompt, rewrite_kind: str | None = None) -> Turn:
        prompt.add("template", [*self._encode(f"\nTurns left: {self._left}"), *self._frame[1]])
        return Turn(prompt, rewrite_kind)

    def _memory_ids(self, invocation: Invocation) -> int:
        """How many of the output's ids hold the memory: up to the one that ends `</think>`; all where none does."""
        low, high = 0, kept_ids(invocation)
        if "</think>" not in self._text(invocation):
            return high
        while low < high:  # the text of more ids contains what that of fewer does
            middle = (low + high) // 2
            low, high = (low, middle) if "</think>" in self._text(invocation, middle) else (middle + 1, high)
        return low

    def _judge(self, answer: str, task: QaTask) -> Outcome:
        given = [part.strip() for part in answer.split(";")]
        given += [""] * (len(task.chains) - len(given))
        pairs = list(zip(given, (chain.answer for chain in task.chains), strict=False))
        rewards = {
            "f1": float(np.mean([token_f1(said, [right]) for said, right in pairs])),
            "exact_match": float(np.mean([exact_match(said, [right]) for said, right in pairs])),
        }
        return Outcome(rewards[self.reward], rewards)

    def _text(self, invocation: Invocation, stop: int | None = None) -> str:
        ids = invocation.output_ids[: kept_ids(invocation) if stop is None else stop].tolist()
        return str(self.tokenizer.decode(ids))  # tags may be special tokens

    def _encode(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text)


def between(text: str, opening: str, closing: str) -> str | None:
    """What stands between the first `opening` and the `closing` after it, stripped; `None` unless both are there."""
    _, found, rest = text.partition(opening)
    inner, closed, _ = rest.partition(closing)
    return inner.strip() if found and closed else None
