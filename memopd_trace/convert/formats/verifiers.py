"""verifiers and prime-rl: episodes and traces of version 1 (a graph of messages), and the older results.jsonl.

A node of the graph holds the ids that its message adds, so the ids along a path are what the model read. A node that
was sampled is a call; what stands in front of its first sampled id is the prompt. Each trace of an episode has its own
reward and is an episode here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from memopd_trace.convert.draft import Call, Chat, Draft, finish_reason
from memopd_trace.convert.exchange import sampling
from memopd_trace.convert.fields import Fields, version_of
from memopd_trace.convert.flattened import check_size
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import Record, json_records
from memopd_trace.convert.transcript import is_reasoned
from memopd_trace.convert.verifiersresults import openai_message, result
from memopd_trace.invocation import IDS, MaskedFloats

METADATA = "metadata.json"
LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
LINKS = {"compaction": (None, "summary"), "subagent_call": ("spawn", None), "continuation": (None, None)}


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """The records of files; those of the older form with the `metadata.json` of their folder, if it is an input."""
    for _, group in groupby(files, lambda file: file.parent):
        inside = list(group)
        found = list(json_records(f for f in inside if f.name == METADATA))
        yield from found
        run = next((r.value for r in found if isinstance(r, Record) and isinstance(r.value, dict)), None)
        for record in json_records(f for f in inside if f.name != METADATA):
            if isinstance(record, Record) and run is not None:
                yield Record(record.place, {"rollout": record.value, "metadata": run}, record.size)
            else:
                yield record


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """An episode, a trace, or a result."""
    record, run = Fields(value, losses), None
    if set(record) == {"rollout", "metadata"}:
        record, run = Fields(record.any("rollout"), losses), record.fields("metadata")
    if isinstance(record.peek("traces"), list):
        yield from _episode(record)
    elif isinstance(record.peek("nodes"), list):
        yield _trace(record, None)
    elif "trajectory" in record or "completion" in record:
        yield result(record, run)
    elif "env_id" in record:
        raise NotACall("a run's description")
    elif "offset" in record and "chunk" in record:
        raise NotACall("a row of an index")
    elif "trace_id" in record:
        raise NotACall("what a trainer noted on a trace")
    else:
        raise BrokenRecord("neither an episode (traces), a trace (nodes) nor a result (completion)")


def _episode(record: Fields) -> list[Draft]:
    traces = record.each("traces")
    drafts = [_trace(trace, record) for trace in traces]
    if not any(draft.calls for draft in drafts):
        raise NotACall("an episode without a call")
    if len(drafts) > 1:
        for draft in drafts:
            draft.extra["episode"] = record.peek("id")
    for trace in traces:
        trace.drop()
    drafts[0].extra |= record.rest()
    return drafts


def _trace(trace: Fields, episode: Fields | None) -> Draft:
    losses = trace.losses
    version = trace.name("version")
    losses.version(version)
    draft = _named(trace, episode)
    graph = _Graph(trace)
    agent = trace.fields("agent")
    trainable = agent.flag("trainable") if agent else None
    policy = _policy(episode) if trainable is not False else None
    asked = {c.whole("node"): c for c in trace.each("calls")}
    failed = sum(c.peek("node") is None for c in trace.each("calls"))
    if failed:
        losses.lose("a call without an answer", failed)
    for index, node in enumerate(graph.nodes):
        if graph.sampled[index]:
            call = graph.call(index)
            call.agent_id, call.policy_version = agent.name("name") if agent else None, policy
            _describe(call, asked.get(index))
            if trainable is False and call.output_ids is not None:
                call.trained = np.zeros(len(call.output_ids), bool)
            call.extra |= node.rest()
            node.drop()
            draft.calls.append(call)
    if draft.calls and draft.calls[-1].finish_reason == "length" and draft.terminated is None:
        draft.truncated = True
    _rewards(trace, draft)
    draft.extra |= trace.rest()
    return draft


def _named(trace: Fields, episode: Fields | None) -> Draft:
    """The trace's name and outcome. Several traces of one episode are told apart by their own ids."""
    own = trace.name("id")
    name = own
    if episode is not None and episode.name("id") is not None:
        several = len(episode.each("traces")) > 1
        name = f"{episode.name('id')}/{own or trace.path}" if several else episode.name("id")
    draft = Draft(episode_id=name or trace.losses.place, whole=name is None)
    group = episode.fields("group") if episode else None
    draft.group_id = group.name("id") if group else None
    task = trace.fields("task")
    draft.task_id = (task.name("key") if "key" in task else task.name("hash")) if task else None
    if trace.peek("stop_condition") in LIMITS:
        draft.terminated, draft.truncated = False, True
    elif trace.flag("is_completed") and trace.flag("ok"):
        draft.terminated = True
    return draft


def _policy(episode: Fields | None) -> int | None:
    """The policy's version, where it stayed the same during the episode."""
    run = episode.fields("run") if episode else None
    work = run.fields("work") if run else None
    span = work.fields("policy") if work else None
    if span is None:
        return None
    start, end = version_of(span.peek("start")), version_of(span.peek("end"))
    if start is None or start != end:
        span.losses.degrade("the weights changed during the episode: which call saw which is not told")
        return None
    span.drop()
    return start


def _describe(call: Call, asked: Fields | None) -> None:
    """What the list of calls says of one."""
    if asked is None:
        return
    call.model = asked.text("model")
    call.finish_reason = finish_reason(asked.name("finish_reason")) or call.finish_reason
    settings, usage, time = asked.fields("sampling"), asked.fields("usage"), asked.fields("time")
    call.sampling = sampling(settings) if settings else None
    if usage is not None:  # prompt tokens do not count what came from the cache
        prompt, cached = usage.whole("prompt_tokens"), usage.whole("cached_input_tokens")
        call.counts = (None if prompt is None else prompt + (cached or 0), usage.whole("completion_tokens"))
    if time is not None:
        call.started_at, call.ended_at = (time.time(n) if time.peek(n) else None for n in ("start", "end"))
        time.drop()


