"""MemAgent: the batch that its recurrent rollout makes, of one row for each call, and its asynchronous outputs.

    {"prompts": […], "responses": […], "attention_mask": […], "sample_index": […], "final_mask": […]}
    {"conversations": [[message, …], …], "sample_index": […], "final_mask": […]}                    as text

`sample_index` names the episode; its rows stand in the order of the turns, or each by itself. Prompts are padded in
front, responses behind. From the second call on the memory, which is the answer of the call before without its last
token, stands in a prompt that was made anew: where the ids show just that, it is a rewrite of the memory, as declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from memopd_trace.convert.draft import Call, Draft
from memopd_trace.convert.fields import Fields, as_ids, as_logprobs
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.pickled import PICKLED, whole_or_json
from memopd_trace.convert.records import SUFFIXES
from memopd_trace.convert.tensors import bits, matrix, vector
from memopd_trace.convert.transcript import answers
from memopd_trace.invocation import IDS

LOGPROBS = "rollout_log_probs"
SCORES = "token_level_scores"  # of an episode, the same in each of its rows
STEPS = ("global_step", "step")


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A batch, by itself or with its parts as `DataProto` has them; a row of one; or an asynchronous output."""
    record = Fields(value, losses)
    for part in ("batch", "non_tensor_batch"):
        if isinstance(record.peek(part), dict):
            record = Fields({**record.value, part: None, **record.value[part]}, losses)
    if isinstance(record.peek("conversations"), list):
        yield from _conversations(record)
        return
    if "prompts" not in record or "responses" not in record:
        raise BrokenRecord("neither a batch (prompts, responses) nor an output (conversations)")
    yield from _batch(record)


def _batch(record: Fields) -> list[Draft]:
    """An episode for each sample: its rows in the order of the batch, none of them padding."""
    losses = record.losses
    prompts = matrix(record, "prompts") or []
    whole = not _is_row(record)
    columns = {n: matrix(record, n, len(prompts)) for n in ("responses", "attention_mask", "response_mask", "input_ids",
                                                            "position_ids", LOGPROBS, SCORES)}  # fmt: skip
    if columns["attention_mask"] is None:
        raise BrokenRecord("attention_mask: which ids are padding is not told")
    single = {n: vector(record, n, len(prompts)) for n in ("sample_index", "final_mask", "uid")}
    names = _Names(record)
    drafts: dict[str, Draft] = {}
    for number, prompt in enumerate(prompts):
        row = {"prompts": prompt} | {n: None if c is None else c[number] for n, c in columns.items()}
        call = _call(row, number, losses)
        if call is None:
            continue
        sample = _name(single["sample_index"][number], number)
        draft = drafts.setdefault(sample, Draft(episode_id=names.episode(sample), whole=whole))
        _follow(call, draft)
        draft.calls.append(call)
        draft.group_id = names.group(single["uid"][number])
        if single["final_mask"][number]:
            draft.terminated = True
            draft.reward = _score(row[SCORES])
    if not drafts:
        raise NotACall("a batch of padding alone")
    first = next(iter(drafts.values()))
    first.calls[0].extra |= {n: v for n, v in record.rest().items() if n not in ("sample_index", "final_mask")}
    return list(drafts.values())


def _is_row(record: Fields) -> bool:
    """Whether it is one row of a batch, the others of whose sample are other records."""
    return "sample_index" in record and not isinstance(record.peek("sample_index"), list | dict)


class _Names:
    """How episodes and groups of a record are called: by its step where it tells one, else by where it stands."""

    def __init__(self, record: Fields) -> None:
        step = next((record.name(n) for n in STEPS if n in record), None)
        self._prefix = f"{step}/" if step is not None else "" if _is_row(record) else f"{record.losses.place}/"

    def episode(self, sample: str) -> str:
        """Of a sample."""
        return f"{self._prefix}{sample}"

    def group(self, uid: Any) -> str | None:
        """Of the prompt that several samples answer."""
        return str(uid) if isinstance(uid, str | int) and not isinstance(uid, bool) else None


def _name(value: Any, number: int) -> str:
    if value is None:
        return str(number)
    if type(value) is not int and not isinstance(value, str):
        raise BrokenRecord(f"sample_index: expected a whole number, got {value!r:.40}")
    return str(value)


def _call(row: dict[str, Any], number: int, losses: Losses) -> Call | None:
    """The call of a row without its padding; none for a row that is all padding."""
    prompt, response, mask = row["prompts"], row["responses"], bits(row["attention_mask"], "attention_mask")
    if len(mask) != len(prompt) + len(response):
        raise BrokenRecord(f"attention_mask[{number}]: {len(mask)} for {len(prompt)} + {len(response)} ids")
    if not mask.any():
        return None
    asked, said = mask[: len(prompt)], mask[len(prompt) :]
    if (np.diff(asked.astype(np.int8)) < 0).any() or (np.diff(said.astype(np.int8)) > 0).any():
        raise BrokenRecord(f"attention_mask[{number}]: padding inside the prompt or the response")
    _check(row, mask, said, number, losses)
    start, stop = len(prompt) - int(asked.sum()), int(said.sum())
    call = Call(
        place=f"{losses.place}[{number}]",
        prompt_ids=as_ids(prompt[start:], f"prompts[{number}]"),
        output_ids=as_ids(response[:stop], f"responses[{number}]"),
    )
    if row[LOGPROBS] is not None:
        call.logprobs = as_logprobs(row[LOGPROBS][:stop], losses, f"{LOGPROBS}[{number}]")
    return call


