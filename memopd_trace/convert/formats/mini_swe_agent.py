"""mini-swe-agent: trajectories (`.traj.json`) of versions 1 and 2, and the bare lists of messages before them.

It only appends, so each assistant's message is a call and all before it its prompt. The provider's answer, where it is
kept (`extra.response`), has the counts, and the ids if the server gave some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memopd_trace.convert import exchange, responses
from memopd_trace.convert.draft import Call, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import Record
from memopd_trace.convert.transcript import ROLES, answers, count_lost_calls, gathered
from memopd_trace.invocation import Sampling

CUT = ("LimitsExceeded", "TimeExceeded")  # exit statuses: the harness ended it


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """Trajectories; the messages of a file that is a bare list of them are one."""
    return gathered(files, lambda value: isinstance(value, dict) and value.get("role") in ROLES)


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A trajectory."""
    if isinstance(value, list):
        value = {"messages": [part.value if isinstance(part, Record) else part for part in value]}
    record = Fields(value, losses)
    if not isinstance(record.peek("messages"), list):
        raise BrokenRecord("no trajectory: no list 'messages'")
    losses.version(record.text("trajectory_format"))
    messages = [_as_chat(m) for m in record.each("messages") if m.peek("role") != "exit"]
    calls, loose = answers(messages, losses)
    if not calls:
        raise NotACall("a trajectory without an answer of a model")
    draft = Draft(episode_id=losses.place, calls=calls)
    info = record.fields("info")
    settings = _settings(info)
    for call in calls:
        _describe(call, losses)
        call.sampling = settings[1]
        call.model = call.model or settings[0]
    if info is not None:
        draft.task_id = info.name("instance_id") or record.name("instance_id")
        draft.episode_id = draft.task_id or draft.episode_id
        _end(draft, info, losses)
    draft.extra = record.rest() | ({"messages": loose} if loose else {})
    yield draft


def _as_chat(message: Fields) -> Fields:
    """A message of the chat form; items of the Responses form are made into one."""
    output = message.peek("output")
    if message.peek("object") == "response" and isinstance(output, list):
        made = responses.to_messages(i for i in output if isinstance(i, dict) and responses.made_by_model(i))
    elif message.peek("role") is None and message.peek("type") in responses.TOOL_OUTPUTS:
        made = responses.to_messages([message.value])
    else:
        return message
    if len(made) != 1:
        raise BrokenRecord(f"{message.path}: several answers, or none, in one message")
    known = ("output", "object", "type", "call_id")
    left = {k: v for k, v in message.value.items() if k not in known}
    return Fields({**left, **made[0]}, message.losses, message.path)


def _describe(call: Call, losses: Losses) -> None:
    """What the provider's own answer says of a call."""
    extra = call.extra.get("extra")
    if not isinstance(extra, dict) or not isinstance(extra.get("response"), dict):
        return
    response = Fields(extra["response"], losses, "extra.response")
    if not isinstance(response.peek("choices"), list):
        call.model = response.text("model")
        return
    told = exchange.calls(None, response, losses)[0]
    call.model, call.finish_reason, call.counts = told.model, told.finish_reason, told.counts
    call.prompt_ids, call.output_ids, call.logprobs = told.prompt_ids, told.output_ids, told.logprobs
    call.extra |= told.extra
    call.extra["extra"] = {**{k: v for k, v in extra.items() if k != "response"}, "response": response.rest()}


def _settings(info: Fields | None) -> tuple[str | None, Sampling | None]:
    """(the model's name, its settings) out of the configuration."""
    config = info.fields("config") if info else None
    model = config.fields("model") if config else None
    if model is None:
        return None, None
    arguments = model.fields("model_kwargs")
    if arguments is not None:
        arguments.any("api_key")  # a secret is not passed on
    return model.text("model_name"), exchange.sampling(arguments) if arguments else None


def _end(draft: Draft, info: Fields, losses: Losses) -> None:
    status = info.text("exit_status")
    if status == "Submitted":
        draft.terminated = True
    elif status in CUT:
        draft.truncated = True
    if status is not None:
        draft.extra["exit_status"] = status
    count_lost_calls(draft, info, losses)


FORMAT = Format(
    name="mini-swe-agent",
    title="mini-swe-agent: trajectories",
    exactness="some ids",
    read=read,
    records=records,
    unsaid=("no_logprob_kind", "no_policy_version", "no_reward", "no_group", "lossy_text"),
    note="Ids are there where the model's server gave some with its answer. The tool that version 2 offers is not in "
    "the log.",
)  # fmt: skip