def _rewards(trace: Fields, draft: Draft) -> None:
    """Named rewards by their scores; the trace's reward is their weighted sum."""
    rewards = trace.fields("rewards")
    scores: dict[str, float] = {}
    weights: dict[str, float] = {}
    for name in rewards or ():
        assert rewards is not None
        reward = rewards.fields(name)
        score = reward.number("score") if reward else None
        if reward is None or score is None:
            trace.losses.degrade("a reward that was not scored", name)
            continue
        weight = reward.number("weight")
        scores[name], weights[name] = score, 1.0 if weight is None else weight
    if scores:
        draft.rewards = scores
        draft.reward = sum(score * weights[name] for name, score in scores.items())
        if set(weights.values()) != {1.0}:
            draft.extra["reward_weights"] = weights


class _Graph:
    """The nodes of a trace: messages, the ids that each adds, and the node in front of each."""

    def __init__(self, trace: Fields) -> None:
        self.losses = trace.losses
        self.nodes = trace.each("nodes")
        self.parents = [_parent(node, i) for i, node in enumerate(self.nodes)]
        self.sampled = [bool(node.flag("sampled")) for node in self.nodes]
        self.messages = [_message(node) for node in self.nodes]
        self.ids = [_own_ids(node) for node in self.nodes]
        self.masks = [node.flags("mask") for node in self.nodes]
        self.logprobs = [node.logprobs("logprobs") for node in self.nodes]
        tools = trace.items("tools") or []
        self.tools = [_tool(t) for t in tools if isinstance(t, dict)] or None
        self.total = 0

    def path(self, index: int) -> list[int]:
        """The nodes from the root to `index`."""
        found: list[int] = []
        at: int | None = index
        while at is not None:
            found.append(at)
            at = self.parents[at]
        return found[::-1]

    def call(self, index: int) -> Call:
        """The call that made a node."""
        *before, _ = path = self.path(index)
        self.total += sum(len(self.ids[i]) for i in path) + len(path)
        check_size([self.total], self.losses)
        root = self.nodes[path[0]]
        tools = [_tool(t.value) for t in root.each("tools")] or self.tools
        call = Call(
            place=f"{self.losses.place} {self.nodes[index].path}",
            key=str(index),
            prompt=Chat(messages=[self.messages[i] for i in before], tools=tools),
            answer=self.messages[index],
            reasoned=is_reasoned(self.messages[index]),
            finish_reason=finish_reason(self.nodes[index].name("finish_reason")),
        )
        self._give_ids(call, index, before)
        sampled = [i for i in before if self.sampled[i]]
        call.parent = str(sampled[-1]) if sampled else None
        self._link(call, index)
        return call

    def _give_ids(self, call: Call, index: int, before: list[int]) -> None:
        """The ids of the prompt and the output, if all of the path has some."""
        own, mask = self.ids[index], self.masks[index]
        if not len(own):
            return
        if mask is None or len(mask) != len(own) or not mask.any():
            self.losses.degrade("ids left out: the mask does not tell where the output begins", call.place)
        elif any(self.sampled[i] and not len(self.ids[i]) for i in before):
            self.losses.degrade("ids left out: an earlier answer on the path has none", call.place)
        else:
            start = int(mask.argmax())
            call.prompt_ids = np.concatenate([*(self.ids[i] for i in before), own[:start]])
            call.output_ids = own[start:]
            call.sampled = None if mask[start:].all() else mask[start:]
            call.logprobs = _spread(self.logprobs[index], mask[start:])

    def _link(self, call: Call, index: int) -> None:
        """A parent that the harness declared across branches: it says more than where messages are shared."""
        for link in self.nodes[index].each("semantic_parents"):
            kind, source = link.peek("type"), link.peek("node")
            if (
                not isinstance(kind, str)
                or kind not in LINKS
                or type(source) is not int
                or not 0 <= source < len(self.nodes)
                or source == index
            ):
                continue
            if kind == "continuation" and call.parent is not None:
                continue
            link.drop()
            call.parent = str(source)
            call.relation, call.rewrite_kind = LINKS[kind]


def _parent(node: Fields, index: int) -> int | None:
    parent = node.whole("parent")
    if parent is not None and not 0 <= parent < index:
        raise BrokenRecord(f"{node.path}.parent: expected the number of an earlier node, got {parent}")
    return parent


def _own_ids(node: Fields) -> IDS:
    ids = node.ids("token_ids", empty=True)
    return np.empty(0, np.int32) if ids is None else ids


def _spread(logprobs: MaskedFloats | None, sampled: np.ndarray[Any, np.dtype[np.bool_]]) -> MaskedFloats | None:
    """One number for each sampled id, on the places of these; another number of them stays as it is."""
    if logprobs is None or len(logprobs) != sampled.sum():
        return logprobs
    whole = np.ma.masked_all(len(sampled), np.float32)
    whole[sampled] = logprobs
    return whole


def _message(node: Fields) -> dict[str, Any]:
    message = node.fields("message")
    if message is None:
        raise BrokenRecord(f"{node.path}: a node without a message")
    message.drop()
    return openai_message(message.value)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "function" in tool:
        return tool
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


FORMAT = Format(
    name="verifiers",
    title="verifiers and prime-rl: traces of version 1, and older results",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_policy_version"),
    note="Each trace of an episode is an episode here. Log-probabilities are written with four decimals. "
    "Results without a trajectory hold text alone; give their `metadata.json` too, which names the model.",
    records=records,
)
