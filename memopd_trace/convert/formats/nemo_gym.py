"""NeMo Gym: rollouts (a Responses object with token ids on one output item per model call), and token entries.

A call's ids stand on the last of the items that it made. A rollout without ids has empty lists there; then a run of
items between two tool results is taken for one call, which a tokenizer can render.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses
from memopd_trace.convert.responses import made_by_model, of_input, to_messages, to_tools
from memopd_trace.invocation import Sampling


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A rollout, a bare response, a record that holds one under `input`, or a token entry."""
    record = Fields(value, losses)
    if "generation_token_ids" in record:
        yield _entry(record)
        return
    response = record if isinstance(record.peek("output"), list) else record.fields("response")
    if response is None and isinstance(record.peek("input"), dict):
        response = record.fields("input")
    if response is None or not isinstance(response.peek("output"), list):
        raise BrokenRecord("neither a rollout (no response with a list 'output') nor a token entry")
    draft = _named(record, response)
    draft.calls = _calls(record, response)
    draft.reward = record.number("reward")
    draft.extra = record.rest()
    yield draft


def _named(record: Fields, response: Fields) -> Draft:
    agent = record.fields("agent_ref")
    name = (agent.name("name") if agent else None) or ""
    task, rollout = record.name("_ng_task_index"), record.name("_ng_rollout_index")
    group = None if task is None else f"{name}/{task}".lstrip("/")
    own = response.name("id")
    episode = f"{group}/{rollout}" if group is not None and rollout is not None else own or record.losses.place
    return Draft(episode_id=episode, group_id=group, task_id=group)


def _calls(record: Fields, response: Fields) -> list[Call]:
    request = record.fields("responses_create_params") or response
    instructions = request.text("instructions")
    before = [{"role": "system", "content": instructions}] if instructions else []
    before += to_messages(of_input(request.any("input"))) if request is not response else []
    tools = to_tools(request.items("tools") or response.items("tools") or ()) or None
    sampling, model = _sampling(request, response), response.text("model")
    calls, made, between = [], [], []
    items = response.each("output")
    for number, item in enumerate(items):
        if not made_by_model(item.value):
            between.append(item.value)
            continue
        made.append(item)
        if item.peek("prompt_token_ids") or number + 1 == len(items) or not made_by_model(items[number + 1].value):
            record.losses.history(len(before))
            before = [*before, *to_messages(between)]
            call = _call(record, made)
            call.sampling, call.model, call.prompt = sampling, model, Chat(messages=before, tools=tools)
            calls.append(call)
            before, made, between = [*before, call.answer], [], []  # type: ignore[list-item]
    cut = response.fields("incomplete_details")
    if calls and cut is not None and cut.peek("reason") == "max_output_tokens":
        calls[-1].finish_reason = "length"
    return calls


def _call(record: Fields, items: list[Fields]) -> Call:
    last = items[-1]
    if "routed_experts" in last:
        record.losses.degrade("recorded expert routes are kept aside", last.path)
    return Call(
        place=f"{record.losses.place} {last.path}",
        prompt_ids=last.ids("prompt_token_ids"),
        output_ids=last.ids("generation_token_ids"),
        logprobs=last.logprobs("generation_log_probs"),
        answer=to_messages(i.value for i in items)[0],
        reasoned=any(i.peek("type") == "reasoning" for i in items),
    )


def _entry(record: Fields) -> Draft:
    """One call of a rollout: entries of several rollouts may interleave."""
    rollout = record.name("rollout_id")
    if rollout is None:
        raise BrokenRecord("a token entry without a rollout_id")
    items = record.peek("output_items")
    if "routed_experts" in record:
        record.losses.degrade("recorded expert routes are kept aside")
    call = Call(
        place=record.losses.place,
        key=record.name("model_call_id"),
        model=record.text("model"),
        prompt_ids=record.ids("prompt_token_ids"),
        output_ids=record.ids("generation_token_ids"),
        logprobs=record.logprobs("generation_log_probs"),
        reasoned=any(isinstance(i, dict) and i.get("type") == "reasoning" for i in items or ()),
        ended_at=record.time("created_at"),
    )
    call.extra = record.rest()
    return Draft(episode_id=rollout, calls=[call], whole=False)


def _sampling(request: Fields, response: Fields) -> Sampling | None:
    temperature, top_p = (
        request.number(name) if name in request else response.number(name) for name in ("temperature", "top_p")
    )
    return None if temperature is None and top_p is None else Sampling(temperature=temperature, top_p=top_p)


FORMAT = Format(
    name="nemo-gym",
    title="NeMo Gym: rollouts and token entries",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_policy_version"),
    note="Harnesses that keep no ids leave empty lists: such calls need a tokenizer.",
)
