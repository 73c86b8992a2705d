"""verl: the outputs of its agent loop, as JSON Lines, and the text that its trainer dumps.

An `AgentLoopOutput` holds one sequence with a mask, of which each run of sampled ids is a call. A loop may return
several for one session; the final reward is copied to all of them, so it is the session's. The dump of
`trainer.rollout_data_dir` has text alone, without the special tokens and with all turns in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert.draft import Call, Draft
from memopd_trace.convert.fields import Fields, version_of
from memopd_trace.convert.flattened import split
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """An output, a session's outputs under `outputs`, or a line of the dump."""
    record = Fields(value, losses)
    if isinstance(record.peek("input"), str) and "prompt_ids" not in record:
        yield _text(record)
        return
    several = isinstance(record.peek("outputs"), list)
    outputs = record.each("outputs") if several else [record]
    if not outputs or not all("prompt_ids" in o and "response_ids" in o for o in outputs):
        raise BrokenRecord("neither an output of an agent loop (no prompt_ids and response_ids) nor a dumped text")
    draft = _named(record)
    number = record.name("index")
    for i, output in enumerate(outputs):
        part = number if number is not None else losses.place
        draft.calls += _calls(output, f"{part}/{i}/" if several else f"{part}/")
        reward = output.number("reward_score")
        draft.reward = draft.reward if reward is None else reward
        if several:
            draft.calls[-1].extra |= output.rest()
    draft.calls[-1].extra |= record.rest()
    yield draft


def _named(record: Fields) -> Draft:
    """The session that a record is of; without a name of it, each record is one."""
    group, session = record.name("uid"), record.name("session_id")
    episode = session if group is None else group if session is None else f"{group}_{session}"
    if session is None:
        episode = record.name("request_id")
    return Draft(episode_id=episode or record.losses.place, whole=episode is None, group_id=group)


def _calls(output: Fields, prefix: str) -> list[Call]:
    prompt, response = output.ids("prompt_ids"), output.ids("response_ids", empty=True)
    mask, logprobs = output.flags("response_mask"), output.logprobs("response_logprobs")
    if prompt is None or response is None:
        raise BrokenRecord(f"{output.path or 'the record'}: an output without a prompt")
    calls = split(prompt, response, mask, logprobs, output.losses, prefix)
    told = output.fields("extra_fields")
    if told is not None:
        first, last = (version_of(told.peek(f"{name}_global_steps")) for name in ("min", "max"))
        if first is not None and first == last:
            told.any("min_global_steps"), told.any("max_global_steps")
            for call in calls:
                call.policy_version = first
    return calls


def _text(record: Fields) -> Draft:
    losses = record.losses
    losses.gap("lossy_text", "special tokens are left out, and all turns are one text")
    call = Call(place=losses.place, prompt=record.text("input"), answer=record.text("output"))
    draft = Draft(episode_id=record.name("request_id") or losses.place, calls=[call])
    draft.reward = record.number("score")
    call.extra = record.rest()
    return draft


FORMAT = Format(
    name="verl",
    title="verl: outputs of agent loops, and dumped rollouts",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_sampling", "no_finish_reason", "no_end"),
    note="Write the outputs where the loop returns them (`model_dump`, with `uid` and `session_id`): "
    "the trainer's own dump has text alone.",
)
