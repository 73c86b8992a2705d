"""What Tinker cookbook's capture keeps of a request to sample: a line of its `capture/sample.jsonl`, with all samples
of the request, or a row of its store, with one.

Its scope says which trajectory a request was made for; without one, a request stands for itself, and its samples are
forks of one another.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopd_trace.convert.draft import Call, Draft, finish_reason
from memopd_trace.convert.exchange import sampling
from memopd_trace.convert.fields import Fields
from memopd_trace.convert.losses import NotACall

GROUP = ("run_id", "run_attempt", "split", "iteration", "group_idx")


def is_captured(record: Fields) -> bool:
    """Whether a record is of the capture: a line of its files, or a row of its store."""
    return all(n in record for n in ("scope", "kind")) or all(n in record for n in ("prompt_tokens", "sampled_tokens"))


def captured(record: Fields) -> Iterator[Draft]:
    """The calls of a request."""
    if "sampled_tokens" in record:
        told = record.fields("metadata") or Fields({}, record.losses, "metadata")
        yield _draft(record, record, told, [record], record.whole("sample_idx") or 0)
        return
    kind, status = record.text("kind"), record.text("status")
    if kind != "sample":
        raise NotACall(f"a record of kind '{kind}'")
    samples = record.each("samples")
    if status != "ok" or not samples:
        record.losses.lose("a call without an answer")
        raise NotACall(f"a request with the status '{status}'")
    scope = record.fields("scope") or Fields({}, record.losses, "scope")
    yield _draft(record, scope, record, samples, 0)


def _draft(record: Fields, scope: Fields, told: Fields, samples: list[Fields], first: int) -> Draft:
    """`record` has the prompt and the names, `scope` the trajectory, `told` how it was asked, `samples` the answers."""
    names = [scope.name(name) for name in GROUP]
    group = "/".join(name for name in names if name)
    request = "/".join(n for n in (record.name("sampling_session_id"), record.name("seq_id")) if n) or None
    trajectory = scope.name("traj_idx")
    own = trajectory if trajectory is not None else request
    draft = Draft(episode_id=f"{group}/{own}" if own else record.losses.place, whole=own is None)
    draft.group_id = group if names[-1] is not None else None
    settings, base, path = told.fields("sampling_params"), told.text("base_model"), told.text("model_path")
    prompt, at = record.ids("prompt_tokens"), record.time("created_at")
    for number, sample in enumerate(samples, first):
        call = Call(
            place=f"{record.losses.place} {sample.path}".rstrip(),
            key=f"{request}#{number}" if request else None,
            parent=f"{request}#0" if request and number and trajectory is None else None,
            relation="fork" if request and number and trajectory is None else None,
            model=base or path or (record.text("policy_version") if told is not record else None),
            prompt_ids=prompt,
            output_ids=sample.ids("sampled_tokens" if sample is record else "tokens"),
            logprobs=sample.logprobs("logprobs"),
            finish_reason=finish_reason((told if sample is record else sample).name("stop_reason")),
            sampling=sampling(settings) if settings else None,
            started_at=at,
        )
        draft.calls.append(call)
    draft.calls[0].extra = record.rest() | ({"model_path": path} if path and base else {})
    return draft
