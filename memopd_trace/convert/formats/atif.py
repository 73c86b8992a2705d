"""ATIF (Harbor's trajectories, 1.0 to 1.8), and Harbor's trial results, which hold the ids of each turn.

A trajectory is read with the files that it names, as far as they are among the inputs: continuations (their copied
steps are context, no calls) and sub-agents' (called from the step that names them). A step of an agent is one call, and
follows the one before. Where the log says that the context was summarised, the next call is an explicit rewrite.
A trial's result beside its agent's trajectory tells the same calls: the trajectory knows how they hang together, the
result what they were worth.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memopd_trace.convert.draft import Call, Chat, Draft
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import MAX_RECORD, Record, json_records, open_text
from memopd_trace.invocation import IDS

NAMES = re.compile(rb'"(?:trajectory_path|continued_trajectory_ref)"\s*:\s*"((?:[^"\\]|\\.)*+)"')
VERSION = re.compile(r"ATIF-v1\.(\d{1,3})")
NEWEST = 8
MAX_DEPTH = 8  # sub-agents of sub-agents
RESULT, TRAJECTORY = "result.json", "trajectory.json"


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """Each trajectory, and the files that it names under `files`; these are no records of their own."""
    files = list(files)
    inputs = {file.resolve(): file for file in files}
    named = {file: _named_by(file, inputs) for file in files}
    inner = {inputs[path] for paths in named.values() for path in paths}
    roots = [file for file in files if file not in inner] or files
    results = _results(roots)
    for file in roots:
        if file in results.values():  # told with its agent's trajectory
            continue
        family: dict[str, Any] = {}
        _gather(file, named, inputs, family, MAX_DEPTH)
        beside = [results[file]] if file in results else []
        trials = list(json_records(beside))
        yield from (found for found in trials if isinstance(found, Issue))
        trial = next((found.value for found in trials if isinstance(found, Record)), None)
        for found in json_records([file]):
            if isinstance(found, Record) and isinstance(found.value, dict):
                whole = {"trajectory": found.value, "files": family, "trial": trial}
                yield Record(found.place, whole, 1 + len(family) + (trial is not None))
            else:
                yield found


def _results(files: list[Path]) -> dict[Path, Path]:
    """The result of the trial that each agent's trajectory is of, where it is among the files."""
    found = {file.parent.resolve(): file for file in files if file.name == RESULT}
    mains = [file for file in files if file.name == TRAJECTORY and file.parent.name == "agent"]
    folders = {file: file.parent.parent.resolve() for file in mains}
    return {file: found[folder] for file, folder in folders.items() if folder in found}


def _named_by(file: Path, inputs: dict[Path, Path]) -> list[Path]:
    """The inputs, other than itself, that a file names."""
    try:
        with open_text(file) as stream:
            names = NAMES.findall(stream.read(MAX_RECORD))
        paths = [(file.parent / name.decode()).resolve() for name in names]
    except (OSError, ValueError, RuntimeError):  # no file, no text, a circle of links
        return []
    return [path for path in paths if path in inputs and path != file.resolve()]


def _gather(
    file: Path, named: dict[Path, list[Path]], inputs: dict[Path, Path], family: dict[str, Any], depth: int
) -> None:
    for path in named[file]:
        if path.name in family or not depth:
            continue
        for found in json_records([inputs[path]]):
            if isinstance(found, Record) and isinstance(found.value, dict):
                family.setdefault(path.name, found.value)
        _gather(inputs[path], named, inputs, family, depth - 1)


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A trajectory with its files, or a trial's result."""
    whole = Fields(value, losses)
    record = whole.fields("trajectory") or whole
    if "agent_result" in record:
        yield _trial(record)
        return
    version = record.text("schema_version")
    if version is None or VERSION.fullmatch(version) is None:
        raise BrokenRecord("no trajectory: 'schema_version' is not ATIF-v1.0 or later")
    losses.version(version)
    if int(version.rpartition(".")[2]) > NEWEST:
        losses.degrade("of a newer version than is known", version)
    files, trial = whole.fields("files"), whole.fields("trial")
    walk = _Walk(losses, files.value if files else {})
    own = record.name("session_id") or record.name("trajectory_id")
    draft = Draft(episode_id=own or losses.place)
    walk.trajectory(record, None, None, MAX_DEPTH)
    draft.calls = walk.calls
    if trial is not None and not _told_by(draft, trial):
        yield _trial(trial)
        return
    if not draft.calls and not losses.dropped_calls:
        raise NotACall("a trajectory without a step of an agent")
    draft.extra |= record.rest()
    yield draft


