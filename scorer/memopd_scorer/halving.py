"""Running a pack on a device that turns out too small for it: half the tokens at a time, with the same rows.

The plan stays as it is, and so do shards: a pack is run in more passes (`memopd_scorer.passes`), and no row moves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memopd_scorer.passes import passes_of
from memopd_scorer.plan import Pack
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
    """Runs packs by `run(pack, tokens of a pass)`; one that finds no memory is run again in passes of half the tokens,
    and later ones begin with these. `on_notice(text)` is told. A model that is not `divisible` runs packs whole."""

    def __init__(
        self, run: Callable[[Pack, int | None], Signals], on_notice: Callable[[str], None], *, divisible: bool = True
    ) -> None:
        self._run, self._on_notice, self._divisible = run, on_notice, divisible
        self.budget: int | None = None  # tokens of a pass that are tried; None = never short of memory

    def run(self, pack: Pack) -> Signals:
        """A pack's signals.

        Raises:
            InputError: there is no memory for a single token of it, or for all of it where it is not divisible.
        """
        while True:
            limits = [tokens for tokens in (pack.pass_tokens, self.budget) if tokens is not None]
            tokens = min(limits) if limits else None
            signals, fault = self._attempt(pack, tokens)
            if signals is not None:
                return signals
            self._halve(pack, tokens, fault)

    def _attempt(self, pack: Pack, tokens: int | None) -> tuple[Signals | None, str]:
        """(signals, "") or (None, what the device said). The error is let go of, and with it what its frames held."""
        try:
            return self._run(pack, tokens), ""
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None, first_line(error)

    def _halve(self, pack: Pack, tokens: int | None, fault: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        longest = max(part.stop - part.start for part in passes_of(pack, tokens))
        tried = min(longest, tokens or longest)
        if tried == 1 or not self._divisible:
            state = max(pack.states, key=len)
            others = f" among the {len(pack)} of its pack" if len(pack.states) > 1 else ""
            raise InputError(
                f"episode '{state.episode_id}', invocation {state.invocation_index}: no memory for its {len(state)} "
                f"tokens{others}, {longest} at a time ({fault})",
                hint="another device, a smaller dtype or fewer signals; run again, finished shards are kept",
            )
        self.budget = tried // 2
        self._on_notice(f"out of memory with a forward of {longest} tokens: going on with at most {self.budget}")
