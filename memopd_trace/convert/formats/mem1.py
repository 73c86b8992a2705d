"""MEM1: rollouts as its inference writes them: q, t0, r0, i0, t1, … (question, state, response, information).

A call sees the question and what the call before it wrote and was told, and nothing older: that is its prompt here. The
row that the trainer makes of all turns, with its own mask, is another thing and never stood in front of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall

SCORES = ("Exact_match", "Model_estimated_match")
ANSWER = ("<answer>", "</answer>")


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A rollout."""
    record = Fields(value, losses)
    question = record.text("q")
    if question is None:
        if "error" in record:
            raise NotACall("an error instead of a rollout")
        raise BrokenRecord("no question 'q'")
    if "memories" in record:
        raise NotACall("a rollout with another memory (A-MEM): its prompts are not in the log")
    draft = Draft(episode_id=record.name("index") or losses.place, task_id=record.name("hash"))
    kept = ""
    number = 0
    while f"r{number}" in record:
        state, response = record.text(f"t{number}") or "", record.text(f"r{number}") or ""
        written = _written(state, response)
        draft.calls.append(_call(record, number, question, kept, written))
        kept = written + (record.text(f"i{number}") or "")
        number += 1
    if record.text(f"t{number}") is not None:
        losses.lose("an answer that was not kept: it neither searched nor answered")
    if not draft.calls:
        raise NotACall("a rollout without a response")
    last = draft.calls[-1].answer
    if isinstance(last, dict) and all(mark in last["content"] for mark in ANSWER):
        draft.terminated = True
    draft.rewards = _scores(record)
    draft.extra = record.rest()
    yield draft


def _written(state: str, response: str) -> str:
    """All that a call wrote: the response, which repeats the state, or else both."""
    return response if state in response else state + response


def _call(record: Fields, number: int, question: str, kept: str, written: str) -> Call:
    """Before the third call nothing was left out; from then on the state stands for what came before the last call."""
    messages = [{"role": "user", "content": question}]
    if kept:
        messages.append({"role": "assistant", "content": kept})
    return Call(
        place=f"{record.losses.place} r{number}",
        key=str(number),
        parent=str(number - 1) if number else None,
        prompt=Chat(messages=messages),
        answer={"role": "assistant", "content": written},
        rewrite_kind="memory" if number > 1 else None,
    )


def _scores(record: Fields) -> dict[str, float] | None:
    """How the answer was judged, by name; true and false are 1 and 0."""
    found: dict[str, float] = {}
    for name in SCORES:
        value = record.peek(name)
        number = float(record.any(name)) if isinstance(value, bool) else record.number(name)
        if number is not None:
            found[name] = number
    return found or None


FORMAT = Format(
    name="mem1",
    title="MEM1: rollouts of its inference",
    exactness="text",
    read=read,
    unsaid=(
        "no_token_ids",
        "no_logprobs",
        "no_model",
        "no_sampling",
        "no_policy_version",
        "no_finish_reason",
        "no_reward",
        "lossy_text",
    ),
    note="Rollouts that kept the whole history are written alike: convert those of `--use_mem1` alone.",
)
