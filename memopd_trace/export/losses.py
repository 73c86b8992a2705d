"""What an export could not carry: which columns and features, in how many rows, and why. Nothing vanishes uncounted:

rows in == rows out + rows left out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memopd_trace.errors import printable
from memopd_trace.invocation import Invocation, Sampling

# Why a target has no place for a column of the trace. What a format does carry, it says itself (`Field.of`).
WHY: Mapping[str, str] = {
    "parent_index": "which call a row follows is not told: each row stands alone",
    "relation": "how a row's context came from an earlier one is not told",
    "rewrite_kind": "that a context was rewritten, and how, is not told",
    "rewrite_evidence": "who says that a context was rewritten is not told",
    "segments": "which part of a prompt is what, and copied from where, is not told",
    "group_id": "which rollouts are compared with each other is not told",
    "task_id": "the task's name is not told",
    "agent_id": "which agent or role called is not told",
    "attempt": "that a call was tried again is not told",
    "position_ids": "positions are taken for 0…n-1",
    "visible_from": "attention is taken for plain causal",
    "visible_until": "attention is taken for plain causal",
    "output_slots": "outputs are taken for appended",
    "media": "placeholder ids stand without their media",
    "output_sampled": "one mask tells what is trained; what was sampled and is not trained looks like a prompt",
    "sampling": "settings other than the temperature are not told",
    "policy_version": "which weights sampled is not told",
    "output_policy_versions": "which weights sampled each token is not told",
    "kv_policy_version": "that reused keys and values are of older weights is not told",
    "routed_experts": "the experts that were taken are not told",
    "finish_reason": "why an output ended is not told",
    "token_source": "that ids were made from text is not told",
    "reward": "the reward is not told",
    "rewards": "named parts of the reward are not told",
    "terminated": "that the episode ended by itself is not told",
    "truncated": "that the episode was cut is not told",
    "prompt_text": "text mirrors are not carried",
    "output_text": "text mirrors are not carried",
    "messages": "text mirrors are not carried",
    "started_at": "times are not carried",
    "ended_at": "times are not carried",
    "extra": "the producer's own values are not carried",
    "output_logprobs": "log-probabilities are not told",
    "logprob_kind": "under which distribution log-probabilities were taken is not told",
    "output_kept_logmass": "the kept log-mass is not told",
}
# The same for what scores hold.
WHY_SCORES: Mapping[str, str] = {
    "logprob": "the teacher's log-probability of the sampled id is not told",
    "logsumexp": "it only serves to check states and logits",
    "entropy": "the teacher's entropy is not told",
    "topk_ids": "the teacher's best ids are not told",
    "topk_logprobs": "the teacher's best ids are not told",
    "tail_logprob": "the mass outside the k ids is not told: a reader takes 1 minus theirs, or none",
    "hidden": "states need the teacher's head",
    "hidden_scale": "states need the teacher's head",
    "hidden_logsumexp": "states need the teacher's head",
    "hidden_kl": "states need the teacher's head",
    "logits": "only k ids have a place",
}
# What needs no place of its own: rows of rejected attempts are left out, the others' masks say what is trained, and
# the digest follows from the rest.
IMPLIED = ("episode_id", "invocation_index", "model_id", "prompt_ids", "output_ids", "accepted", "output_loss_mask")
IMPLIED_SCORES = ("output_index",)


_TRIVIAL: Mapping[str, Callable[[Invocation], bool]] = {
    "relation": lambda i: i.relation == "root",
    "attempt": lambda i: i.attempt == 0,
    "output_sampled": lambda i: np.array_equal(i.sampled(), i.loss_mask()),
    "sampling": lambda i: i.sampling == Sampling(temperature=None if i.sampling is None else i.sampling.temperature),
    "token_source": lambda i: i.token_source == "engine",
    "media": lambda i: not i.media,
    "segments": lambda i: not i.segments,
    "position_ids": lambda i: np.array_equal(i.positions(), np.arange(len(i))),
    "visible_from": lambda i: np.array_equal(i.visibility()[0], np.arange(len(i))),
    "visible_until": lambda i: bool((i.visibility()[1] == len(i)).all()),
}


def says(invocation: Invocation, name: str) -> bool:
    """Whether a column says more in this row than its default does."""
    if getattr(invocation, name) is None:
        return False
    trivial = _TRIVIAL.get(name)
    return trivial is None or not trivial(invocation)


@dataclass(slots=True)
class Lost:
    """In how many rows something was lost, why, and one of them."""

    why: str
    rows: int = 0
    example: str = ""


@dataclass(slots=True)
class Losses:
    """Everything that an export counts. `lost` is by column or feature, `left_out` by reason."""

    rows: int = 0
    written: int = 0
    lost: dict[str, Lost] = field(default_factory=dict)
    left_out: dict[str, Lost] = field(default_factory=dict)

    def lose(self, name: str, why: str, invocation: Invocation) -> None:
        """A row of which a column or feature is not carried."""
        _count(self.lost, name, why, invocation)

    def leave_out(self, reason: str, invocation: Invocation) -> None:
        """A row that the target could only judge wrongly, or not at all."""
        _count(self.left_out, reason, reason, invocation)

    @property
    def any(self) -> bool:
        """Whether the target has less than the trace."""
        return bool(self.lost or self.left_out)

    def to_json(self) -> dict[str, Any]:
        """The table as plain values."""
        return {
            "rows": {"in": self.rows, "out": self.written},
            "left_out": {n: {"rows": c.rows, "example": c.example} for n, c in self.left_out.items()},
            "lost": {n: {"rows": c.rows, "why": c.why, "example": c.example} for n, c in self.lost.items()},
        }

    def to_text(self) -> str:
        """The table for a person."""
        lines = [f"rows      {self.rows} in, {self.written} out, {self.rows - self.written} left out"]
        lines += [f"  {c.rows:>8}  {reason} ({printable(c.example)})" for reason, c in self.left_out.items()]
        if self.lost:
            width = max(map(len, self.lost))
            lines.append("not carried")
            lines += [f"  {c.rows:>8}  {name:<{width}}  {c.why}" for name, c in sorted(self.lost.items())]
        return "\n".join(lines) + "\n"


def _count(table: dict[str, Lost], name: str, why: str, invocation: Invocation) -> None:
    found = table.setdefault(name, Lost(why, example=invocation.name))
    found.rows += 1