def _check(row: dict[str, Any], mask: Any, said: Any, number: int, losses: Losses) -> None:
    """See that what a batch says twice agrees, and that its ids are the engine's: the asynchronous agent's are encoded
    again from text, and its mask leaves out what the template put behind an answer."""
    if row["input_ids"] is not None and row["input_ids"] != row["prompts"] + row["responses"]:
        raise BrokenRecord(f"input_ids[{number}]: not the prompt and the response")
    positions = row["position_ids"]
    if positions is not None and len(positions) == len(mask):
        told = [p for p, real in zip(positions, mask.tolist(), strict=True) if real]
        if told != list(range(len(told))):
            losses.degrade("positions that are not 0, 1, 2… are left out")
    if row["response_mask"] is not None and not np.array_equal(bits(row["response_mask"], "response_mask"), said):
        raise NotACall("ids that the asynchronous agent encoded again from text: convert its conversations")


def _follow(call: Call, draft: Draft) -> None:
    """A call follows the sample's one before, by a rewrite of the memory where its prompt holds that one's answer."""
    number = len(draft.calls)
    call.key = f"{call.place}"
    if not number:
        return
    before = draft.calls[-1]
    call.parent = before.key
    if before.output_ids is not None and call.prompt_ids is not None and _holds(call.prompt_ids, before.output_ids):
        call.rewrite_kind = "memory"


def _holds(prompt: IDS, memory: IDS) -> bool:
    """Whether a prompt holds an answer, its last id (the one that ends it) aside."""
    memory = memory[:-1] if len(memory) > 1 else memory
    whole, part, width = prompt.tobytes(), memory.tobytes(), prompt.itemsize
    at = whole.find(part)
    while at >= 0 and at % width:
        at = whole.find(part, at + 1)
    return len(memory) > 0 and at >= 0


def _score(scores: list[Any] | None) -> float | None:
    """The sum of an episode's scores, one for each id of its last answer."""
    if scores is None:
        return None
    if not all(type(v) in (int, float) and abs(v) < 2**53 for v in scores):
        raise BrokenRecord(f"{SCORES}: expected numbers")
    return float(sum(scores))


def _conversations(record: Fields) -> list[Draft]:
    """The calls of a sample's conversations, one after the other."""
    losses = record.losses
    items = record.items("conversations") or []
    samples = set(map(str, vector(record, "sample_index", len(items)))) if "sample_index" in record else set()
    if len(samples) > 1:
        raise BrokenRecord("sample_index: the conversations of one output are of several samples")
    final = vector(record, "final_mask", len(items)) if "final_mask" in record else []
    draft = Draft(episode_id=f"{losses.place}/{samples.pop()}" if samples else losses.place)
    for number, item in enumerate(items):
        messages = Fields({"m": item}, losses, f"conversations[{number}]").each("m")
        calls, _ = answers(messages, losses)
        for call in calls:
            call.key = f"{number}/{call.key}"
            call.parent = None if call.parent is None else f"{number}/{call.parent}"
        if calls and draft.calls:
            _follow_text(calls[0], draft.calls[-1])
        draft.calls += calls
    if not draft.calls:
        raise NotACall("conversations without an answer")
    draft.terminated = True if final and final[-1] else None
    draft.extra = record.rest()
    return [draft]


def _follow_text(call: Call, before: Call) -> None:
    call.parent = before.key
    memory = before.answer.get("content") if isinstance(before.answer, dict) else None
    messages = call.prompt.messages if call.prompt is not None and not isinstance(call.prompt, str) else []
    if isinstance(memory, str) and memory and any(memory in str(m.get("content")) for m in messages):
        call.rewrite_kind = "memory"


FORMAT = Format(
    name="memagent",
    title="MemAgent: batches of its recurrent rollouts, and asynchronous outputs",
    exactness="some ids",
    read=read,
    unsaid=("no_logprobs", "no_logprob_kind", "no_model", "no_sampling", "no_policy_version", "no_finish_reason"),
    note="Write the batch as lists (or `torch.save` it as a plain dictionary) with `sample_index`, `final_mask` and, "
    "for the group, `uid`. The asynchronous agent's batch holds ids that were encoded again: write its "
    "`conversations`. `old_log_probs` are the trainer's, not the sampler's, and stay in the side file.",
    records=whole_or_json,
    suffixes=(PICKLED, *SUFFIXES),
)
