"""Running a pack on a device that turns out too small for it: in parts of half the tokens, with the same rows.

The plan stays as it is, and so do shards: a part is a run of a pack's states, and no row moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from memopd_scorer.plan import Pack, build_pack
from memopd_scorer.signals import Signals
from memopd_trace.errors import InputError, first_line

# What a plain RuntimeError says that means the same: a CPU allocator, a library's workspace.
_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was short, on whatever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


class Halving:
    """Runs packs by `run(pack)`; one that finds no memory is run again in parts of at most half its tokens, and later
    ones begin with that size. `on_notice(text)` is told."""

    def __init__(self, run: Callable[[Pack], Signals], on_notice: Callable[[str], None]) -> None:
        self._run, self._on_notice = run, on_notice
        self.budget: int | None = None  # packed tokens that are tried; None = never short of memory

    def run(self, pack: Pack) -> Iterator[tuple[Pack, Signals]]:
        """(part, its signals), in the order of the pack's states; mostly one: the pack itself.

        Raises:
            InputError: a single state does not fit.
        """
        waiting = [pack]
        while waiting:
            part = waiting.pop()
            if self.budget is not None and len(part) > self.budget and len(part.states) > 1:
                waiting.extend(reversed(split_pack(part, self.budget)))
                continue
            signals, fault = self._attempt(part)
            if signals is not None:
                yield part, signals
                continue
            self._halve(part, fault)
            waiting.append(part)

    def _attempt(self, part: Pack) -> tuple[Signals | None, str]:
        """(signals, "") or (None, what the device said). The error is let go of, and with it what its frames held."""
        try:
            return self._run(part), ""
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None, first_line(error)

    def _halve(self, part: Pack, fault: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(part.states) == 1:
            state = part.states[0]
            raise InputError(
                f"episode '{state.episode_id}', invocation {state.invocation_index}: no memory for its {len(part)} "
                f"tokens alone ({fault})",
                hint="another device, a smaller dtype or fewer signals; run again, finished shards are kept",
            )
        self.budget = len(part) // 2
        self._on_notice(f"out of memory with a pack of {len(part)} tokens: going on with at most {self.budget}")


def split_pack(pack: Pack, max_tokens: int) -> list[Pack]:
    """A pack's states in their order, in as few packs of at most `max_tokens` tokens as that order allows.

    A state that is longer alone has a pack of its own. Tokens that two parts share are run in both.
    """
    runs: list[list[int]] = []
    size = 0
    shared_S: list[int] = pack.shared_S.tolist()
    for number, state in enumerate(pack.states):
        own = len(state) - shared_S[number]
        if not runs or size + own > max_tokens:
            runs.append([])
            own, size = len(state), 0
        runs[-1].append(number)
        size += own
    return [build_pack([(pack.states[n], shared_S[n] if n != run[0] else 0) for n in run]) for run in runs]
