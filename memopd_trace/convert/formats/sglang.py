"""SGLang: requests and answers of `/generate`, and of its OpenAI-compatible server with `return_meta_info`.

Ids and log-probabilities are triples `[log-probability, id, text]` in `meta_info.output_token_logprobs`. The ids of a
chat's prompt stand beside the choice, those of a request to `/generate` in `input_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memopd_trace.convert.draft import Call, Draft, finish_reason
from memopd_trace.convert.exchange import calls, part, sampling
from memopd_trace.convert.fields import Fields, as_ids, as_logprobs
from memopd_trace.convert.format import Format
from memopd_trace.convert.losses import BrokenRecord, Losses, NotACall
from memopd_trace.convert.sessions import describe, draft_of


def read(value: Any, losses: Losses) -> Iterator[Draft]:
    """A record of requests and answers."""
    record = Fields(value, losses)
    response = part(record, "response") or record
    request = part(record, "request")
    if "choices" in response:
        found = calls(request, response, losses)
        for call, choice in zip(found, response.each("choices"), strict=True):
            _add_meta(call, choice)
    elif "meta_info" in response or "output_ids" in response:
        found = [_generated(request, response, losses)]
    elif "error" in response:
        raise NotACall("an error instead of an answer")
    else:
        raise BrokenRecord("no answer: neither 'choices' nor 'meta_info'")
    for call in found:
        version = call.policy_version
        describe(call, record)
        call.policy_version = version if call.policy_version is None else call.policy_version
    draft = draft_of(record, request, found)
    found[0].extra |= record.rest()
    yield draft


def _generated(request: Fields | None, response: Fields, losses: Losses) -> Call:
    """The call of a request to `/generate`."""
    call = Call(place=losses.place, output_ids=response.ids("output_ids"), answer=response.text("text"))
    if request is not None:
        call.prompt_ids = request.ids("input_ids")
        call.prompt = request.text("text")
        settings = request.fields("sampling_params")
        call.sampling = None if settings is None else sampling(settings)
    _add_meta(call, response)
    return call


def _add_meta(call: Call, answer: Fields) -> None:
    meta = answer.fields("meta_info")
    if meta is None:
        return
    call.key = meta.name("id") or call.key
    call.counts = meta.whole("prompt_tokens"), meta.whole("completion_tokens")
    call.policy_version = meta.version("weight_version")
    why = meta.fields("finish_reason")
    call.finish_reason = call.finish_reason or finish_reason(None if why is None else why.text("type"))
    triples = meta.items("output_token_logprobs")
    if triples:
        path = f"{meta.path}.output_token_logprobs"
        if not all(isinstance(t, list) and len(t) >= 2 for t in triples):
            raise BrokenRecord(f"{path}: expected lists of a log-probability and an id")
        call.logprobs = as_logprobs([t[0] for t in triples], answer.losses, path)
        if call.output_ids is None:
            call.output_ids = as_ids([t[1] for t in triples], path)


FORMAT = Format(
    name="sglang",
    title="SGLang: requests and answers with meta_info",
    exactness="some ids",
    read=read,
    unsaid=("no_logprob_kind", "no_reward", "no_end", "no_parent", "no_rewrite_kind"),
    note="Calls belong together by `session_id`, `episode_id` or the like.",
)
