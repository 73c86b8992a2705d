"""AReaL: interactions of its OpenAI-compatible client and proxy, trajectories as tensors, and the text that it dumps.

    {"interactions": {id: {"tensor_dict": {…}, "reward": …}}}       what the proxy exports for a session
    {"messages": […], "model_response": {"input_tokens": …}, …}     an `InteractionWithTokenLogpReward`, cached
    {"input_ids": …, "loss_mask": …, "versions": …, "rewards": …}   a trajectory, of padded rows
    {"prompt": "…", "completion": "…", "version_rle": […], …}       a line of `dump_to_file`

A sequence may hold several turns (`concat`); each run of its mask is a call. Tensors are lists, or what AReaL's own
serialization makes of them. What an export says of rewards is what `apply_reward_discount` made: that of the last
interaction is its own, the others have all later rewards in theirs.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from memopd_trace.convert import responses
from memopd_trace.convert.assemble import MAX_TOKENS
from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.fields import Fields, as_ids, as_logprobs
from memopd_trace.convert.flattened import check_size, split
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses
from memopd_trace.convert.pickled import PICKLED, whole_or_json
from memopd_trace.convert.records import SUFFIXES
from memopd_trace.convert.tensors import bits, matrix, vector

INTERACTION = ("model_response", "tensor_dict", "output_message_list", "input_tokens", "_cache")
BEFORE_EXPORT = ("model_response", "input_tokens", "chat_template_type")  # what no exported interaction has


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A session, an interaction, a trajectory, or a line of a dump."""
    record = Fields(_inside(value), losses)
    if isinstance(record.peek("completion"), str) and isinstance(record.peek("prompt"), str):
        yield _dumped(record)
    elif "input_ids" in record:
        yield from _trajectory(record)
    elif any(name in record for name in INTERACTION):
        yield _session(record, [record])
    else:
        yield _session(record, _interactions(record))


def _inside(value: Any) -> Any:
    """What an object holds that was serialized with the name of its class; other values as they are."""
    wrapped = isinstance(value, dict) and value.get("type") == "dataclass" and isinstance(value.get("data"), dict)
    return value["data"] if wrapped else value


def _interactions(record: Fields) -> list[Fields]:
    """Those of a session in their order: a list, or an object by their ids, which may be the record itself."""
    if isinstance(record.peek("interactions"), list):
        return [Fields(_inside(v), record.losses, f"interactions[{i}]")
                for i, v in enumerate(record.items("interactions") or ())]  # fmt: skip
    holder = record.fields("interactions") or record
    found = []
    for name in holder:
        value = _inside(holder.peek(name))
        if isinstance(value, dict) and (holder is not record or any(kind in value for kind in INTERACTION)):
            holder.any(name)
            found.append(Fields({"interaction_id": name, **value}, record.losses, name))
    if not found:
        raise BrokenRecord("no interaction, no trajectory (input_ids), and no dumped text (prompt, completion)")
    return found


def _with_ancestors(interactions: Sequence[Fields]) -> list[Fields]:
    """The interactions, and in front of each those that stand nested in it as its `parent` and nowhere else."""
    names = {_name_of(i.value) for i in interactions}
    found: list[Fields] = []
    for interaction in interactions:
        chain, parent = [interaction], _inside(interaction.peek("parent"))
        while isinstance(parent, dict) and _name_of(parent) not in names:
            names.add(_name_of(parent))
            chain.append(Fields(parent, interaction.losses, f"{chain[-1].path}.parent".lstrip(".")))
            parent = _inside(parent.get("parent"))
        found += reversed(chain)
    return found


def _session(record: Fields, interactions: Sequence[Fields]) -> Draft:
    losses, session = record.losses, record.name("session_id")
    alone = len(interactions) == 1 and interactions[0] is record
    if alone and session is None:
        losses.gap("no_episode")
    draft = Draft(episode_id=session or losses.place, whole=session is None or not alone)
    draft.group_id = record.name("group_id")
    for number, interaction in enumerate(_with_ancestors(interactions)):
        calls = _interaction(interaction, number)
        last = interaction is interactions[-1] and not (alone and session is not None)
        _give_reward(interaction, calls, last)
        if calls and interaction is not record:
            calls[-1].extra |= interaction.rest()
        draft.calls += calls
    if draft.calls:
        draft.calls[-1].extra |= record.rest()
    return draft


