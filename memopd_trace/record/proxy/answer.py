"""What an upstream's answer says was sampled, read from one JSON document or from the events of a stream.

The upstream is not trusted: nothing that it sends raises here. What does not fit makes the call unrecordable, with the
reason in words; the client gets its answer all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memopd_trace.errors import UsageError
from memopd_trace.invocation import IDS
from memopd_trace.record.call import Logprobs, Routes, Sampled
from memopd_trace.record.prompt import as_ids
from memopd_trace.record.proxy.dialect import decode_routes, in_vllms_form
from memopd_trace.record.proxy.jsonedit import without
from memopd_trace.record.proxy.request import Request

FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls",
          "abort": "abort", "content_filter": "content_filter"}  # fmt: skip
UPSTREAM_ERROR = "the upstream ended with an error"
NO_IDS = "the upstream gives no ids"
IN_FRONT = {"prompt_token_ids", "sglext"}  # members of the answer itself, not of its choices
LOWEST = -1000.0  # nats; at or below it stands a filler (vLLM's is -9999), not a log-probability
MAX_TOKENS = 2**22  # of one output


@dataclass(slots=True)
class _Output:
    """One choice as it grows; `logprobs` becomes `None` once some are missing."""

    prompt: IDS | None = None
    ids: list[IDS] = field(default_factory=list)
    logprobs: list[Any] | None = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | None = None
    routes: Routes | None = None


class Answer:
    """Collects the outputs of one call. `why_not` says why it cannot be recorded, as soon as that is known."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._outputs: dict[int, _Output] = {}
        self._prompt: IDS | None = None
        self._prompt_routes: Routes | None = None  # where they are not among each output's
        self._usage: dict[str, Any] = {}
        self._tokens = 0
        self.id: str | None = None
        self.model: str | None = None
        self.weight_version: int | None = None
        self.why_not: str | None = None

    def feed(self, document: Any) -> None:
        """Take in an answer, or one event's part of it."""
        if self.why_not:
            return
        try:
            self._feed(document)
        except (UsageError, TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError):
            self.why_not = "unreadable answer"

    @property
    def prompt_known(self) -> bool:
        """Whether the ids of a prompt have come."""
        return self._prompt is not None or any(o.prompt is not None for o in self._outputs.values())

    @property
    def finished(self) -> bool:
        """Whether every output that was asked for has ended."""
        ended = sum(o.finish is not None for o in self._outputs.values())
        return ended >= self._request.choices

    def sampled(self, *, broken_off: bool = False) -> tuple[Sampled, ...]:
        """The outputs in the order of their numbers; of an answer that was `broken_off`, those with an id. Empty where
        there is nothing to record: `why_not` says why."""
        if not self.why_not and not broken_off:
            self._check_usage()
        if self.why_not:
            return ()
        found = [self._sampled(n, o, broken_off) for n, o in sorted(self._outputs.items())]
        if not found or any(s is None for s in found if not broken_off):
            self.why_not = self.why_not or NO_IDS
            return ()
        kept = tuple(s for s in found if s is not None)
        if not kept:
            self.why_not = "broken off before the first id"
        return kept

    def _feed(self, document: dict[str, Any]) -> None:
        if document.get("error") is not None:
            self.why_not = UPSTREAM_ERROR
            return
        if self._request.dialect == "sglang":
            document = in_vllms_form(document)
        self.id = self.id or _text(document.get("id"))
        self.model = self.model or _text(document.get("model"))
        if document.get("usage") is not None:
            self._usage = dict(document["usage"])
        if document.get("prompt_routed_experts") is not None:
            self._prompt_routes = _routes(document["prompt_routed_experts"])
        if self._prompt is None and document.get("prompt_token_ids") is not None:
            self._prompt = self._ids(document["prompt_token_ids"])
        for place, choice in enumerate(document.get("choices") or ()):
            number = choice.get("index", place)
            if type(number) is not int or not 0 <= number < self._request.choices:
                raise ValueError("index")
            self._choice(self._outputs.setdefault(number, _Output()), choice)

    def _choice(self, output: _Output, choice: dict[str, Any]) -> None:
        if output.prompt is None and choice.get("prompt_token_ids") is not None:
            output.prompt = self._ids(choice["prompt_token_ids"])
        if choice.get("token_ids") is not None:
            new = self._ids(choice["token_ids"])
            output.ids.append(new)
            self._logprobs(output, choice.get("logprobs"), len(new))
        elif _has_content(choice):
            self.why_not = NO_IDS
        if choice.get("routed_experts") is not None:
            output.routes = _routes(choice["routed_experts"])
        self.weight_version = choice.get("weight_version", self.weight_version)
        output.finish = output.finish or _text(choice.get("finish_reason"))
        reason = choice.get("stop_reason")
        output.stop_reason = _text(str(reason) if type(reason) is int else reason) or output.stop_reason

    def _ids(self, value: Any) -> IDS:
        if not isinstance(value, list):
            raise TypeError("ids")
        self._tokens += len(value)
        if self._tokens > MAX_TOKENS:
            raise ValueError("too many ids")
        return as_ids(value, "ids") if value else np.zeros(0, np.int32)

    def _logprobs(self, output: _Output, found: Any, count: int) -> None:
        if output.logprobs is None or not count:
            return
        if self._request.kind == "chat":
            items = None if found is None else [item["logprob"] for item in found["content"] or ()]
        else:
            items = None if found is None else list(found["token_logprobs"] or ())
        if items is None or len(items) != count:
            output.logprobs = None
        else:
            output.logprobs += [as_logprob(item) for item in items]

    def _check_usage(self) -> None:
        """The upstream's own counts, where it gives them with the answer: an output of which ids are missing shows."""
        stated, got = self._usage.get("completion_tokens"), sum(len(i) for o in self._outputs.values() for i in o.ids)
        if not self._request.stream and type(stated) is int and stated != got:
            self.why_not = "ids that do not add up to the stated usage"

    def _sampled(self, number: int, output: _Output, broken_off: bool) -> Sampled | None:
        prompt = output.prompt if output.prompt is not None else self._prompt
        ids = np.concatenate(output.ids) if output.ids else np.zeros(0, np.int32)
        if prompt is None or not len(ids):
            return None
        logprobs: Logprobs | None = None
        if output.logprobs is not None and len(output.logprobs) == len(ids):
            logprobs = np.array(output.logprobs, np.float32)
        extra = {"choice": str(number)} if self._request.choices > 1 else {}
        if output.stop_reason is not None:
            extra["stop_reason"] = output.stop_reason
        finish = FINISH.get(output.finish or "")
        if finish is None and output.finish is not None:
            extra["finish_reason"] = output.finish
        if finish is None and broken_off:
            finish = "abort"
        routes = output.routes
        if routes is not None and self._prompt_routes is not None:
            routes = np.concatenate([self._prompt_routes, routes])
        return Sampled(number, prompt, ids, logprobs, finish, extra, routes)


