"""Tinker cookbook: what its capture keeps (`tinkercapture`), and its former token database: Parquet, one turn a row.

Rows of a trajectory stand in order, and an observation that goes on from the turn before is stored as what it adds
(`ob_is_delta`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from memopd_trace.convert.draft import Call, Draft, finish_reason
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.flattened import check_size
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Issue, Losses, NotACall
from memopd_trace.convert.records import SUFFIXES, Record
from memopd_trace.convert.tables import PARQUET, rows_or_json
from memopd_trace.convert.tinkercapture import captured, is_captured
from memopd_trace.invocation import IDS

NAMES = ("run_id", "run_attempt", "split", "iteration", "group_idx", "traj_idx", "source")


def records(files: Iterable[Path]) -> Iterator[Record | Issue]:
    """A record for the rows of each trajectory, as far as they stand behind one another."""
    rows: list[Record] = []
    for found in chain.from_iterable(map(_apart, rows_or_json(files))):
        if isinstance(found, Issue):
            yield found
            continue
        if rows and not _follows(rows[-1].value, found.value):
            yield _together(rows)
            rows = []
        rows.append(found)
    if rows:
        yield _together(rows)


def _apart(found: Record | Issue) -> Iterator[Record | Issue]:
    """The rows of a page that the capture's store answers with; others as they are."""
    rows = found.value.get("rows") if isinstance(found, Record) and isinstance(found.value, dict) else None
    if not isinstance(rows, list) or isinstance(found, Issue):
        yield found
        return
    for number, row in enumerate(rows):
        yield Record(f"{found.place}.rows[{number}]", row)


def _follows(before: Any, after: Any) -> bool:
    """Whether a row is of the same trajectory as the one in front of it, and of a later turn."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return False
    steps = before.get("step_idx"), after.get("step_idx")
    if type(steps[0]) is not int or type(steps[1]) is not int:
        return False
    return steps[0] < steps[1] and all(before.get(name) == after.get(name) for name in NAMES)


def _together(rows: list[Record]) -> Record:
    return Record(rows[0].place, [(row.place, row.value) for row in rows], len(rows))


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """The rows of a trajectory. One that is broken is reported, and what goes on from it is lost."""
    draft: Draft | None = None
    before: IDS | None = None
    only = len(value) == 1
    if only:
        losses.place, record = value[0][0], Fields(value[0][1], losses)
        if is_captured(record):
            yield from captured(record)
            return
    for place, row in value:
        losses.place = place
        try:
            call, named = _call(Fields(row, losses), before)
        except BrokenRecord as error:
            if only:
                raise
            losses.broke(Issue(place, str(error)))
            before = None
            continue
        draft = named if draft is None else draft
        draft.terminated = named.terminated or draft.terminated
        draft.extra |= named.extra
        before = None
        if call is not None and call.prompt_ids is not None and call.output_ids is not None:
            draft.calls.append(call)
            before = np.concatenate([call.prompt_ids, call.output_ids])
            check_size([sum(len(c.prompt_ids) for c in draft.calls if c.prompt_ids is not None)], losses)
    if draft is not None:
        _rewards(draft)
        yield draft
    elif not only:
        raise NotACall("nothing in it")


def _call(row: Fields, before: IDS | None) -> tuple[Call | None, Draft]:
    """(the call of a turn, the trajectory as the row has it); no call where the prompt cannot be known."""
    losses = row.losses
    draft, step = _named(row)
    delta, images = row.flag("ob_is_delta"), row.flag("has_images")
    prompt = row.ids("ob_tokens", empty=True)
    output = row.ids("ac_tokens", empty=True)
    if prompt is None or output is None or step is None:
        raise BrokenRecord("no row of a token database: it has no ob_tokens, ac_tokens and step_idx")
    if delta and before is not None:
        prompt = np.concatenate([before, prompt])
    elif delta or images:
        losses.lose("images stand in the prompt, and not in the log" if images else
                    "the prompt goes on from a turn that is not in the log")  # fmt: skip
        return None, draft
    call = Call(
        place=losses.place,
        key=step,
        parent=str(int(step) - 1) if delta else None,
        order=float(step),
        prompt_ids=prompt,
        output_ids=output,
        logprobs=row.logprobs("ac_logprobs"),
        finish_reason=finish_reason(row.name("stop_reason")),
        policy_version=row.version("sampling_client_step"),
        reward=row.number("reward"),
    )
    draft.extra = {n: v for n in ("total_reward", "final_reward") if (v := row.number(n)) is not None}
    for name in ("logs", "extra"):
        text = row.text(name)
        if text not in (None, "{}"):
            call.extra[name] = _json(text or "")
    call.extra |= {n: v for n, v in row.rest().items() if v not in ([], {}, False)}
    return call, draft


def _named(row: Fields) -> tuple[Draft, str | None]:
    """(the trajectory that a row is of, the number of its turn)."""
    names = {name: row.name(name) for name in NAMES}
    if names["source"] == "rollout":
        names["source"] = None
    attempt = names.pop("run_attempt")
    parts = [names["run_id"], attempt if attempt not in (None, "0") else None]
    parts += [names[n] for n in ("source", "split", "iteration", "group_idx")]
    group = "/".join(p for p in parts if p)
    step = row.whole("step_idx")
    if step is not None and step < 0:
        raise BrokenRecord(f"step_idx: {step}")
    draft = Draft(episode_id=f"{group}/{names['traj_idx'] or ''}", whole=False, group_id=group or None)
    draft.task_id = row.name("env_row_id")
    draft.terminated = row.flag("episode_done") or None
    return draft, None if step is None else str(step)


def _rewards(draft: Draft) -> None:
    """A turn's reward is its own, the group's final one goes to the last turn; together they are the total. Where no
    turn has one, the total is the trajectory's."""
    total, final = draft.extra.get("total_reward"), draft.extra.get("final_reward")
    if any(call.reward for call in draft.calls):
        if final:
            last = draft.calls[-1]
            last.extra["step_reward"] = last.reward
            last.reward = (last.reward or 0.0) + final
        return
    for call in draft.calls:
        call.reward = None
    draft.reward = total


def _json(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


FORMAT = Format(
    name="tinker",
    title="Tinker cookbook: its capture, and its former token database",
    exactness="ids",
    read=read,
    unsaid=("no_logprob_kind", "no_model", "no_sampling", "no_policy_version", "no_reward", "no_end", "no_parent",
            "no_rewrite_kind"),
    note="Give `capture/sample.jsonl`, or the rows that the capture's store answers with (`/runs/RUN/rows`): they know "
    "trajectories where the scope names `traj_idx`. The database left out images. Its other logs have no ids.",
    records=records,
    suffixes=(PARQUET, *SUFFIXES),
)  # fmt: skip
