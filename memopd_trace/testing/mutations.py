"""Every mutation there is."""

from __future__ import annotations

from memopd_trace.testing import break_episodes, break_files, break_values
from memopd_trace.testing.mutation import Mutation

_MODULES = (break_files, break_values, break_episodes)

MUTATIONS: tuple[Mutation, ...] = tuple(
    value for module in _MODULES for value in vars(module).values() if isinstance(value, Mutation)
)
