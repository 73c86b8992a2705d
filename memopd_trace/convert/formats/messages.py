"""Data sets of conversations: `messages` (Hugging Face, OpenAI), `conversations` (ShareGPT), `prompt` and `completion`.

Each message of the assistant is one call, whose prompt is what stands in front of it. Who wrote it, and under which
prompt of the system, the data set does not tell. Harbor's exported traces are such conversations, one for each call of
a trial: there a call is told again by those behind it, and stays one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from memopd_trace.convert.assemble import to_text
from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import SUFFIXES, json_in
from memopd_trace.convert.tables import PARQUET, rows_or_json
from memopd_trace.convert.transcript import is_reasoned

NAMES = ("id", "conversation_id", "uuid", "prompt_id")
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bing": "assistant", "bard": "assistant", "system": "system", "developer": "developer",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A conversation."""
    record = Fields(value, losses)
    messages, tools = _messages(record), _tools(record)
    name = next((n for key in NAMES if (n := record.name(key)) is not None), None)
    model = record.peek("model")
    model = record.text("model") if isinstance(model, str) else None
    options = record.peek("chat_template_kwargs")
    options = dict(record.any("chat_template_kwargs")) if isinstance(options, dict) else {}
    trial = record.name("trial_name") if "episode" in record else None
    draft = Draft(episode_id=trial or name or losses.place, whole=trial is None)
    told = hashlib.sha256()
    for number, message in enumerate(messages):
        told.update(to_text(message).encode("utf-8", "replace"))
        if message["role"] == "assistant":
            losses.history(number)
            draft.calls.append(Call(
                place=f"{losses.place} message {number}",
                key=told.hexdigest(),
                parent=draft.calls[-1].key if draft.calls else None,
                model=model,
                prompt=Chat(messages=messages[:number], tools=tools, options=options),
                answer=message,
                reasoned=is_reasoned(message),
            ))  # fmt: skip
    if not draft.calls:
        raise NotACall("no message of an assistant")
    draft.reward = record.number("reward")
    draft.task_id = record.name("task_id" if trial is None else "task")
    episode = None if trial is None else record.name("episode")
    draft.extra = record.rest() if episode is None else {episode: record.rest()}
    yield draft


def _messages(record: Fields) -> list[dict[str, Any]]:
    """The messages in the chat form, whichever form they are in."""
    for name in ("messages", "conversations", "conversation"):
        if name in record:
            return [_message(m) for m in record.each(name)]
    if "prompt" in record and "completion" in record:
        return [*_side(record, "prompt", "user"), *_side(record, "completion", "assistant")]
    raise BrokenRecord("no conversation: none of 'messages', 'conversations', or 'prompt' and 'completion'")


def _side(record: Fields, name: str, role: str) -> list[dict[str, Any]]:
    if isinstance(record.peek(name), str):
        return [{"role": role, "content": record.text(name)}]
    return [_message(m) for m in record.each(name)]


def _message(message: Fields) -> dict[str, Any]:
    """A message in the chat form; what it holds beside role and text stays with it."""
    who = "role" if "role" in message else "from"
    word = message.text(who)
    role = ROLES.get((word or "").lower())
    if role is None:
        raise BrokenRecord(f"{message.path}.{who}: '{word}' is no role that is known")
    content = message.any("content") if "content" in message else message.any("value")
    others = {k: v for k, v in message.value.items() if k not in ("role", "from", "content", "value") and v is not None}
    message.drop()
    if role != "function_call":
        return {"role": role, "content": content, **others}
    made = json_in(content, content) if isinstance(content, str) else content
    calls = [{"type": "function", "function": c} for c in (made if isinstance(made, list) else [made])]
    if not all(isinstance(c["function"], dict) for c in calls):
        raise BrokenRecord(f"{message.path}: a call of a function that is no object")
    return {"role": "assistant", "content": "", "tool_calls": calls, **others}


def _tools(record: Fields) -> list[dict[str, Any]] | None:
    """The tools, which some data sets hold as JSON in a text."""
    value = record.any("tools")
    if isinstance(value, str):
        value = json_in(value)
        if value is None and record.peek("tools").strip():
            record.losses.degrade("tools that cannot be read are left out")
    return [t for t in value if isinstance(t, dict)] or None if isinstance(value, list) else None


FORMAT = Format(
    name="messages",
    title="Conversations: `messages`, ShareGPT, prompt and completion; JSON and Parquet",
    exactness="text",
    read=read,
    records=rows_or_json,
    suffixes=(PARQUET, *SUFFIXES),
    unsaid=(
        "no_token_ids", "no_logprobs", "no_sampling", "no_policy_version", "no_finish_reason", "no_reward", "no_end",
        "no_group", "no_rewrite_kind", "lossy_text",
    ),
    note="A data set does not tell which model wrote an answer, or whether any did. Traces that Harbor exported, one "
    "for each call, are put together by their trial.",
)  # fmt: skip
