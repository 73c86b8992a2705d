"""A client's request: what it asks for, whether its answer can be recorded, and the same request with ids asked for.

What is added: what makes the engine tell ids (see `dialect`), and log-probabilities of the sampled tokens. Neither
changes what is sampled.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

from memopd_trace.invocation import Sampling
from memopd_trace.record.modelfolder import SETTINGS, sampling_of
from memopd_trace.record.proxy.dialect import Dialect, asks_for, cannot_tell

Kind = Literal["chat", "completions"]

MEDIA = ("image", "audio", "video", "file")  # in the type of a content part
CONSTRAINTS = (
    "logit_bias", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "bad_words", "allowed_token_ids", "min_tokens", "logits_processors",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """One request for a model call.

    `body` is what the client sent, decoded; `amended` the same with ids asked for, `None` where the answer is not to
    be recorded: `why_not` then says why. `hidden` are the members of an answer that the client did not ask for.
    `choices` is how many outputs the answer will have. `sampling` is `None` where not every setting is known.
    """

    kind: Kind
    body: bytes
    amended: bytes | None = None
    why_not: str | None = None
    stream: bool = False
    dialect: Dialect = "vllm"
    hidden: frozenset[str] = frozenset()
    choices: int = 1
    model: str | None = None
    sampling: Sampling | None = None
    extra: dict[str, str] = field(default_factory=dict)


def read_request(
    kind: Kind, body: bytes, defaults: Sampling | None, dialect: Dialect = "vllm", routes: bool = False
) -> Request:
    """Read a request's body (JSON); one that cannot be read goes on as it is, for the upstream to refuse."""
    try:
        asked = json.loads(body.decode())
    except (ValueError, RecursionError):
        return Request(kind, body, why_not="malformed request")
    if not isinstance(asked, dict):
        return Request(kind, body, why_not="malformed request")
    stream = asked.get("stream") is True
    why_not = _why_not(kind, asked) or cannot_tell(dialect, kind, stream)
    outputs = _outputs(kind, asked)
    if why_not or outputs is None:
        return Request(kind, body, why_not=why_not or "malformed request", stream=stream)
    logprobs = asked.get("logprobs")
    asked_logprobs = bool(logprobs) if kind == "chat" else logprobs is not None
    more = asks_for(dialect, routes)
    if kind == "completions" and not asked_logprobs:
        more["logprobs"] = 0
    elif not asked_logprobs and not asked.get("top_logprobs"):  # alone it is refused, and is to be
        more["logprobs"] = True
    return Request(
        kind,
        body,
        amended=json.dumps(asked | more, separators=(",", ":")).encode(),
        stream=stream,
        dialect=dialect,
        hidden=_hidden(dialect, asked, asked_logprobs),
        choices=outputs,
        model=asked["model"] if isinstance(asked.get("model"), str) else None,
        sampling=_sampling(asked, defaults),
        extra=shaped_by(asked),
    )


def _hidden(dialect: Dialect, asked: dict[str, Any], asked_logprobs: bool) -> frozenset[str]:
    """The members of an answer that the client would not have got."""
    if dialect == "vllm":
        members = {"token_ids": "return_token_ids", "prompt_token_ids": "return_token_ids"}
    else:
        members = {"prompt_token_ids": "return_prompt_token_ids", "meta_info": "return_meta_info"}
        members["sglext"] = "return_routed_experts"
    hidden = {member for member, flag in members.items() if not asked.get(flag)}
    return frozenset(hidden if asked_logprobs else hidden | {"logprobs"})


def inflate(data: bytes, encoding: str, limit: int) -> bytes | None:
    """`data` without its content encoding (gzip or deflate); `None` where it would exceed `limit` bytes.

    Raises:
        ValueError: another encoding, or no such data.
    """
    if encoding in ("", "identity"):
        return data
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"content encoding '{encoding}'")
    machine = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        plain = machine.decompress(data, limit + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(plain) > limit:
        return None
    if not machine.eof or machine.unused_data:
        raise ValueError("cut short, or followed by something else")
    return plain


def _why_not(kind: Kind, asked: dict[str, Any]) -> str | None:
    """Why the answer cannot be recorded as the policy's own samples."""
    if asked.get("echo"):
        return "echo"  # with ids asked for, vLLM leaves the echoed text out
    if asked.get("use_beam_search"):
        return "beam search"
    best_of, n = asked.get("best_of"), asked.get("n")
    if best_of is not None and best_of != (1 if n is None else n):
        return "best_of"  # chosen among samples that are not shown
    if asked.get("prompt_embeds"):
        return "prompt embeddings"
    if kind == "chat" and has_media(asked.get("messages")):
        return "media"
    return None


def has_media(messages: Any) -> bool:
    """Whether a chat holds what is no text: what placeholders stand for cannot be told from ids."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and any(word in kind for word in MEDIA):
                return True
            if isinstance(part, dict) and any(any(word in key for word in MEDIA) for key in part if key != "type"):
                return True
    return False


def _outputs(kind: Kind, asked: dict[str, Any]) -> int | None:
    """How many outputs are asked for; `None` where the request makes no sense."""
    n = asked.get("n")
    n = 1 if n is None else n
    if type(n) is not int or not 0 < n <= 2**16:
        return None
    prompt = asked.get("prompt")
    if kind == "chat":
        return n if isinstance(asked.get("messages"), list) else None
    if isinstance(prompt, str):
        return n
    if not isinstance(prompt, list) or not prompt:
        return None
    return n if type(prompt[0]) is int else n * len(prompt)


def _sampling(asked: dict[str, Any], defaults: Sampling | None) -> Sampling | None:
    """The settings of the call. Null in `sampling` means that nothing was changed, so where the request is silent and
    nobody says what the upstream then does, the whole is not known."""
    if defaults is None and any(asked.get(name) is None for name in SETTINGS):
        return None
    return sampling_of(asked, defaults)


def shaped_by(asked: dict[str, Any]) -> dict[str, str]:
    """What else of the settings shaped the distribution and has no column."""
    found = {}
    for name in ("presence_penalty", "frequency_penalty"):
        value = asked.get(name)
        if isinstance(value, int | float) and value:
            found[name] = str(value)
    constraints = [name for name in CONSTRAINTS if asked.get(name)]
    if constraints:
        found["constraints"] = ",".join(constraints)
    return found
