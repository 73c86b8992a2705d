"""Logs of requests and answers, one call a record, and how their calls belong together: `vllm`, `openai` and kin.

    {"request": {…}, "response": {…}, "session_id": "…", …}     the usual pair, as objects or JSON texts
    {"messages": […], …, "response": {…}}                       the request's fields beside the answer
    {"choices": […], …}                                         a bare answer

What ties calls together is one of `EPISODE`, of the record or of the request (or of its `metadata`). A call without any
is an episode of its own: nothing says what it follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert import responses
from memopd_trace.convert.draft import Call, Draft
from memopd_trace.convert.exchange import calls, part, prompt_ids_of
from memopd_trace.convert.fields import Fields, version_of
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall

EPISODE = ("episode_id", "session_id", "rollout_id", "conversation_id", "trajectory_id")
GROUP, TASK = ("group_id",), ("task_id",)
STARTED = ("started_at", "start_time", "request_timestamp")
ENDED = ("ended_at", "end_time", "response_timestamp", "timestamp")
VERSION = ("policy_version", "weight_version", "model_version")


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A record of such a log."""
    record = Fields(value, losses)
    status = record.peek("status_code")
    if type(status) is int and status >= 400:
        raise NotACall(f"an answer with status {status // 100}xx")
    request, response = pair(record)
    if isinstance(response.peek("output"), list):
        found = responses.calls(request, response, losses)
    else:
        found = calls(request, response, losses)
    told_ids = prompt_ids_of(request)
    for call in found:
        if call.prompt_ids is None:
            call.prompt_ids = told_ids
        describe(call, record)
    draft = draft_of(record, request, found)
    (found[0] if found else draft).extra |= record.rest()
    yield draft


def pair(record: Fields) -> tuple[Fields | None, Fields]:
    """(request, answer) of a record.

    Raises:
        BrokenRecord: there is no answer in it.
    """
    if isinstance(record.peek("choices"), list) or record.peek("object") in ("response", responses.COMPACTED):
        return part(record, "request") or (record if "messages" in record else None), record
    response = part(record, "response")
    if response is None:
        raise BrokenRecord("no answer: neither 'response' nor 'choices'")
    request = part(record, "request")
    beside = any(name in record for name in ("messages", "prompt", "input"))
    return request or (record if beside else None), response


def describe(call: Call, record: Fields) -> None:
    """What the record says about its call."""
    call.started_at = _first(record, STARTED, "time")
    call.ended_at = _first(record, ENDED, "time")
    call.agent_id = record.name("agent_id")
    call.attempt = record.whole("attempt")
    call.accepted = record.flag("accepted")
    call.reward = record.number("reward")
    if call.parent is None:
        call.parent = record.name("parent_id")
    call.policy_version = version_of(next((record.peek(n) for n in VERSION if record.peek(n) is not None), None))


def draft_of(record: Fields, request: Fields | None, found: list[Call]) -> Draft:
    """The calls of a record as a piece of the episode that it names, or as an episode of their own."""
    places = [record, *([request] if request is not None and request is not record else [])]
    if isinstance(places[-1].peek("metadata"), dict):
        metadata = places[-1].fields("metadata")
        places += [metadata] if metadata is not None else []
    names = {name: next((v for p in places if (v := _first(p, keys, "name"))), None)
             for name, keys in (("episode", EPISODE), ("group", GROUP), ("task", TASK))}  # fmt: skip
    episode = names["episode"]
    if episode is None:
        record.losses.gap("no_episode")
    return Draft(
        episode_id=episode or (found[0].key if found else None) or record.losses.place,
        calls=found,
        whole=episode is None,
        group_id=names["group"],
        task_id=names["task"],
    )


def _first(record: Fields, names: tuple[str, ...], kind: str) -> Any:
    for name in names:
        if name in record:
            return getattr(record, kind)(name)
    return None
