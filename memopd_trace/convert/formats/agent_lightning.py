"""Agent Lightning: events of its store (1.0) and spans (0.x), lines of several rollouts interleaved.

An attempt at a rollout is an episode. A request's ids stand in the answer; a span has them as attributes, often as
text. The last reward of an attempt is its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from memopd_trace.convert.draft import Call, Draft, finish_reason
from memopd_trace.convert.exchange import calls, part, prompt_ids_of
from memopd_trace.convert.fields import Fields, as_ids, as_logprobs
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.records import json_in
from memopd_trace.invocation import IDS, MaskedFloats

PROMPT = re.compile(r"(^|\.)prompt_token_ids$")
OUTPUT = re.compile(r"(^|\.)(response_token_ids(\.0)?|token_ids)$")
CHOICES = "llm.hosted_vllm.choices"
LOGPROBS = re.compile(r"(^|\.)logprobs(\.content)?$")
REWARD = re.compile(r"^agentlightning\.reward\.(\d{1,4})\.(name|value)$")
MODEL = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name", "llm.hosted_vllm.model")
MAX_TEXT = 2**24  # characters of an attribute that Python wrote


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """An event or a span."""
    record = Fields(value, losses)
    rollout = record.name("rollout_id")
    if rollout is None:
        raise BrokenRecord("neither an event nor a span: no rollout_id")
    attempt = record.name("attempt_id")
    draft = Draft(episode_id=rollout if attempt is None else f"{rollout}/{attempt}", whole=False)
    if "event_type" in record:
        losses.version("1")
        _event(record, draft)
    elif "attributes" in record:
        losses.version("0")
        _span(record, draft)
    else:
        raise NotACall("a rollout's description")
    yield draft


def _event(record: Fields, draft: Draft) -> None:
    kind, data = record.text("event_type"), record.fields("data")
    if kind == "reward" and data is not None:
        draft.reward = data.number("value")
        rest = {f"reward_{name}": value for name, value in data.rest().items()}
        draft.extra = rest
        return
    if kind != "model_request" or data is None:
        raise NotACall(f"an event of type '{kind}'")
    response = part(data, "response")
    if response is None:
        raise NotACall("a request without an answer")
    request = part(data, "request")
    draft.calls = calls(request, response, record.losses)
    for call in draft.calls:
        call.prompt_ids = call.prompt_ids if call.prompt_ids is not None else prompt_ids_of(request)
        call.ended_at = record.time("timestamp")
        call.policy_version = data.version("model_version")
        call.model = data.text("model") or call.model
        call.finish_reason = call.finish_reason or finish_reason(data.name("finish_reason"))
    draft.calls[0].extra |= record.rest()


def _span(record: Fields, draft: Draft) -> None:
    attributes = record.fields("attributes")
    assert attributes is not None
    prompt, output = _ids(attributes, PROMPT), _ids(attributes, OUTPUT)
    choice = _choice(attributes) if output is None else None
    if choice is not None:
        output = choice.ids("token_ids")
    _rewards(attributes, draft)
    if prompt is None and output is None:
        if draft.reward is None:
            raise NotACall("a span without ids and reward")
        return
    call = Call(
        place=record.losses.place,
        key=record.name("span_id"),
        order=record.number("sequence_id"),
        model=next((m for m in (attributes.text(n) for n in MODEL if n in attributes) if m), None),
        prompt_ids=prompt,
        output_ids=output,
        logprobs=_logprobs(attributes) if choice is None else _logprobs_of(choice),
        finish_reason=finish_reason(choice.name("finish_reason")) if choice is not None else None,
        started_at=record.time("start_time"),
        ended_at=record.time("end_time"),
    )
    call.extra = record.rest()
    draft.calls = [call]


def _decoded(value: Any) -> Any:
    """What a text holds, as JSON or as Python writes it."""
    if not isinstance(value, str):
        return value
    found = json_in(value, value)
    if found is not value:
        return found
    try:
        return ast.literal_eval(value) if len(value) <= MAX_TEXT else value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value


def _choice(attributes: Fields) -> Fields | None:
    """The first choice of an answer whose choices are one text."""
    choices = _decoded(attributes.peek(CHOICES))
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return None
    if len(choices) > 1:
        attributes.losses.degrade("choices behind the first one are kept as extra", f"{len(choices)}")
    else:
        attributes.any(CHOICES)
    return Fields(choices[0], attributes.losses, f"{attributes.path}.{CHOICES}[0]")


def _logprobs_of(choice: Fields) -> MaskedFloats | None:
    told = choice.fields("logprobs")
    content = told.items("content") if told else None
    if not content:
        return None
    numbers = [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
    return as_logprobs(numbers, choice.losses, f"{choice.path}.logprobs")


def _ids(attributes: Fields, name: re.Pattern[str]) -> IDS | None:
    for key in attributes:
        if name.search(key):
            value = _decoded(attributes.any(key))
            while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
                value = value[0]
            if value is not None and not isinstance(value, list):
                raise BrokenRecord(f"{attributes.path}.{key}: expected a list of token ids")
            if value:
                return as_ids(value, f"{attributes.path}.{key}")
            attributes.losses.degrade("an empty list of ids is null", key)
    return None


def _logprobs(attributes: Fields) -> MaskedFloats | None:
    for key in attributes:
        if LOGPROBS.search(key):
            value = _decoded(attributes.any(key))
            if isinstance(value, list) and value:
                numbers = [v.get("logprob") if isinstance(v, dict) else v for v in value]
                return as_logprobs(numbers, attributes.losses, f"{attributes.path}.{key}")
    return None


def _rewards(attributes: Fields, draft: Draft) -> None:
    """Rewards by number: the first one is the reward, all of those with a name are kept by it."""
    found: dict[int, dict[str, Any]] = {}
    for key in attributes:
        match = REWARD.match(key)
        if match is not None:
            number = attributes.number(key) if match[2] == "value" else attributes.name(key)
            found.setdefault(int(match[1]), {})[match[2]] = number
    named = {r["name"]: r["value"] for r in found.values() if r.get("name") and r.get("value") is not None}
    draft.rewards = named or None
    draft.reward = found[min(found)].get("value") if found else None


FORMAT = Format(
    name="agent-lightning",
    title="Agent Lightning: events (1.0) and spans (0.x)",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_end", "no_group", "no_parent", "no_rewrite_kind"),
    note="The triplets that its trainer sees keep one request of those with equal prompts; the events have them all.",
)
