"""Several processes that train one student: each holds all of it and runs a share of a step's packs.

A step's loss is a sum over its packs, so the gradients of all ranks add up to the step's, and every rank makes the
same update. Rank 0 leads: it alone writes. `torchrun --nproc-per-node N -m memopd_trainer -- CONFIG` starts them; they
are of one team (`memopd_scorer.engines.team`), so that an error of one ends all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memopd_scorer.engines.team import Team
from memopd_scorer.engines.torchrun import deal, local_device
from memopd_scorer.plan import Pack
from memopd_trainer.packs import Key


class Ranks:
    """This process among its fellows; alone, it does everything. Made by `join`.

    All ranks call `gather`, `meet` and `add_gradients` in the same order.
    """

    def __init__(self, team: Team | None = None) -> None:
        self._team = team

    @classmethod
    @contextmanager
    def join(cls, device: str) -> Iterator[Ranks]:
        """The processes that torchrun started, or this one alone where none did. While it is open, an error ends all.

        Raises:
            SystemExit: another rank has failed, and says why.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            yield cls()
            return
        team = Team.join()
        backend = "nccl" if device.startswith("cuda") else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(local_device("cuda"))
        torch.distributed.init_process_group(backend)
        try:
            with team.together():
                yield cls(team)
        finally:
            torch.distributed.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes."""
        return self._team is None or self._team.leads

    def device(self, wanted: str) -> str:
        """The device of this rank: each has a GPU of its own."""
        return wanted if self._team is None else local_device(wanted)

    def mine(self, packs: Iterable[Pack]) -> Iterator[Pack]:
        """This rank's packs of a step, dealt by their tokens; every rank deals for itself."""
        if self._team is None:
            yield from packs
            return
        packs, costs = itertools.tee(packs)
        for pack, owner in zip(packs, deal((len(p) for p in costs), self._team.size), strict=True):
            if owner == self._team.rank:
                yield pack

    def gather(self, value: Any) -> list[Any]:
        """What each rank has to say (plain values), by rank."""
        return [value] if self._team is None else self._team.gather(value)

    def gather_values(self, values: Mapping[Key, NDArray[np.float64]]) -> dict[Key, NDArray[np.float64]]:
        """Arrays by key, those of all ranks."""
        if self._team is None:
            return dict(values)
        told = self.gather([[*key, array.tolist()] for key, array in values.items()])
        return {(name, index): np.array(array) for rank in told for name, index, array in rank}

    def meet(self) -> None:
        """Go on when all are here."""
        self.gather(None)

    def add_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Let every parameter's gradient be the sum over all ranks. One that no rank has a gradient of keeps none."""
        if self._team is None:
            return
        parameters = [p for module in modules for p in module.parameters()]
        has = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
        torch.distributed.all_reduce(has)
        for parameter, ranks in zip(parameters, has.tolist(), strict=True):
            if ranks:
                gradient: Tensor = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(gradient)
                parameter.grad = gradient
