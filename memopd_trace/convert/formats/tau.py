"""tau-bench and tau2-bench: simulated conversations. The agent's messages are calls; the simulated user's calls are
another model's, whose prompts are not in the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memopd_trace.convert import exchange
from memopd_trace.convert.draft import Call, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import Record, json_records
from memopd_trace.convert.transcript import answers, each_of
from memopd_trace.invocation import Sampling

ENDED = ("user_stop", "agent_stop")
CUT = ("max_steps", "max_errors", "too_many_errors", "timeout")


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """Runs, and each simulation of tau2's results."""
    for record in json_records(files):
        if isinstance(record, Record):
            yield from each_of(record, "simulations", ("info",))
        else:
            yield record


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A run of tau-bench, or a simulation of tau2, alone or out of its results."""
    record = Fields(value, losses)
    if isinstance(record.peek("traj"), list):
        losses.version("tau-bench")
        yield _run(record, losses)
        return
    if "item" in record:
        simulation = Fields(record.any("item"), losses, record.text("at") or "")
        draft = _simulation(simulation, record.fields("info"), losses)
        rest = record.fields("rest")
    elif "messages" in record and ("reward_info" in record or "termination_reason" in record):
        draft, rest = _simulation(record, None, losses), None
    elif "tasks" in record and "info" in record:
        raise NotACall("results without simulations: give their folder, where each has a file of its own")
    else:
        raise BrokenRecord("neither a run ('traj') nor a simulation")
    losses.version("tau2-bench")
    if draft is None:
        raise NotACall("a simulation without a message of the agent")
    if rest is not None:
        draft.extra |= rest.rest()
    yield draft


def _run(record: Fields, losses: Losses) -> Draft:
    calls, loose = answers(record.each("traj"), losses)
    if not calls:
        raise NotACall("a run without a message of the agent")
    task, trial = record.name("task_id"), record.name("trial")
    draft = Draft(
        episode_id="/".join(n for n in (task, trial) if n is not None) or losses.place,
        calls=calls,
        task_id=task,
        group_id=task,
        reward=record.number("reward"),
    )
    _users(record.each("traj"), losses)
    draft.extra = record.rest() | ({"messages": loose} if loose else {})
    return draft


def _simulation(simulation: Fields, info: Fields | None, losses: Losses) -> Draft | None:
    """A simulation of tau2, as the agent saw it; `None` for one in which no text was exchanged."""
    messages = _seen_by_agent(simulation.each("messages"))
    calls, loose = answers(messages, losses, made=lambda m: not _is_greeting(m, messages))
    if not calls:
        if simulation.peek("ticks"):
            losses.lose("calls of a voice simulation, of which only ticks are kept")
        return None
    agent = info.fields("agent_info") if info else None
    arguments = agent.fields("llm_args") if agent else None
    for call in calls:
        _describe(call, losses)
        call.model = call.model or (agent.text("llm") if agent else None)
        call.sampling = _sampling(arguments)
    task = simulation.name("task_id")
    draft = Draft(
        episode_id=simulation.name("id") or losses.place,
        calls=calls,
        task_id=task,
        group_id=task,
    )
    result = simulation.fields("reward_info")
    if result is not None:
        draft.reward = result.number("reward")
        parts = result.fields("reward_breakdown")
        named = {name: parts.number(name) for name in parts} if parts else {}
        draft.rewards = {name: number for name, number in named.items() if number is not None} or None
    why = simulation.peek("termination_reason")
    draft.terminated, draft.truncated = why in ENDED or None, why in CUT or None
    _users(simulation.each("messages"), losses)
    simulation.any("messages")
    draft.extra = simulation.rest() | ({"messages": loose} if loose else {})
    return draft


def _seen_by_agent(messages: list[Fields]) -> list[Fields]:
    """The messages of the chat form, without the user's own tools, which the agent does not see."""
    found: list[Fields] = []
    for message in messages:
        if message.peek("requestor") == "user" or (message.peek("role") == "user" and message.peek("tool_calls")):
            continue
        inner = message.each("tool_messages") if isinstance(message.peek("tool_messages"), list) else [message]
        found += [_chat(m) for m in inner if m.peek("requestor") != "user"]
    return found


def _chat(message: Fields) -> Fields:
    """A message with its tool calls, or the call that it answers, in the chat form."""
    value = dict(message.value)
    if value.get("role") == "tool" and "id" in value:
        value["tool_call_id"] = value.pop("id")
    calls = value.get("tool_calls")
    if isinstance(calls, list):
        value["tool_calls"] = [
            {
                "id": c.get("id"),
                "type": "function",
                "function": {"name": c.get("name"), "arguments": c.get("arguments")},
            }
            if isinstance(c, dict) and "function" not in c
            else c
            for c in calls
        ]
    if value.get("content") is None:
        value["content"] = ""
    return Fields(value, message.losses, message.path)


def _is_greeting(message: Fields, messages: list[Fields]) -> bool:
    """Whether the agent's first words are the benchmark's own: it gave neither an answer nor a count."""
    return message is messages[0] and message.peek("usage") is None and message.peek("raw_data") is None


def _describe(call: Call, losses: Losses) -> None:
    """What the provider's own answer, or the count, says of a call."""
    raw, usage = call.extra.get("raw_data"), call.extra.get("usage")
    if isinstance(raw, dict) and isinstance(raw.get("message"), dict):  # tau2 keeps the choice alone
        raw = {"choices": [raw]}
    if isinstance(raw, dict) and isinstance(raw.get("choices"), list):
        told = exchange.calls(None, Fields(raw, losses, "raw_data"), losses)[0]
        call.model, call.finish_reason, call.counts = told.model, told.finish_reason, told.counts
    if isinstance(usage, dict):
        counted = Fields(usage, losses, "usage")
        call.counts = counted.whole("prompt_tokens"), counted.whole("completion_tokens")


def _sampling(arguments: Fields | None) -> Sampling | None:
    return exchange.sampling(arguments) if arguments is not None else None


def _users(messages: list[Fields], losses: Losses) -> None:
    number = sum(message.peek("role") == "user" for message in messages)
    if number:
        losses.gap("lost_calls", "the simulated user's: its prompts are not in the log", number)


FORMAT = Format(
    name="tau",
    title="tau-bench and tau2-bench: results",
    exactness="text",
    read=read,
    records=records,
    unsaid=("no_token_ids", "no_logprobs", "no_policy_version", "lossy_text"),
    note="The agent's tools, and in tau2 its instructions, are not in the log: prompts are short of them. Of voice "
    "simulations nothing can be converted.",
)  # fmt: skip