@dataclass(slots=True)
class _Walk:
    """The calls of a trajectory, its continuations and sub-agents, in the order in which they took place."""

    losses: Losses
    files: dict[str, Any]
    calls: list[Call] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def trajectory(self, record: Fields, agent_id: str | None, parent: str | None, depth: int) -> str | None:
        """One trajectory; its first call is spawned by `parent`. Returns the key of its last call."""
        agent = record.fields("agent")
        model = agent.text("model_name") if agent else None
        tools = agent.items("tool_definitions") if agent else None
        place = _Place(record, agent_id, model, [t for t in tools or () if isinstance(t, dict)] or None, parent)
        embedded = {t.name("trajectory_id"): t for t in record.each("subagent_trajectories")}
        for step in record.each("steps"):
            self._step(step, place, embedded, depth)
        following = record.text("continued_trajectory_ref")
        if following is not None:
            self._continue(following, place, depth)
        return place.last

    def _continue(self, name: str, place: _Place, depth: int) -> None:
        """The next file of the same agent: what it copies is its context now."""
        file = self._file(name)
        if file is None or not depth:
            self.losses.gap("lost_calls", f"a continuation that is not among the inputs: {name}")
            return
        agent = file.fields("agent")
        model = (agent.text("model_name") if agent else None) or place.model
        next_place = _Place(file, place.agent_id, model, place.tools, place.last, spawned=False, rewritten="summary")
        embedded = {t.name("trajectory_id"): t for t in file.each("subagent_trajectories")}
        for step in file.each("steps"):
            self._step(step, next_place, embedded, depth - 1)
        following = file.text("continued_trajectory_ref")
        if following is not None:
            self._continue(following, next_place, depth - 1)

    def _step(self, step: Fields, place: _Place, embedded: dict[str | None, Fields], depth: int) -> None:
        source, copied = step.text("source"), step.flag("is_copied_context")
        message = _content(step.any("message"))
        observation = step.fields("observation")
        results = observation.each("results") if observation else []
        inner = [ref for result in results for ref in result.each("subagent_trajectory_ref")]
        step.any("step_id")
        if source == "agent":
            answer = _answer(step, message)
            count = step.whole("llm_call_count")
            if count is not None and count > 1:
                self.losses.lose("several calls are one step", count)
            elif not copied and count != 0:
                self._call(step, place, answer)
            place.messages.append(answer)
        elif source in ("user", "system") and not inner:
            place.messages.append({"role": source, "content": message})
        elif source not in ("user", "system"):
            raise BrokenRecord(f"{step.path}.source: expected system, user or agent")
        for ref in inner:
            self._subagent(ref, place, embedded, depth)
        if source == "system" and inner:  # what the context is made of now is in no file
            place.rewritten, place.known = "summary", False
        place.messages += [_result(r) for r in results if "content" in r]

    def _call(self, step: Fields, place: _Place, answer: dict[str, Any]) -> None:
        metrics = step.fields("metrics")
        self.losses.history(len(place.messages))
        call = Call(
            place=f"{self.losses.place} {step.path}",
            key=f"{len(self.calls)}",
            model=step.text("model_name") or place.model,
            agent_id=place.agent_id,
            prompt=Chat(messages=list(place.messages), tools=place.tools) if place.known else None,
            answer=answer,
            reasoned=bool(step.peek("reasoning_content")),
            parent=place.last,
            relation="spawn" if place.last is not None and place.spawned else None,
            rewrite_kind=place.rewritten,
        )
        if metrics is not None:
            call.prompt_ids = metrics.ids("prompt_token_ids")
            call.output_ids = metrics.ids("completion_token_ids")
            call.logprobs = metrics.logprobs("logprobs")
            call.counts = metrics.whole("prompt_tokens"), metrics.whole("completion_tokens")
        place.last, place.spawned, place.rewritten = call.key, False, None
        self.calls.append(call)

    def _subagent(self, ref: Fields, place: _Place, embedded: dict[str | None, Fields], depth: int) -> None:
        name, path = ref.name("trajectory_id"), ref.text("trajectory_path")
        found = embedded.get(name) if name is not None else None
        if found is None and path is not None:
            found = self._file(path)
        if found is None or not depth:
            self.losses.gap("lost_calls", f"a sub-agent that is not among the inputs: {path or name}")
            return
        agent_id = ref.name("session_id") or found.name("session_id") or name or path
        self.trajectory(found, agent_id, place.last, depth - 1)

    def _file(self, path: str) -> Fields | None:
        """A file among the inputs, once."""
        name = path.rpartition("/")[2]
        if name not in self.files or name in self.read:
            return None
        self.read.add(name)
        return Fields(self.files[name], self.losses, name)


@dataclass(slots=True)
class _Place:
    """Where the walk stands in one trajectory: the messages so far, and the last call."""

    record: Fields
    agent_id: str | None
    model: str | None
    tools: list[dict[str, Any]] | None
    last: str | None
    spawned: bool = True
    rewritten: str | None = None
    known: bool = True
    messages: list[dict[str, Any]] = field(default_factory=list)