def for_client(text: str, document: Any, request: Request) -> str | None:
    """An answer (or one event's part of it) as the client would have got it without the proxy: null where it did not
    ask for ids or log-probabilities; `None` for an event that it would not have got at all."""
    if {"token_ids", "logprobs"} <= request.hidden and _only_for_ids(document):
        return None
    return without(text, request.hidden & IN_FRONT, request.hidden)


def _only_for_ids(document: Any) -> bool:
    """Whether an event has nothing but ids: vLLM sends one where a parser holds the text back."""
    choices = document.get("choices") if isinstance(document, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        return False
    return choices[0].get("delta") == {} and choices[0].get("finish_reason") is None


def _has_content(choice: dict[str, Any]) -> bool:
    said = choice.get("delta") or choice.get("message") or choice
    return any(said.get(name) for name in ("content", "text", "tool_calls", "reasoning", "reasoning_content"))


def _routes(value: Any) -> Routes:
    """Expert routes; of what is none an empty array, which the rules find too short."""
    try:
        return decode_routes(value)
    except (TypeError, ValueError):
        return np.zeros(0, np.int16)


def _text(value: Any) -> str | None:
    """A text as a table can hold it."""
    if not isinstance(value, str) or not value:
        return None
    return value[:1024].encode("utf-8", "backslashreplace").decode()


def as_logprob(value: Any) -> float:
    """Nats; NaN where there is none. A number that is no log-probability is kept, for the rules to refuse."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value > LOWEST and not math.isinf(value):
        return float(value)
    return math.nan
