"""rLLM: episodes with trajectories, one step a call, and the records of its gateway.

Each trajectory has its own reward and is an episode here. A step's reward is 0.0 until something sets it, so where all
of a trajectory are that and it has a reward of its own, none of them was set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.exchange import calls, part, sampling
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall

ENDED = ("env_done",)
CUT = ("max_turns_exceeded", "max_prompt_length_exceeded", "max_response_length_exceeded", "timeout")


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """An episode, as it is or as the logger of episodes leaves it, a trajectory, or a record of the gateway."""
    record = Fields(value, losses)
    if isinstance(record.peek("trajectories"), list):
        yield from _episode(record)
    elif isinstance(record.peek("steps"), list):
        yield _trajectory(record, record.name("uid") or losses.place, None, record.name("uid") is None)
    elif "completion_token_ids" in record or "response_message" in record:
        yield _exchange(record)
    elif "episode_files" in record:
        raise NotACall("a summary of a batch of episodes")
    else:
        raise BrokenRecord("neither an episode (trajectories), a trajectory (steps) nor a record of the gateway")


def _episode(record: Fields) -> list[Draft]:
    name = record.name("id") or record.name("episode_id")
    trajectories = record.each("trajectories")
    why = record.text("termination_reason")
    drafts = []
    for number, trajectory in enumerate(trajectories):
        own = trajectory.name("uid")  # an episode's id comes again each epoch, a trajectory's does not
        parts = [name or record.losses.place, own or (str(number) if len(trajectories) > 1 else None)]
        episode = "/".join(p for p in parts if p)
        draft = _trajectory(trajectory, episode, (name or "").rpartition(":")[0] or None, own is None)
        draft.terminated, draft.truncated = why in ENDED or None, why in CUT or None
        drafts.append(draft)
    if not any(draft.calls for draft in drafts):
        raise NotACall("an episode without a step")
    drafts[0].extra |= {"termination_reason": why} if why else {}
    drafts[0].extra |= record.rest()
    return drafts


def _trajectory(trajectory: Fields, episode: str, task: str | None, whole: bool) -> Draft:
    """One role's steps. Trajectories of a task with one name are those that are compared."""
    name = trajectory.text("name")
    draft = Draft(episode_id=episode, whole=whole, task_id=task)
    draft.group_id = task if task is None or name is None else f"{task}:{name}"
    steps = trajectory.each("steps")
    for number, step in enumerate(steps):
        call = _step(step, name)
        call.key, call.parent = str(number), str(number - 1) if number else None
        draft.calls.append(call)
    draft.reward = trajectory.number("reward")
    if draft.calls and all(not call.reward for call in draft.calls):
        if draft.reward is None:
            trajectory.losses.degrade("a reward of 0.0 that every step has by default is null", trajectory.path)
        for call in draft.calls:
            call.reward = None
    draft.extra |= trajectory.rest()
    return draft


def _step(step: Fields, agent: str | None) -> Call:
    output = step.fields("model_output")
    prompt, answer = _chat(step)
    call = Call(
        place=f"{step.losses.place} {step.path}",
        agent_id=agent,
        prompt_ids=_prompt_ids(step, "prompt_ids"),
        output_ids=step.ids("response_ids"),
        logprobs=step.logprobs("logprobs"),
        prompt=prompt,
        answer=answer,
        reasoned=bool(step.peek("thought")),
        reward=step.number("reward"),
        policy_version=step.version("weight_version"),
    )
    if output is not None:
        if call.prompt_ids is None:
            call.prompt_ids = _prompt_ids(output, "prompt_ids")
        if call.output_ids is None:
            call.output_ids = output.ids("completion_ids")
        call.logprobs = output.logprobs("logprobs") if call.logprobs is None else call.logprobs
        call.finish_reason = finish_reason(output.name("finish_reason"))
        call.counts = output.whole("prompt_length"), output.whole("completion_length")
        _drop_told(output, call)
    call.extra = step.rest()
    return call


def _drop_told(output: Fields, call: Call) -> None:
    """Leave out of what is left over the ids that the step tells as well."""
    for name, have in (("prompt_ids", call.prompt_ids), ("completion_ids", call.output_ids)):
        if have is not None and output.peek(name) == have.tolist():
            output.any(name)
    output.any("logprobs")


def _prompt_ids(step: Fields, name: str) -> Any:
    """The ids of a prompt, which are none where blocks of an image stand among them."""
    try:
        return step.ids(name)
    except BrokenRecord:
        value = step.peek(name)
        if not isinstance(value, list) or dict not in set(map(type, value)):
            raise
    step.losses.gap("opaque_content", "an image stands among the ids of a prompt")
    return None


def _chat(step: Fields) -> tuple[Chat | None, dict[str, Any] | None]:
    """(prompt, answer) of a step: its conversation ends with the answer."""
    messages = step.items("chat_completions")
    if not messages:
        return None, None
    if not all(isinstance(m, dict) for m in messages):
        raise BrokenRecord(f"{step.path}.chat_completions: expected objects")
    if messages[-1].get("role") != "assistant":
        return Chat(messages=messages), None
    answer = dict(messages[-1])
    if "reasoning" in answer:
        answer["reasoning_content"] = answer.pop("reasoning")
    return Chat(messages=messages[:-1]), answer


def _exchange(record: Fields) -> Draft:
    """A record of the gateway: one call of a session."""
    session = record.name("session_id")
    if session is None:
        record.losses.gap("no_episode")
    messages, answer = record.items("messages"), record.fields("response_message")
    request, counted = part(record, "raw_request"), record.fields("token_counts")
    if not all(isinstance(m, dict) for m in messages or ()):
        raise BrokenRecord("messages: expected objects")
    if answer is not None:
        answer.drop()
    call = Call(
        place=record.losses.place,
        key=record.name("trace_id"),
        model=record.text("model"),
        prompt_ids=record.ids("prompt_token_ids"),
        output_ids=record.ids("completion_token_ids"),
        logprobs=record.logprobs("logprobs"),
        prompt=Chat(messages=messages) if messages else None,
        answer=None if answer is None else answer.value,
        finish_reason=finish_reason(record.name("finish_reason")),
        policy_version=record.version("weight_version"),
        ended_at=record.time("timestamp"),
        sampling=sampling(request) if request is not None else None,
    )
    if counted is not None:
        call.counts = counted.whole("prompt"), counted.whole("completion")
    if isinstance(call.prompt, Chat) and request is not None and request.any("messages") is not None:
        tools = request.any("tools")
        call.prompt.tools = [t for t in tools if isinstance(t, dict)] if isinstance(tools, list) else None
    others = _other_choices(record, request, call)
    call.extra = record.rest()
    return Draft(episode_id=session or call.key or record.losses.place, calls=[call, *others], whole=session is None)


def _other_choices(record: Fields, request: Fields | None, first: Call) -> list[Call]:
    """The choices behind the first one, which the gateway keeps in the answer alone; the counts are those of all."""
    answer = part(record, "raw_response")
    choices = answer.peek("choices") if answer is not None else None
    if answer is None or not isinstance(choices, list) or len(choices) < 2:
        return []
    first.counts = (first.counts[0], None)
    others = calls(request, answer, record.losses)[1:]
    for number, call in enumerate(others, 1):
        call.key = None if first.key is None else f"{first.key}#{number}"
        call.parent, call.relation = (first.key, "fork") if first.key is not None else (None, None)
        call.ended_at, call.policy_version = first.ended_at, first.policy_version
    return others


FORMAT = Format(
    name="rllm",
    title="rLLM: episodes, and records of its gateway",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind",),
    note="Each trajectory of an episode is an episode here.",
)
