"""What a plan comes to: counted while its packs pass by, and printed by `memopd-trace plan`. numpy only, no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from memopd_scorer.cost import SAMPLED_BYTES, ModelCost, full_bytes, topk_bytes
from memopd_scorer.passes import passes_of
from memopd_scorer.plan import Layout, Pack
from memopd_trace.tiers import state_bytes


@dataclass(slots=True)
class PlanSummary:
    """What a plan costs, counted while its packs pass by; FLOPs, and bytes of kept keys and values and of the head
    (`value_bytes` a number), with a model's `cost`; bytes of `topk` ids and of all logits with a vocabulary's `size`.

    `repeated_tokens` of the executed ones are run by an earlier pack as well; `spared_tokens` would have been, were
    there no `deep_packs`. `kept_tokens` is the most tokens whose keys and values are kept at a time. `pairs` counts
    visible (query, key) pairs, `visibility_packs` those that are not plainly causal, `left_out` the sampled tokens that
    are no target; `most_…` is of one pack.
    """

    layout: Layout
    max_tokens: int
    cost: ModelCost | None = None
    value_bytes: int = 4
    packs: int = 0
    invocations: int = 0
    logical_tokens: int = 0
    executed_tokens: int = 0
    repeated_tokens: int = 0
    spared_tokens: int = 0
    deep_packs: int = 0
    kept_tokens: int = 0
    visibility_packs: int = 0
    targets: int = 0
    left_out: int = 0
    prediction_rows: int = 0
    pairs: int = 0
    flops: int = 0
    longest_pack: int = 0
    most_pairs: int = 0
    most_flops: int = 0
    topk: int = 64
    size: int | None = None
    _hash: hashlib._Hash = field(default_factory=lambda: hashlib.sha256(b"memopd-trace/plan/3"), repr=False)

    def add(self, pack: Pack) -> None:
        """Count one pack."""
        self.packs += 1
        self.invocations += len(pack.states)
        self.logical_tokens += pack.logical_tokens
        self.executed_tokens += len(pack)
        self.repeated_tokens += pack.repeated
        self.spared_tokens += pack.spared
        if pack.pass_tokens is not None:
            self.deep_packs += 1
            self.kept_tokens = max(self.kept_tokens, *(p.tokens_kept for p in passes_of(pack, pack.pass_tokens)))
        self.visibility_packs += not pack.is_causal
        self.targets += len(pack.target_ids_M)
        self.left_out += sum(s.left_out for s in pack.states)
        self.prediction_rows += len(pack.rows_R)
        pairs = pack.pairs
        self.pairs += pairs
        self.longest_pack = max(self.longest_pack, len(pack))
        self.most_pairs = max(self.most_pairs, pairs)
        if self.cost is not None:
            flops = self.cost.flops(len(pack), pairs, len(pack.rows_R))
            self.flops += flops
            self.most_flops = max(self.most_flops, flops)
        pack.update_digest(self._hash)

    @property
    def balance(self) -> dict[str, float]:
        """The largest pack over the mean one, by `tokens`, `pairs` and, with a cost, `flops`; 1 = all are alike."""
        largest = {
            "tokens": (self.longest_pack, self.executed_tokens),
            "pairs": (self.most_pairs, self.pairs),
        }
        if self.cost is not None:
            largest["flops"] = self.most_flops, self.flops
        return {name: most * self.packs / max(1, total) for name, (most, total) in largest.items()}

    @property
    def sharing(self) -> float:
        """Logical over executed tokens; 1 = nothing was shared."""
        return self.logical_tokens / max(1, self.executed_tokens)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of layout, budget and all packs."""
        h = self._hash.copy()
        h.update(f"{self.layout}\0{self.max_tokens}".encode())
        return h.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Plain data, `report_version` "1"; the last entries only with a size, or a cost."""
        rows: dict[str, Any] = {
            "report_version": "1",
            "layout": self.layout,
            "max_tokens": self.max_tokens,
            "packs": self.packs,
            "invocations": self.invocations,
            "logical_tokens": self.logical_tokens,
            "executed_tokens": self.executed_tokens,
            "repeated_tokens": self.repeated_tokens,
            "deep_packs": self.deep_packs,
            "spared_tokens": self.spared_tokens,
            "kept_tokens": self.kept_tokens,
            "sharing": round(self.sharing, 4),
            "targets": self.targets,
            "left_out": self.left_out,
            "prediction_rows": self.prediction_rows,
            "visible_pairs": self.pairs,
            "longest_pack": self.longest_pack,
            **{f"balance_{name}": round(value, 4) for name, value in self.balance.items()},
            "plan_digest": self.digest,
            "sampled_bytes": SAMPLED_BYTES * self.targets,
        }
        if self.size is not None:
            rows["topk_bytes"] = topk_bytes(self.topk, self.size) * self.targets
            rows["full_bytes"] = full_bytes(self.size) * self.targets
        if self.cost is not None:
            rows["estimated_flops"] = float(self.flops)
            rows["kept_bytes"] = self.cost.kept * self.value_bytes * self.kept_tokens
            rows["head_bytes"] = self.cost.head * self.value_bytes
            rows["hidden_bytes_bfloat16"] = 2 * self.cost.width * self.targets
            rows["hidden_bytes_float32"] = 4 * self.cost.width * self.targets
            for tier in ("float16", "int8"):
                rows[f"hidden_bytes_states_{tier}"] = state_bytes(tier, self.cost.width, 0) * self.targets
        return rows
