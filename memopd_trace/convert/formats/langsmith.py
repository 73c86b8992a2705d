"""LangSmith: runs, one a line or with their `child_runs`, and feedback. A run of a model is a call, a trace an episode.

What a run holds is what its wrapper saw: a request and an answer of OpenAI's or Anthropic's client, or messages and
generations of LangChain. `parent_run_id` says which code called which, not which prompt follows on which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from memopd_trace.convert import exchange, langchain, responses
from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import SUFFIXES, from_json
from memopd_trace.convert.tables import PARQUET, rows_or_json
from memopd_trace.convert.transcript import is_reasoned

TEXTS = ("inputs", "outputs", "extra", "feedback_stats", "child_runs")  # which a table keeps as JSON in a text
ORDER = re.compile(r"(\d{8}T\d{6}\d{0,6})Z[^.]*$")
MODEL = ("ls_model_name", "model", "model_name")


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A run, or a feedback."""
    record = Fields(value, losses)
    trace = record.name("trace_id")
    if "run_type" not in record:
        if "key" not in record or "run_id" not in record:
            raise BrokenRecord("neither a run (no run_type) nor feedback (no run_id and key)")
        yield _feedback(record, trace)
        return
    root = record.name("parent_run_id") is None
    trace = trace or (record.peek("id") if root and isinstance(record.peek("id"), str) else None)
    if trace is None:
        losses.gap("no_episode")
    draft = Draft(episode_id=trace or losses.place, whole=trace is None)
    runs = _flat(record)
    for run in runs:
        if run.peek("run_type") == "llm":
            draft.calls += _calls(run)
        elif run is not record:
            draft.extra.setdefault("runs", []).append(_without_children(run))
    if not draft.calls and not root and len(runs) == 1:
        raise NotACall("a run that is no model's" if record.peek("run_type") != "llm" else "a run without an answer")
    if root:
        draft.rewards = _scores(record)
    if record.peek("run_type") != "llm":
        draft.extra |= record.rest()
    yield draft


def _flat(record: Fields) -> list[Fields]:
    """A run and all that it called, in front of those behind it."""
    found, stack = [], [record]
    while stack:
        run = stack.pop()
        for name in TEXTS:
            if isinstance(run.peek(name), str):
                run.value[name] = from_json(run.peek(name))
        found.append(run)
        stack += reversed(run.each("child_runs"))
    return found


def _without_children(run: Fields) -> dict[str, Any]:
    value = {name: item for name, item in run.value.items() if name != "child_runs"}
    run.drop()
    return value


def _calls(run: Fields) -> list[Call]:
    """The calls of a run, none where it failed. A further answer to a prompt has the number of the first as parent."""
    asked = run.maybe_fields("inputs")
    said = run.maybe_fields("outputs")
    if said is None:
        return []
    losses, usage = run.losses, said.fields("usage_metadata")
    if isinstance(said.peek("choices"), list):
        found = exchange.calls(asked, said, losses)
        for call in found[1:]:
            call.parent, call.relation = "0", "fork"
    elif isinstance(said.peek("output"), list) and said.peek("object") == "response":
        found = responses.calls(asked, said, losses)
    elif isinstance(said.peek("generations"), list):
        found = _generations(run, asked, said)
    else:
        found = [_plain(asked, said, losses)]
    counts = (usage.whole("input_tokens"), usage.whole("output_tokens")) if usage else (None, None)
    for number, call in enumerate(found):
        _describe(call, run, number)
        if len(found) == 1 and call.counts == (None, None):
            call.counts = counts
    if found:
        found[0].rewards = _scores(run) if "parent_run_id" in run else None
        found[0].extra |= _without_told(run)
    return found


