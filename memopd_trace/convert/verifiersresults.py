"""Results of the older verifiers (`results.jsonl`): a rollout a line, whose steps are calls where it kept them, else
each message of the assistant is one."""

from __future__ import annotations

from typing import Any

from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.exchange import sampling
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.losses import BrokenRecord, NotACall
from memopd_trace.convert.transcript import is_reasoned


def openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its tool calls in OpenAI's form; here their names and arguments stand beside the id."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    made = [
        {"id": c.get("id"), "type": "function", "function": {"name": c.get("name"), "arguments": c.get("arguments")}}
        if isinstance(c, dict) and "function" not in c
        else c
        for c in calls
    ]
    return {**message, "tool_calls": made}


def result(record: Fields, run: Fields | None) -> Draft:
    """A result of the older form: with a trajectory each step is a call, else each assistant's message."""
    losses = record.losses
    losses.version("legacy")
    steps = record.each("trajectory")
    task = record.name("example_id")
    name = next((s.peek("trajectory_id") for s in steps if isinstance(s.peek("trajectory_id"), str)), None)
    draft = Draft(episode_id=name or losses.place, whole=name is None, task_id=task)
    tools = [t for t in record.items("tool_defs") or () if isinstance(t, dict)] or None
    draft.calls = [_step(step, tools, i) for i, step in enumerate(steps)] or _from_completion(record, tools)
    if not draft.calls:
        raise NotACall("a result without an answer")
    settings = run.fields("sampling_args") if run else None
    for call in draft.calls:
        call.model = call.model or (run.text("model") if run else None)
        call.sampling = sampling(settings) if settings else None
    draft.reward = record.number("reward")
    if record.flag("is_truncated"):
        draft.truncated = True
    elif record.flag("is_completed") and record.peek("error") is None:
        draft.terminated = True
    if steps:  # the whole conversation, which the steps tell
        record.any("prompt"), record.any("completion")
    draft.extra = record.rest()
    return draft


def _step(step: Fields, tools: list[dict[str, Any]] | None, number: int) -> Call:
    losses = step.losses
    tokens, response = step.fields("tokens"), step.fields("response")
    answers = step.any("completion")
    call = Call(
        place=f"{losses.place} {step.path}",
        key=f"{step.peek('trajectory_id') or ''}/{number}",
        prompt=_prompt(step.any("prompt"), tools, step.path),
        answer=openai_message(answers[-1]) if _messages(answers) and answers else answers or None,
        model=response.text("model") if response else None,
        reward=step.number("reward"),
        finish_reason="length" if step.flag("is_truncated") else None,
    )
    if not isinstance(call.answer, str | dict | None):
        raise BrokenRecord(f"{step.path}.completion: expected text or messages")
    if response is not None:
        _add_answer(call, response)
    if tokens is not None:
        told = tokens.peek("prompt_mask")
        if isinstance(told, list) and not any(told):
            tokens.any("prompt_mask")
        call.prompt_ids, call.output_ids = tokens.ids("prompt_ids"), tokens.ids("completion_ids")
        call.logprobs, call.trained = tokens.logprobs("completion_logprobs"), tokens.flags("completion_mask")
    call.extra = step.rest()
    return call


def _add_answer(call: Call, response: Fields) -> None:
    """What the answer of a step says of why it ended, and of the counts where some were taken."""
    message, usage = response.fields("message"), response.fields("usage")
    if message is not None:
        call.finish_reason = call.finish_reason or finish_reason(message.name("finish_reason"))
        message.any("role"), message.any("content")  # they stand in the step's completion
    if usage is not None and usage.peek("prompt_tokens"):
        call.counts = (usage.whole("prompt_tokens"), usage.whole("completion_tokens"))


def _from_completion(record: Fields, tools: list[dict[str, Any]] | None) -> list[Call]:
    prompt, completion = _prompt(record.any("prompt"), tools, "prompt"), record.any("completion")
    place = record.losses.place
    if isinstance(completion, str) or not _messages(completion):
        if not isinstance(completion, str):
            raise BrokenRecord("completion: expected text or messages")
        answer: Any = completion if isinstance(prompt, str) else {"role": "assistant", "content": completion}
        return [Call(place=place, key="0", prompt=prompt, answer=answer)]
    if not isinstance(prompt, Chat):
        raise BrokenRecord("prompt: expected messages, as the completion has them")
    calls: list[Call] = []
    before = list(prompt.messages)
    for message in map(openai_message, completion):
        if message.get("role") == "assistant":
            parent = calls[-1].key if calls else None
            record.losses.history(len(before))
            chat = Chat(messages=list(before), tools=tools)
            calls.append(Call(place=place, key=str(len(calls)), parent=parent, prompt=chat, answer=message))
            calls[-1].reasoned = is_reasoned(message)
        before.append(message)
    if len(calls) > 1:
        record.losses.gap("lossy_text", "prompts are taken from the conversation as it was at its end")
    return calls


def _prompt(value: Any, tools: list[dict[str, Any]] | None, path: str) -> Chat | str | None:
    if value is None or isinstance(value, str):
        return value
    if not _messages(value):
        raise BrokenRecord(f"{path}: expected text or messages")
    return Chat(messages=[openai_message(m) for m in value], tools=tools)


def _messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) for m in value)