def _interaction(value: Fields, number: int) -> list[Call]:
    """The calls of an interaction: one, or with the turns before it in its tensors several."""
    losses, name = value.losses, _name_of(value.value)
    value.any("interaction_id"), value.any("_interaction_id")
    name = f"#{number}" if name is None else name
    engine = value if "input_tokens" in value else None
    if "model_response" in value:
        engine = Fields(_inside(value.any("model_response")), losses, "model_response")
    tensors = next((value.fields(n) for n in ("tensor_dict", "_cache") if n in value), None)
    if tensors is not None and engine is None:
        calls = [call for row in _rows(tensors) for call in _sequence(row, f"{name}/", losses)]
        for call in calls[:-1]:  # which the tensors of another interaction may hold too
            call.key = _digest(call)
        for before, call in itertools.pairwise(calls):
            call.parent = before.key
    else:
        calls = [_recorded(value, engine, losses)]
    parent = _inside(value.any("parent"))
    for call in calls:
        call.place = f"{losses.place} {value.path}".rstrip()
    if calls:
        calls[-1].key = name
        calls[0].parent = _name_of(parent) if isinstance(parent, dict) else parent if isinstance(parent, str) else None
    return calls


def _name_of(interaction: dict[str, Any]) -> str | None:
    """The id of an interaction: its own, or that of the answer in it."""
    for name in ("completion", "response"):
        inner = _inside(interaction.get(name))
        if isinstance(inner, dict) and isinstance(inner.get("id"), str):
            return str(inner["id"])
    found = interaction.get("interaction_id") or interaction.get("_interaction_id")
    return found if isinstance(found, str) else None


def _digest(call: Call) -> str:
    assert call.prompt_ids is not None and call.output_ids is not None
    length = len(call.prompt_ids).to_bytes(8, "big")
    return hashlib.sha256(length + call.prompt_ids.tobytes() + call.output_ids.tobytes()).hexdigest()


def _recorded(value: Fields, engine: Fields | None, losses: Losses) -> Call:
    """The call of an interaction that holds what the engine answered, or messages alone."""
    call = Call(place="", prompt=_prompt(value), answer=_answer(value))
    completion = value.maybe_fields("completion")
    if completion is not None:
        call.model = completion.text("model") if isinstance(completion.peek("model"), str) else None
    if engine is None:
        return call
    call.prompt_ids, call.output_ids = engine.ids("input_tokens"), engine.ids("output_tokens", empty=True)
    call.logprobs = engine.logprobs("output_logprobs")
    call.finish_reason = finish_reason(engine.name("stop_reason"))
    versions = engine.items("output_versions")
    if versions:
        _give_versions([call], _numbers(versions, "output_versions"), losses)
    if engine is not value:
        call.extra = engine.rest()
    return call


def _prompt(value: Fields) -> Chat | str | None:
    """The messages that were sent, or under the older client's `request` the same."""
    for name in ("messages", "request"):
        messages = value.peek(name)
        if isinstance(messages, list) and messages:
            if not all(isinstance(m, dict) for m in messages):
                raise BrokenRecord(f"{name}: expected a list of messages")
            value.any(name)
            return Chat(messages=messages)
    given = responses.of_input(value.any("input_data"))
    return Chat(messages=responses.to_messages(given)) if given and given != [""] else None


def _answer(value: Fields) -> dict[str, Any] | None:
    """The assistant's message, or a Responses answer as one; a plain text is what it said."""
    said = value.items("output_message_list")
    if said and all(isinstance(m, dict) for m in said):
        found = responses.to_messages(said) if any("type" in m for m in said) else said
        return {**found[0], "role": "assistant"} if len(found) == 1 else None
    if isinstance(value.peek("response"), str):
        return {"role": "assistant", "content": value.text("response")}
    return None


