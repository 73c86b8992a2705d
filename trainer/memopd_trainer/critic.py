"""Credit with a critic: a value head on the states that predict the tokens, and generalised advantages.

The tokens that are trained, in the order they were sampled, are an episode's chain x_0 .. x_N-1, over all its
invocations. V_n is the value of the state that predicts x_n: the row that its logits come from, so values cost one
product with a vector. With r_n the reward given at x_n:

    delta_n = r_n + gamma V_n+1 - V_n          (V_N = 0: what comes after the last token is not recorded)
    A_n     = delta_n + gamma lambda A_n+1
    return  = A_n + V_n                         what the value is trained towards

as in Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv
1506.02438), equations 11 to 16. An invocation's reward sits on its last trained token; one without any gives it to the
trained token before, or where there is none to the first after.

Shape legend: N tokens of a chain, M trained targets of a pack, D student width.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memopd_scorer.teacher import LoadedModel
from memopd_trace.invocation import Episode
from memopd_trainer.advantages import STD_FLOOR, token_weights, trained_mask
from memopd_trainer.packs import Credit, Key, TrainPack


class ValueHead(nn.Module):
    """One linear unit on the student's states, in float32 (float64 stays), that says 0 until it is trained."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.unit = nn.Linear(width, 1, dtype=wide, device=device)
        nn.init.zeros_(self.unit.weight)
        nn.init.zeros_(self.unit.bias)

    def forward(self, hidden_MD: Tensor) -> Tensor:
        """[M, D] -> [M]."""
        value_M: Tensor = self.unit(hidden_MD.to(self.unit.weight.dtype))[:, 0]
        return value_M


def value_loss(value_M: Tensor, return_M: Tensor) -> Tensor:
    """(V - return)^2 / 2 per token."""
    return (value_M - return_M).square() / 2


@torch.no_grad()
def estimate_values(
    student: LoadedModel, critic: ValueHead, packs: Iterable[TrainPack]
) -> dict[Key, NDArray[np.float64]]:
    """The value of each trained token, in the order of its invocation's outputs, by (episode_id, invocation_index)."""
    values: dict[Key, NDArray[np.float64]] = {}
    for pack in packs:
        hidden_RD = student.states(pack.pack)
        value_M = critic(hidden_RD.index_select(0, pack.row_M.to(hidden_RD.device))).double().cpu().numpy()
        for number, state in enumerate(pack.pack.states):
            own = np.flatnonzero(pack.state_M == number)
            values[state.episode_id, state.invocation_index] = value_M[own[np.argsort(pack.output_M[own])]]
    return values


def token_credit(
    groups: Sequence[Sequence[Episode]],
    values: Mapping[Key, NDArray[np.float64]],
    *,
    gamma: float,
    lam: float,
    normalise_std: bool = False,
) -> dict[Key, Credit]:
    """Advantage and return of every trained token of a step.

    With `normalise_std` the advantages are brought to mean 0 and standard deviation 1 over the step, each token
    counting with its weight in the loss.
    """
    credit: dict[Key, Credit] = {}
    for episode in (e for group in groups for e in group):
        credit.update(_episode_credit(episode, values, gamma, lam))
    return _whitened(groups, credit) if normalise_std else credit


def gae(reward_N: NDArray[np.float64], value_N: NDArray[np.float64], gamma: float, lam: float) -> NDArray[np.float64]:
    """Advantages of one chain; see the module's docstring."""
    advantage_N = np.zeros(len(reward_N))
    following = next_value = 0.0
    for n in reversed(range(len(reward_N))):
        delta = reward_N[n] + gamma * next_value - value_N[n]
        following = advantage_N[n] = delta + gamma * lam * following
        next_value = value_N[n]
    return advantage_N


def _episode_credit(
    episode: Episode, values: Mapping[Key, NDArray[np.float64]], gamma: float, lam: float
) -> dict[Key, Credit]:
    masks = {i.key: trained_mask(i) for i in episode}
    counts = [int(masks[i.key].sum()) for i in episode]
    ends = np.cumsum(counts)
    if not sum(counts):
        return {}
    reward_N = np.zeros(ends[-1])
    for invocation, end in zip(episode, ends, strict=True):
        if invocation.reward is not None:
            reward_N[max(0, end - 1)] += invocation.reward
    value_N = np.concatenate([values[i.key] for i, count in zip(episode, counts, strict=True) if count])
    advantage_N = gae(reward_N, value_N, gamma, lam)
    found: dict[Key, Credit] = {}
    for invocation, count, end in zip(episode, counts, ends, strict=True):
        if count:
            own, mask = slice(end - count, end), masks[invocation.key]
            found[invocation.key] = Credit(_spread(mask, advantage_N[own]), _spread(mask, (advantage_N + value_N)[own]))
    return found


def _spread(mask: NDArray[np.bool_], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values of the tokens in the mask, over all outputs."""
    spread = np.zeros(len(mask))
    spread[mask] = values
    return spread


def _whitened(groups: Sequence[Sequence[Episode]], credit: Mapping[Key, Credit]) -> dict[Key, Credit]:
    weights = token_weights(groups)
    masks = {i.key: trained_mask(i) for group in groups for e in group for i in e if i.key in credit}
    weight = np.concatenate([np.full(mask.sum(), weights[key[0]]) for key, mask in masks.items()])
    advantage = np.concatenate([credit[key].advantage_N[mask] for key, mask in masks.items()])
    mean = float((weight * advantage).sum())
    deviation = float(np.sqrt((weight * (advantage - mean) ** 2).sum()))
    return {
        key: Credit(np.where(masks[key], (c.advantage_N - mean) / (deviation + STD_FLOOR), 0.0), c.return_N)
        for key, c in credit.items()
    }
