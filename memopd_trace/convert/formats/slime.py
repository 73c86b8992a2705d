"""slime and miles: the samples of `--save-debug-rollout-data`, from its `.pt` files or as JSON.

A sample is one sequence with a mask, of which each run of trained ids is a call. Samples with one `rollout_id` are
pieces of one rollout (after a compaction, or of sub-agents). A `.pt` file is a pickle: PyTorch reads it with
`weights_only`, which builds plain data and tensors and runs nothing, and what holds more is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.fields import Fields, as_ids, version_of
from memopd_trace.convert.flattened import split
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses
from memopd_trace.convert.pickled import PICKLED, load
from memopd_trace.convert.records import SUFFIXES, Record, json_records
from memopd_trace.invocation import IDS

FINISH = {"completed": "stop", "truncated": "length", "aborted": "abort"}


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """A record for each sample of `.pt` files; JSON as it is."""
    for file in files:
        if file.suffix != PICKLED:
            yield from json_records([file])
            continue
        try:
            whole = load(file)
        except BrokenRecord as error:
            yield Issue(str(file), str(error))
            continue
        samples = whole.get("samples") if isinstance(whole, dict) else whole
        if not isinstance(samples, list) or not samples:
            yield Issue(str(file), "holds no list 'samples'")
            continue
        shared = {n: v for n, v in whole.items() if n != "samples"} if isinstance(whole, dict) else {}
        for number, sample in enumerate(samples):
            yield Record(f"{file}[{number}]", {**shared, "step": file.stem, "sample": sample})


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A sample, by itself or with the step that it was generated in."""
    record = Fields(value, losses)
    sample = record.fields("sample") or record
    if "tokens" not in sample and "response" not in sample:
        raise BrokenRecord("no sample: neither tokens nor a response")
    step = record.name("step") if sample is not record else None
    own, number = sample.name("rollout_id"), sample.name("index")
    name = "/".join(n for n in (step, own or number) if n is not None)
    group = sample.name("group_index")
    draft = Draft(episode_id=name or losses.place, whole=own is None)
    draft.group_id = group if group is None or step is None else f"{step}/{group}"
    status = sample.text("status")
    draft.calls = _calls(sample, losses.place)
    draft.calls[-1].finish_reason = FINISH.get(status or "")
    if sample.flag("remove_sample"):
        losses.degrade("a sample that is not trained on")
        for call in draft.calls:
            call.trained = None if call.output_ids is None else call.output_ids < 0
    draft.truncated, draft.terminated = (status == "truncated") or None, (status == "completed") or None
    _versions(sample, draft.calls)
    _reward(sample, draft)
    draft.calls[-1].extra |= {"status": status} if status else {}
    draft.calls[-1].extra |= sample.rest()
    if sample is not record:
        draft.extra = {name: value for name, value in record.rest().items() if name != "sample"}
    yield draft


def _calls(sample: Fields, prefix: str) -> list[Call]:
    tokens, length = sample.ids("tokens"), sample.whole("response_length") or 0
    if tokens is None:
        return [Call(place=sample.losses.place, prompt=_prompt(sample), answer=sample.text("response"))]
    if not 0 <= length <= len(tokens):
        raise BrokenRecord(f"{sample.path}.response_length: {length} of {len(tokens)} tokens")
    start = len(tokens) - length
    response: IDS = tokens[start:] if length else as_ids([], "response")
    mask, logprobs = sample.flags("loss_mask"), sample.logprobs("rollout_log_probs")
    calls = split(tokens[:start], response, mask, logprobs, sample.losses, f"{prefix}/")
    if len(calls) == 1:
        calls[0].prompt, calls[0].answer = _prompt(sample), sample.text("response")
    return calls


def _prompt(sample: Fields) -> Chat | str | None:
    value = sample.any("prompt")
    if isinstance(value, list) and all(isinstance(m, dict) for m in value):
        return Chat(messages=value) if value else None
    if not isinstance(value, str | None):
        raise BrokenRecord("prompt: expected text or messages")
    return value or None


def _versions(sample: Fields, calls: list[Call]) -> None:
    """The weights' versions, one for each request to the engine: those of the calls where there are as many, or where
    all are one."""
    versions = [version_of(v) for v in sample.items("weight_versions") or ()]
    if not versions:
        return
    if len(versions) != len(calls) and len(set(versions)) == 1:
        versions = versions[:1] * len(calls)
    if len(versions) == len(calls) and None not in versions:
        for call, version in zip(calls, versions, strict=True):
            call.policy_version = version
        return
    sample.losses.degrade("versions of the weights are kept as extra: which call saw which is not told")
    calls[-1].extra["weight_versions"] = sample.peek("weight_versions")


def _reward(sample: Fields, draft: Draft) -> None:
    """One number, or several by name, of which the log does not say which one counts."""
    if not isinstance(sample.peek("reward"), dict):
        draft.reward = sample.number("reward")
        return
    rewards = sample.fields("reward")
    assert rewards is not None
    numbers = {n: rewards.number(n) for n in list(rewards) if type(rewards.peek(n)) in (int, float)}
    draft.rewards = {n: v for n, v in numbers.items() if v is not None} or None


FORMAT = Format(
    name="slime",
    title="slime and miles: rollouts saved for debugging",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_model", "no_sampling"),
    note="A `.pt` file is read by PyTorch as plain data; one that holds more is refused. Where its agents re-align a "
    "drifted history, the answer that was replaced is not in the log.",
    records=records,
    suffixes=(PICKLED, *SUFFIXES),
)