def _give_reward(value: Fields, calls: list[Call], last: bool) -> None:
    """The reward of an interaction. In an export only that of the last one is its own: in the others' is what came
    later."""
    reward, original = value.number("reward"), value.number("original_reward")
    if not calls:
        return
    named = {"original_reward": original}
    if last or any(name in value for name in BEFORE_EXPORT):
        calls[-1].reward = reward
    else:
        named["return"] = reward
    calls[-1].rewards = {name: number for name, number in named.items() if number is not None} or None


def _trajectory(record: Fields) -> list[Draft]:
    """A draft for each row: whether rows are samples of a task or calls of one run is not told."""
    losses, task = record.losses, record.name("task_id")
    rows = _rows(record)
    losses.gap("no_episode", "rows may be samples of a task, or calls of one run", len(rows))
    drafts = []
    for number, row in enumerate(rows):
        name = f"{losses.place}[{number}]" if task is None else f"{task}/{number}"
        draft = Draft(episode_id=name, group_id=task or losses.place, calls=_sequence(row, f"{number}/", losses))
        draft.reward = row["rewards"]
        draft.rewards = None if row["original_rewards"] is None else {"original_reward": row["original_rewards"]}
        drafts.append(draft)
    if drafts and drafts[0].calls:
        drafts[0].calls[0].extra |= record.rest()
    return drafts


def _rows(tensors: Fields) -> list[dict[str, Any]]:
    """The rows of tensors without their padding: ids, mask, log-probabilities, versions and rewards of each."""
    ids = matrix(tensors, "input_ids") or []
    names = ("loss_mask", "attention_mask", "logprobs", "versions", "turn_ids")
    columns = {name: matrix(tensors, name, len(ids)) for name in names}
    if columns["loss_mask"] is None:
        raise BrokenRecord("loss_mask: which ids were sampled is not told")
    rewards = {name: vector(tensors, name, len(ids)) for name in ("rewards", "original_rewards")}
    found = []
    for number in range(len(ids)):
        row: dict[str, Any] = {"input_ids": ids[number]}
        for name, column in columns.items():
            row[name] = None if column is None else column[number]
            if column is not None and len(column[number]) != len(ids[number]):
                raise BrokenRecord(f"{name}[{number}]: {len(column[number])} for {len(ids[number])} ids")
        length = _length(row.pop("attention_mask"), len(ids[number]))
        row = {name: None if values is None else values[:length] for name, values in row.items()}
        found.append(row | {n: Fields({n: v[number]}, tensors.losses).number(n) for n, v in rewards.items()})
    return found


def _length(mask: list[Any] | None, width: int) -> int:
    """How many ids are no padding, which stands behind them."""
    if mask is None:
        return width
    length = sum(bool(v) for v in mask)
    if any(mask[length:]):
        raise BrokenRecord("attention_mask: the padding does not stand at the end")
    return length


def _sequence(row: dict[str, Any], prefix: str, losses: Losses) -> list[Call]:
    """The calls of a row, whose mask is 1 on what was sampled."""
    mask = bits(row["loss_mask"], "loss_mask")
    if not mask.any():
        losses.lose("a sequence without a sampled id")
        return []
    ids, first = as_ids(row["input_ids"], "input_ids"), int(mask.argmax())
    logprobs = None if row["logprobs"] is None else as_logprobs(row["logprobs"][first:], losses, "logprobs")
    calls = split(ids[:first], ids[first:], mask[first:], logprobs, losses, prefix)
    if row["versions"] is not None:
        versions = np.array(_numbers(row["versions"], "versions"), np.int64)
        _give_versions(calls, versions[mask].tolist(), losses)
    turns = {t for t in row["turn_ids"] or () if type(t) is int and t >= 0}
    if turns and len(turns) != len(calls):
        losses.degrade("turns that follow without an id between are one call", f"{len(turns)} turns")
    return calls


