"""Keys and values that the passes over a pack hand on, layer by layer.

They are told apart by the order of the attention calls in a forward, which is the same in every pass, so that a model
whose layers share a module is no special case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memopd_scorer.passes import Range


class Past:
    """The keys and values of earlier passes: one pair for each attention call of a forward, [1, G, tokens, E] each."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._keep: Sequence[Range] = ()
        self._calls, self._is_first = 0, True

    def begin(self, keep: Sequence[Range]) -> None:
        """Another pass begins, of whose keys the ranges `keep` are handed on."""
        self._is_first = not self._calls
        self._keep, self._calls = keep, 0

    def join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A call's keys and values with those kept in front of them: [1, G, K, E] each."""
        number, self._calls = self._calls, self._calls + 1
        if self._is_first:
            self.pairs.append((key[:, :, :0], value[:, :, :0]))
        else:
            earlier = self.pairs[number]
            key, value = torch.cat([earlier[0], key], dim=2), torch.cat([earlier[1], value], dim=2)
        self.pairs[number] = self._kept(key), self._kept(value)
        return key, value

    def _kept(self, states: Tensor) -> Tensor:
        """What is handed on, in memory of its own, so that the rest is freed."""
        if len(self._keep) == 1 and self._keep[0] == (0, states.shape[2]):
            owns = states.untyped_storage().nbytes() == states.nbytes
            return states if owns else states.clone()
        if not self._keep:
            return states[:, :, :0].clone()
        return torch.cat([states[:, :, a:b] for a, b in self._keep], dim=2)
