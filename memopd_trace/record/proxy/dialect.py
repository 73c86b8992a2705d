"""How engines are asked for ids, and where they put them: vLLM's way, and SGLang's brought into its form.

vllm      `return_token_ids`: ids stand in the answer and in each event of a stream
sglang    `return_prompt_token_ids`, `return_meta_info` (0.5.13 and later): the prompt's ids stand in each choice,
          what was sampled in its `meta_info.output_token_logprobs`, as [log-probability, id, text]. A stream tells
          no ids, nor do plain completions
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Dialect = Literal["vllm", "sglang"]
DIALECTS: tuple[Dialect, ...] = ("vllm", "sglang")
MAX_ROUTES = 2**28  # bytes of one output's expert routes


def dialect_of(cards: Iterable[dict[str, Any]]) -> Dialect:
    """The dialect of a server, by the items of its `/v1/models`: SGLang says there that it owns its models."""
    return "sglang" if any(card.get("owned_by") == "sglang" for card in cards) else "vllm"


def asks_for(dialect: Dialect, routes: bool) -> dict[str, Any]:
    """The members that are added to a request (log-probabilities aside), with `routes` for expert routes too; vLLM
    gives those by itself, if its server is started so."""
    if dialect == "vllm":
        return {"return_token_ids": True}
    more = {"return_prompt_token_ids": True, "return_meta_info": True}
    return more | ({"return_routed_experts": True} if routes else {})


def cannot_tell(dialect: Dialect, kind: str, stream: bool) -> str | None:
    """Why an answer will hold no ids, whatever is asked."""
    if dialect == "sglang" and kind != "chat":
        return "SGLang gives no ids with plain completions"
    return "SGLang gives no ids with a stream" if dialect == "sglang" and stream else None


def in_vllms_form(document: dict[str, Any]) -> dict[str, Any]:
    """An answer of SGLang's to a chat, as vLLM would have put it.

    Raises:
        TypeError, ValueError, AttributeError, KeyError: it is none.
    """
    choices = [_choice(choice) for choice in document.get("choices") or ()]
    routes = (document.get("sglext") or {}).get("routed_experts")
    if len(choices) == 1 and routes is not None:  # with more it is told of the first only
        choices[0]["routed_experts"] = routes
    return document | {"choices": choices}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    meta = choice.get("meta_info") or {}
    triples, matched = meta.get("output_token_logprobs"), choice.get("matched_stop")
    made = choice | {"stop_reason": matched if isinstance(matched, str) else None}  # an id is the stop id itself
    if triples is not None:
        made["token_ids"] = [triple[1] for triple in triples]
        made["logprobs"] = {"content": [{"logprob": triple[0]} for triple in triples]}
    version = meta.get("weight_version")
    if isinstance(version, str) and version.isdecimal() and len(version) < 19:
        made["weight_version"] = int(version)
    return made


def decode_routes(text: Any) -> NDArray[np.int16]:
    """Expert routes, flat, out of base64: of an npy file (vLLM), or of bare int32 (SGLang).

    Raises:
        TypeError, ValueError: it is neither, or an id does not fit.
    """
    if not isinstance(text, str) or len(text) > MAX_ROUTES:
        raise TypeError("routed_experts")
    data = base64.b64decode(text, validate=True)
    npy = data.startswith(b"\x93NUMPY")
    ids: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False) if npy else np.frombuffer(data, "<i4")
    if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < 2**15):
        raise ValueError("routed_experts")
    return ids.reshape(-1).astype(np.int16)
