"""SkyRL: what its generators return, as batches or one rollout a line, and the text that an evaluation dumps.

With step-wise trajectories (`is_last_step`) each row is a step, or several that were merged: what the environment said
stands behind the answer, outside the mask. Else a row is a whole rollout. Each run of sampled ids is a call. Rewards of
tokens are added up for each call, and kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.flattened import are_finite, split, spread
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall

COLUMNS = {
    "prompt_token_ids": "prompt_token_ids",
    "response_ids": "response_ids",
    "rewards": "reward",
    "loss_masks": "loss_mask",
    "stop_reasons": "stop_reason",
    "rollout_logprobs": "rollout_logprobs",
    "trajectory_ids": "trajectory_id",
    "is_last_step": "is_last_step",
    "env_metrics": "env_metrics",
}  # of a batch, and the same of one row


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A batch (a `GeneratorOutput`), a row of one, or a line of an evaluation's dump."""
    record = Fields(value, losses)
    prompts = record.peek("prompt_token_ids")
    if prompts is None and "output_response" in record:
        yield _text(record)
    elif record.value and all(name.startswith("eval/") for name in record):
        raise NotACall("metrics of an evaluation")
    elif not isinstance(prompts, list) or "response_ids" not in record:
        raise BrokenRecord("neither a generator's output (prompt_token_ids, response_ids) nor a dumped text")
    elif prompts and isinstance(prompts[0], list):
        yield from _batch(record, len(prompts))
    else:
        yield _line(record)


def _batch(record: Fields, rows: int) -> list[Draft]:
    """The rollouts of a batch. Rows of one trajectory follow one another in the order of the batch."""
    columns = {name: record.items(name) for name in COLUMNS if name in record}
    for name, column in columns.items():
        if len(column or ()) != rows:
            raise BrokenRecord(f"{name}: expected {rows} rows, got {len(column or ())}")
    drafts: dict[str, Draft] = {}
    run, place = 0, record.losses.place
    for number in range(rows):
        values = {COLUMNS[name]: (column or [])[number] for name, column in columns.items()}
        row = Fields(values, record.losses, f"[{number}]")
        instance, own = _names(row)
        own = own or f"{place}#{run}"
        draft = drafts.setdefault(own, Draft(episode_id=own, group_id=instance, task_id=instance))
        _add(draft, row, f"{len(draft.calls)}/")
        if row.peek("is_last_step") is not False:  # without it each row is a rollout
            run += 1
    first = next(iter(drafts.values()))
    first.extra |= record.rest()
    return list(drafts.values())


def _line(record: Fields) -> Draft:
    """A row by itself; the names of its fields may be those of a batch's columns."""
    values = {COLUMNS.get(name, name): value for name, value in record.value.items()}
    row = Fields(values, record.losses)
    instance, name = _names(row)
    stepwise = row.peek("is_last_step") is not None
    whole = name is None or not stepwise
    draft = Draft(episode_id=name or record.losses.place, whole=whole, group_id=instance, task_id=instance)
    step = row.name("global_step")
    if name is not None and step is not None:
        draft.episode_id = f"{step}/{name}"
    _add(draft, row, f"{record.losses.place}/")
    return draft


def _names(row: Fields) -> tuple[str | None, str | None]:
    """(the task, the rollout) that a row is of."""
    if isinstance(row.peek("trajectory_id"), dict):
        names = row.fields("trajectory_id")
        assert names is not None
        instance, repetition = names.name("instance_id"), names.name("repetition_id")
        return instance, None if instance is None or repetition is None else f"{instance}_{repetition}"
    return None, row.name("trajectory_id")


def _add(draft: Draft, row: Fields, prefix: str) -> None:
    losses = row.losses
    prompt, response = row.ids("prompt_token_ids"), row.ids("response_ids", empty=True)
    if prompt is None or response is None:
        raise BrokenRecord(f"{row.path or 'the record'}: a row without a prompt")
    mask, logprobs = row.flags("loss_mask"), row.logprobs("rollout_logprobs")
    last = row.flag("is_last_step")
    calls = split(prompt, response, mask, logprobs, losses, prefix)
    if last is not None:
        calls[0].parent = draft.calls[-1].key if draft.calls else None
    for call in calls:
        call.place = f"{losses.place} {row.path}".rstrip()
    _reward(draft, row, calls, stepwise=last is not None)
    calls[-1].finish_reason = finish_reason(row.peek("stop_reason") if row.name("stop_reason") else None)
    if last is not False and calls[-1].finish_reason == "length":
        draft.truncated = True
    calls[0].extra |= row.rest()
    draft.calls += calls


def _reward(draft: Draft, row: Fields, calls: list[Call], stepwise: bool) -> None:
    """A number is the rollout's, or with steps the call's; a list has one for each token."""
    if not isinstance(row.peek("reward"), list):
        reward = row.number("reward")
        if stepwise:
            calls[-1].reward = reward
        else:
            draft.reward = reward
        return
    values = row.items("reward") or []
    if not are_finite(values):
        raise BrokenRecord(f"{row.path}.reward: expected finite numbers")
    mask = row.flags("loss_mask")
    if len(values) != len(row.peek("response_ids")):
        row.losses.degrade("rewards left out: not as many as the ids", f"{len(values)}")
    else:
        spread(values, mask, calls)
    calls[0].extra["token_rewards"] = values


def _text(record: Fields) -> Draft:
    losses, prompt = record.losses, record.any("input_prompt")
    losses.gap("lossy_text", "all turns of a rollout are one text")
    if isinstance(prompt, list) and all(isinstance(m, dict) for m in prompt):
        prompt = Chat(messages=prompt)
    elif not isinstance(prompt, str | None):
        raise BrokenRecord("input_prompt: expected text or messages")
    call = Call(place=losses.place, prompt=prompt, answer=record.text("output_response"))
    call.finish_reason = finish_reason(record.name("stop_reason"))
    draft = Draft(episode_id=losses.place, calls=[call])
    score = record.any("score")
    values = score if isinstance(score, list) else [] if score is None else [score]
    if not are_finite(values):
        raise BrokenRecord("score: expected a finite number, or one for each token")
    draft.reward = float(sum(values)) if values else None
    call.extra = record.rest()
    return draft


FORMAT = Format(
    name="skyrl",
    title="SkyRL: outputs of its generators, and dumped evaluations",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_model", "no_sampling", "no_policy_version"),
    note="Write `GeneratorOutput` as JSON, a batch or a row a line. With `step_wise_trajectories` it holds each call "
    "as it was; without, one sequence for each rollout. Rows of several training steps need a `global_step`.",
)