def _give_versions(calls: Sequence[Call], versions: list[int], losses: Losses) -> None:
    """The weights' versions, one for each sampled id of the calls in turn; below 0 there is none."""
    lengths = [len(c.output_ids) if c.output_ids is not None else c.counts[1] or 0 for c in calls]
    if sum(lengths) != len(versions):
        losses.degrade("versions left out: not as many as the ids", f"{len(versions)} for {sum(lengths)} ids")
        return
    at = 0
    for call, length in zip(calls, lengths, strict=True):
        part, at = versions[at : at + length], at + length
        if part and min(part) < 0:
            losses.degrade("a version below 0 is none", str(min(part)))
        elif len(set(part)) == 1:
            call.policy_version = part[0]
        elif part:
            call.output_policy_versions = np.array(part, np.int64)


def _dumped(record: Fields) -> Draft:
    """A line of text: its turns as `segments`, where there are several."""
    losses, task, sample = record.losses, record.name("task_id"), record.name("sample_idx")
    losses.gap("no_episode", "lines of a task may be samples of it, or calls of one run")
    name = losses.place if task is None or sample is None else f"{task}/{sample}"
    draft = Draft(episode_id=name, group_id=task, calls=_turns(record))
    rle = record.items("version_rle")
    head, tail = record.whole("head_version"), record.whole("tail_version")
    if rle is not None:
        _give_versions(draft.calls, _unrolled(rle), losses)
    elif head is not None and head == tail and head >= 0:
        for call in draft.calls:
            call.policy_version = head
    elif head is not None:
        draft.extra |= {"head_version": head, "tail_version": tail}
    draft.reward = record.number("reward")
    original = record.number("original_reward")
    draft.rewards = {"original_reward": original} if original is not None else None
    draft.extra |= record.rest()
    return draft


def _turns(record: Fields) -> list[Call]:
    losses, prompt, said = record.losses, record.text("prompt") or "", record.text("completion") or ""
    length, whole = record.whole("prompt_len"), record.whole("seqlen")
    segments = record.each("segments")
    if not segments:
        counts = (length, whole - length if whole is not None and length is not None else None)
        return [Call(place=losses.place, key="0", prompt=prompt, answer=said, counts=counts)]
    texts = [(s.text("role"), s.text("text") or "", s.whole("len") or 0) for s in segments]
    ends = np.cumsum([len(text) for _, text, _ in texts]).tolist()
    check_size((end for end, (role, _, _) in zip(ends, texts, strict=True) if role == "gen"), losses)
    calls: list[Call] = []
    before, at = "", 0
    for number, (role, text, tokens) in enumerate(texts):
        if role == "gen":
            calls.append(Call(
                place=f"{losses.place} segments[{number}]", key=str(len(calls)), prompt=before, answer=text,
                parent=calls[-1].key if calls else None, counts=(at, tokens),
            ))  # fmt: skip
        before, at = before + text, at + tokens
    if not calls:
        raise BrokenRecord("segments: none of them was generated")
    return calls


def _unrolled(rle: list[Any]) -> list[int]:
    """Runs of versions `[version, tokens]` as one version for each token."""
    for i, run in enumerate(rle):
        if not isinstance(run, list) or len(run) != 2 or not all(type(v) is int and -2 < v < 2**62 for v in run):
            raise BrokenRecord(f"version_rle[{i}]: expected a version and how many tokens")
    if sum(max(0, tokens) for _, tokens in rle) > MAX_TOKENS:
        raise BrokenRecord(f"version_rle: of more than {MAX_TOKENS} tokens")
    return [version for version, tokens in rle for _ in range(tokens)]


def _numbers(values: list[Any], name: str) -> list[int]:
    for i, value in enumerate(values):
        if type(value) is not int or not -(2**62) < value < 2**62:
            raise BrokenRecord(f"{name}[{i}]: expected a version")
    return values


FORMAT = Format(
    name="areal",
    title="AReaL: interactions, trajectories, and dumped text",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_model", "no_sampling", "no_finish_reason", "no_end", "no_parent", "no_rewrite_kind"),
    note="Write the interactions before they are exported (`model_response`, `parent`, `reward`, with a `session_id`): "
    "in an export each reward has the later ones in it, and is kept as `return`. What `dump_to_file` writes is text; "
    "an older one, without `segments`, cuts several turns at the wrong place.",
    records=whole_or_json,
    suffixes=(PICKLED, *SUFFIXES),
)
