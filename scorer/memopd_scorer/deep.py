"""Whether a group that no pack holds is run as a deep pack: in several passes that keep keys and values.

A torn group runs a shared prefix once a pack, and a state beyond the budget in one forward of its own length. A deep
pack runs every token once and never more than the budget at a time; what it costs are the keys and values of one path:
bytes that are held, and copied from pass to pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memopd_scorer.cost import ModelCost
from memopd_scorer.fit import PACK_TOKENS
from memopd_scorer.prefixes import Branch
from memopd_scorer.states import pairs_of_prefix

DEEP_TOKENS = 2**18  # of a deep pack, where no state is longer: a shard's worth
KEPT_BYTES = 4 * 2**30
FLOPS_PER_BYTE = 50  # of a forward, in the time that it takes to move one byte of keys and values to the next pass
_UNKNOWN = ModelCost(per_token=1, per_pair=0, per_row=0, width=0)


@dataclass(frozen=True, slots=True)
class Deep:
    """What deep packs may take: `max_bytes` of kept keys and values, of `value_bytes` each; and what is spared, by the
    model's `cost`. Without it, tokens alone are compared and no bytes are counted."""

    cost: ModelCost | None = None
    value_bytes: int = 4
    max_bytes: int = KEPT_BYTES

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in all layers."""
        return 0 if self.cost is None else self.cost.kept * self.value_bytes

    def pays(self, branches: Sequence[Branch], begins: Sequence[int], max_tokens: int) -> bool:
        """Whether a group is run deep instead of in packs that begin before the branches `begins`.

        Always, within `max_bytes`, where a state of it is longer than a forward may be.
        """
        total = sum(len(state) - shared for state, shared in branches)
        longest = max(len(state) for state, _ in branches)  # no path is longer, nor what is kept
        if total <= max_tokens or longest * self.token_bytes > self.max_bytes:
            return False
        if longest > max_tokens:
            return True
        cost, again = self.cost or _UNKNOWN, [branches[n][1] for n in begins]
        spared = cost.flops(sum(again), sum(map(pairs_of_prefix, again)), 0)
        passes = -(-total // max_tokens)
        return spared > cost.per_token * PACK_TOKENS + passes * longest * self.token_bytes * FLOPS_PER_BYTE
