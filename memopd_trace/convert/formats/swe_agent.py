"""SWE-agent: trajectories (`.traj`). A step's `query` is what the model read, after all history processors.

Files without it hold the history alone: then all before an answer is taken for its prompt, and what processors left out
is not known. A demonstration is context, no call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert import exchange
from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import json_in
from memopd_trace.convert.transcript import answers, chat_message, count_lost_calls, is_reasoned
from memopd_trace.invocation import Sampling


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A trajectory."""
    record = Fields(value, losses)
    steps, history = record.each("trajectory"), record.each("history")
    if not steps and not history:
        raise BrokenRecord("no trajectory: neither 'trajectory' nor 'history'")
    for message in history:
        _tool_call_id(message)
    draft = Draft(episode_id=losses.place)
    if any(isinstance(step.peek("query") or step.peek("messages"), list) for step in steps):
        draft.calls = _of_steps(steps, history, losses)
    elif history:
        losses.gap("lossy_text", "prompts are the history: what processors left out of it is not told")
        draft.calls, loose = answers(history, losses, made=lambda m: m.peek("is_demo") is not True)
        draft.extra |= {"history": loose} if loose else {}
    if not draft.calls and not losses.dropped_calls:
        raise NotACall("a trajectory without an answer of a model")
    model, sampling = _settings(record)
    for call in draft.calls:
        call.model, call.sampling = model, sampling
    info = record.fields("info")
    if info is not None:
        _end(draft, info, losses)
    draft.extra |= record.rest()
    yield draft


def _of_steps(steps: list[Fields], history: list[Fields], losses: Losses) -> list[Call]:
    """A call for each step with a query. Its answer is the history's message of the same text, which has tool calls."""
    said = [m for m in history if m.peek("role") == "assistant" and m.peek("is_demo") is not True]
    calls: list[Call] = []
    at = 0
    for step in steps:
        name = "query" if isinstance(step.peek("query"), list) else "messages"
        prompt = [_asked(m) for m in step.each(name)]
        response = step.text("response")
        if not prompt or (not response and not _follows(said, at, step)):
            continue  # the harness's own step
        answer: dict[str, Any] = {"role": "assistant", "content": response or ""}
        if _follows(said, at, step):
            answer = chat_message(said[at])
            at += 1
        else:
            losses.degrade("an answer's tool calls are not in the history", step.path)
        calls.append(
            Call(
                place=f"{losses.place} {step.path}",
                key=f"{len(calls)}",
                parent=calls[-1].key if calls else None,
                prompt=Chat(messages=prompt),
                answer=answer,
                reasoned=is_reasoned(answer),
                extra=step.rest(),
            )
        )
    return calls


def _follows(said: list[Fields], at: int, step: Fields) -> bool:
    """Whether the next answer of the history is that of the step."""
    return at < len(said) and said[at].peek("content") in (step.peek("response"), step.peek("thought"))


def _asked(message: Fields) -> dict[str, Any]:
    _tool_call_id(message)
    return chat_message(message)


def _tool_call_id(message: Fields) -> None:
    """A tool's message names what it answers in a list."""
    ids = message.items("tool_call_ids") if message.peek("role") == "tool" else None
    if ids and "tool_call_id" not in message:
        message.value["tool_call_id"] = ids[0]


def _settings(record: Fields) -> tuple[str | None, Sampling | None]:
    """(the model's name, its settings) out of the configuration, which is JSON in a text."""
    found = record.peek("replay_config")
    if isinstance(found, str):
        found = json_in(found)
    for name in ("agent", "model"):
        found = found.get(name) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return None, None
    model = Fields(found, record.losses, "replay_config.agent.model")
    return model.text("name"), exchange.sampling(model)


def _end(draft: Draft, info: Fields, losses: Losses) -> None:
    status = info.peek("exit_status")
    if status == "submitted":
        draft.terminated = True
    elif isinstance(status, str) and "exit_" in status:
        draft.truncated = True
    count_lost_calls(draft, info, losses)


FORMAT = Format(
    name="swe-agent",
    title="SWE-agent: trajectories",
    exactness="text",
    read=read,
    suffixes=(".traj", ".json", ".jsonl"),
    unsaid=(
        "no_token_ids", "no_logprobs", "no_policy_version", "no_finish_reason", "no_reward", "no_group", "lossy_text",
    ),
    note="Calls that were asked again after a malformed answer are not in the log, nor the tools that were offered.",
)  # fmt: skip