def _describe(call: Call, run: Fields, number: int) -> None:
    """What the run says of its call."""
    name = run.name("id")
    if call.key is not None and number == 0:
        call.extra["response_id"] = call.key
    call.key = _key(name, number)
    call.parent = None if call.parent is None else _key(name, int(call.parent))
    call.place = f"{run.losses.place} {run.path}".rstrip()
    call.started_at, call.ended_at = run.time("start_time"), run.time("end_time")
    call.order = _order(run, call)
    told = run.maybe_fields("extra")
    places = [told.maybe_fields(n) for n in ("metadata", "invocation_params")] if told else []
    for place in filter(None, places):
        names = [n for n in MODEL if isinstance(place.peek(n), str)]
        call.model = call.model or (place.text(names[0]) if names else None)
        if call.sampling is None:
            call.sampling = exchange.sampling(_settings(place))


def _key(name: str | None, number: int) -> str | None:
    return name if number == 0 or name is None else f"{name}#{number}"


def _settings(place: Fields) -> Fields:
    """Sampling settings under the names that requests have for them."""
    values = {n.removeprefix("ls_"): place.peek(n) for n in place}
    return Fields({n: v for n, v in values.items() if type(v) in (int, float)}, place.losses, place.path)


def _order(run: Fields, call: Call) -> float | None:
    """When a run began, in seconds: the last part of its dotted order, else its start."""
    dotted = run.peek("dotted_order")
    match = ORDER.search(dotted) if isinstance(dotted, str) else None
    if match is not None:
        try:
            return datetime.strptime(match[1].ljust(21, "0"), "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC).timestamp()
        except ValueError:
            pass
    return call.started_at.timestamp() if call.started_at else None


def _generations(run: Fields, asked: Fields | None, said: Fields) -> list[Call]:
    """LangChain's generations: of each prompt one or several."""
    found: list[Call] = []
    prompts = _prompts(asked)
    tools = _tools(run)
    for number, several in enumerate(said.items("generations") or ()):
        items = several if isinstance(several, list) else [several]
        for second, item in enumerate(items):
            generation = Fields(item, run.losses, f"outputs.generations[{number}][{second}]")
            asks = prompts[number] if number < len(prompts) else None
            call = _generation(generation, Chat(messages=asks, tools=tools) if isinstance(asks, list) else asks)
            if second:  # another answer to the same prompt, the first of which is so many calls before
                call.parent, call.relation = str(len(found) - second), "fork"
            found.append(call)
    return found


def _generation(generation: Fields, prompt: Chat | str | None) -> Call:
    call = Call(place="", prompt=prompt)
    info = generation.maybe_fields("generation_info")
    value = langchain.unpacked(generation.any("message"))
    if isinstance(value, dict):
        told = Fields(value, generation.losses, f"{generation.path}.message")
        call.answer = {**langchain.message(told), "role": "assistant"}
        call.reasoned = is_reasoned(call.answer)
        info = (told.maybe_fields("response_metadata")) or info
        usage = told.fields("usage_metadata")
        call.counts = (usage.whole("input_tokens"), usage.whole("output_tokens")) if usage else (None, None)
        generation.any("text")
        rest = told.rest()
    else:
        call.answer, rest = generation.text("text"), {}
    for name in ("finish_reason", "stop_reason") if info is not None else ():
        assert info is not None
        if isinstance(info.peek(name), str):
            call.finish_reason = finish_reason(info.text(name))
    for name in ("model_name", "model") if info is not None else ():
        assert info is not None
        if isinstance(info.peek(name), str):
            call.model = call.model or info.text(name)
    rest = {name: item for name, item in rest.items() if name not in ("type", "id")}
    call.extra = {**({"message": rest} if rest else {}), **generation.rest()}
    return call


def _prompts(asked: Fields | None) -> list[list[dict[str, Any]] | str]:
    """The prompts of a run of LangChain: lists of messages, one list, or texts."""
    if asked is None:
        return []
    if isinstance(asked.peek("prompts"), list):
        return [p if isinstance(p, str) else "" for p in asked.items("prompts") or ()]
    value = asked.any("messages")
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = [value]
    return [_messages(v, asked) for v in value] if isinstance(value, list) else []


def _messages(value: Any, asked: Fields) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BrokenRecord("inputs.messages: expected lists of messages")
    return [
        langchain.message(Fields(langchain.unpacked(item), asked.losses, f"inputs.messages[{i}]"))
        for i, item in enumerate(value)
    ]


def _plain(asked: Fields | None, said: Fields, losses: Losses) -> Call:
    """A run of a function that its author marked as a model's: messages in, a message or a text out."""
    prompts = _prompts(asked)
    prompt = prompts[0] if prompts else None
    tools = asked.any("tools") if asked is not None and isinstance(prompt, list) else None
    call = Call(place="", prompt=Chat(messages=prompt, tools=_objects(tools)) if isinstance(prompt, list) else prompt)
    system = asked.any("system") if asked is not None else None
    if isinstance(call.prompt, Chat) and system:  # Anthropic's client has it beside the messages
        call.prompt.messages.insert(0, {"role": "system", "content": system})
    value: Any = said.value
    for name in ("message", "messages", "output"):
        if said.peek(name) is not None and "content" not in said:
            value = said.any(name)
            value = value[-1] if isinstance(value, list) and value else value
    value = langchain.unpacked(value)
    if isinstance(value, dict) and ("content" in value or "tool_calls" in value):
        told = Fields({"role": "assistant", **value}, losses, "outputs")
        call.answer = langchain.message(told)
        if isinstance(told.peek("stop_reason"), str):
            call.finish_reason = finish_reason(told.text("stop_reason"))
        call.model = told.text("model") if isinstance(told.peek("model"), str) else None
        call.reasoned = is_reasoned(call.answer)
        said.any("content"), said.any("tool_calls"), said.any("role")
    elif isinstance(value, str):
        call.answer = {"role": "assistant", "content": value} if isinstance(call.prompt, Chat) else value
    call.sampling = exchange.sampling(_settings(asked)) if asked is not None else None
    return call


def _tools(run: Fields) -> list[dict[str, Any]] | None:
    """The tools that LangChain offered, which are among the settings of the call."""
    told = run.maybe_fields("extra")
    given = told.maybe_fields("invocation_params") if told else None
    return _objects(given.any("tools")) if given is not None else None


def _objects(value: Any) -> list[dict[str, Any]] | None:
    return [v for v in value if isinstance(v, dict)] or None if isinstance(value, list) else None


def _without_told(run: Fields) -> dict[str, Any]:
    return {name: item for name, item in run.rest().items() if name not in ("run_type", "trace_id", "dotted_order")}


def _scores(run: Fields) -> dict[str, float] | None:
    """Feedback on a run, by its key: the mean where there were several."""
    stats = run.maybe_fields("feedback_stats")
    found: dict[str, float] = {}
    for key in list(stats) if stats is not None else ():
        assert stats is not None
        value = stats.maybe_fields(key)
        if value is not None and type(value.peek("avg")) in (int, float) and (mean := value.number("avg")) is not None:
            found[key] = mean
    return found or None


def _feedback(record: Fields, trace: str | None) -> Draft:
    """Feedback on a trace by its key; that on a run inside it is kept as it is."""
    about, key, score = record.name("run_id"), record.text("key"), record.any("score")
    draft = Draft(episode_id=trace or about or record.losses.place, whole=False)
    if type(score) in (int, float, bool) and abs(score) < 2**53 and about in (None, draft.episode_id):
        draft.rewards = {str(key): float(score)}
        name = record.name("id") or record.losses.place
        draft.extra = {f"feedback {name}": rest} if (rest := record.rest()) else {}
    else:
        draft.extra = {f"feedback {record.name('id') or record.losses.place}": record.value}
    return draft


FORMAT = Format(
    name="langsmith",
    title="LangSmith: runs and feedback, as its client and its exports give them",
    exactness="some ids",
    read=read,
    unsaid=(
        "no_logprob_kind", "no_policy_version", "no_reward", "no_end", "no_group", "no_parent", "no_rewrite_kind",
        "lossy_text",
    ),
    note="Ids are there where a wrapped client's server gave some. Feedback keeps its keys; which of them is the "
    "reward is not told. Calls belong together by trace: a thread of several traces is several episodes.",
    records=rows_or_json,
    suffixes=(PARQUET, *SUFFIXES),
)  # fmt: skip