def _content(message: Any) -> Any:
    """Text, or parts of which only text can be rendered."""
    return message if isinstance(message, str | list) else "" if message is None else str(message)


def _answer(step: Fields, message: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": message}
    reasoning = step.text("reasoning_content")
    if reasoning:
        answer["reasoning_content"] = reasoning
    calls = [
        {"id": c.name("tool_call_id"), "type": "function",
         "function": {"name": c.text("function_name"), "arguments": c.any("arguments")}}
        for c in step.each("tool_calls")
    ]  # fmt: skip
    return {**answer, "tool_calls": calls} if calls else answer


def _result(result: Fields) -> dict[str, Any]:
    source = result.name("source_call_id")
    content = _content(result.any("content"))
    if source is None:
        return {"role": "user", "content": content}
    return {"role": "tool", "tool_call_id": source, "content": content}


def _told_by(draft: Draft, trial: Fields) -> bool:
    """Give a trajectory what its trial's result says of it; false where the result alone has the ids."""
    result = trial.fields("agent_result")
    details = result.each("rollout_details") if result else []
    calls = {(_listed(call.prompt_ids), _listed(call.output_ids)) for call in draft.calls}
    if details and not any(output for _, output in calls):
        return False
    for detail in details:
        names = "prompt_token_ids", "completion_token_ids"
        lists = [detail.items(name) or [] for name in names]
        turns = [
            tuple(tuple(ids) if isinstance(ids, list) else () for ids in turn) for turn in zip(*lists, strict=False)
        ]
        if calls.issuperset(turns):  # else they stay among what is left over
            for name in (*names, "logprobs"):
                detail.any(name)
    _judged(draft, trial)
    return True


def _listed(ids: IDS | None) -> tuple[int, ...]:
    return () if ids is None else tuple(ids.tolist())


def _judged(draft: Draft, trial: Fields) -> None:
    """The names and the rewards that a trial's result holds."""
    draft.episode_id = trial.name("trial_name") or trial.name("id") or draft.episode_id
    draft.task_id = trial.name("task_name")
    verifier = trial.fields("verifier_result")
    rewards = verifier.fields("rewards") if verifier else None
    if rewards is not None:
        named = {name: rewards.number(name) for name in rewards}
        draft.rewards = {name: number for name, number in named.items() if number is not None} or None
        draft.reward = named.get("reward")
    draft.extra |= trial.rest()


def _trial(record: Fields) -> Draft:
    """A trial's result: the ids of each turn, the main agent's first, then those of its helpers."""
    result = record.fields("agent_result")
    details = result.each("rollout_details") if result else []
    if not details:
        raise NotACall("a trial without rollout_details")
    draft = Draft(episode_id=record.losses.place)
    for number, detail in enumerate(details):
        draft.calls += _turns(detail, number, record.losses)
    _judged(draft, record)
    return draft


def _turns(detail: Fields, number: int, losses: Losses) -> list[Call]:
    """The turns of one agent: three lists of lists, side by side."""
    prompts, outputs, logprobs = (
        detail.items(name) or [] for name in ("prompt_token_ids", "completion_token_ids", "logprobs")
    )
    found: list[Call] = []
    if len(prompts) != len(outputs):  # each list leaves out the turns that had none
        losses.lose("prompts and outputs of a trial's turns are not as many", max(len(prompts), len(outputs)))
        return found
    if logprobs and len(logprobs) != len(outputs):
        losses.degrade("log-probabilities left out: which turn they are of is not told", detail.path)
        logprobs = []
    for turn in range(len(outputs)):
        one = {
            name: values[turn]
            for name, values in (("prompt", prompts), ("output", outputs), ("logprobs", logprobs))
            if turn < len(values)
        }
        fields = Fields(one, losses, f"{detail.path}, turn {turn}")
        call = Call(
            place=f"{losses.place} {fields.path}",
            key=f"{number}.{turn}",
            parent=found[-1].key if found else None,
            agent_id="main" if number == 0 else f"helper-{number}",
            prompt_ids=fields.ids("prompt"),
            output_ids=fields.ids("output"),
            logprobs=fields.logprobs("logprobs"),
        )
        found.append(call)
    return found


FORMAT = Format(
    name="atif",
    title="ATIF: Harbor's trajectories 1.0 to 1.8, and its trials' results",
    exactness="some ids",
    read=read,
    records=records,
    suffixes=(".json", ".jsonl"),
    unsaid=("no_logprob_kind", "no_sampling", "no_policy_version", "no_finish_reason", "no_end", "no_reward",
            "no_group", "lossy_text"),
    note="Give the folder, so that continuations and sub-agents' files are found. A trajectory that was converted from "
    "another log may have lost that log's rewrites: convert the native log where there is one.",
)  # fmt: skip
