"""Which policy sampled a token, and how much older it may be than the one that is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trainer.advantages import trained_mask


def versions_of(invocation: Invocation) -> NDArray[np.int64]:
    """int64[trained tokens]: the version that sampled each.

    Raises:
        InputError: `E-NEEDS-POLICY-VERSION`, the row does not say.
    """
    mask = trained_mask(invocation)
    if invocation.output_policy_versions is not None:
        return np.asarray(invocation.output_policy_versions[mask], np.int64)
    if invocation.policy_version is None:
        raise InputError(
            f"{invocation.name}: does not say which policy version sampled it",
            code="E-NEEDS-POLICY-VERSION",
            hint="record policy_version, or leave max_staleness and policy_version out",
        )
    return np.full(int(mask.sum()), invocation.policy_version, np.int64)


def check_versions(
    groups: Sequence[Sequence[Episode]], *, policy_version: int | None, max_staleness: int | None
) -> None:
    """Refuse tokens that were sampled by too old a policy, or by one newer than the student (version
    `policy_version`; `None` = the newest there is).

    Raises:
        InputError: such a token, naming the first row and how many tokens there are of each version; or as
            `versions_of`.
        UsageError: the student is said to be older than what sampled for it.
    """
    rows = list(_trained(groups))
    counts = Counter(int(v) for _, versions in rows for v in versions)
    student = max(counts, default=0) if policy_version is None else policy_version
    listed = ", ".join(f"{count} of version {version}" for version, count in sorted(counts.items()))
    if counts and max(counts) > student:
        raise UsageError(
            f"the student is said to be policy version {student}, the trained tokens are {listed}",
            hint="give the policy_version of the student that is trained",
        )
    if max_staleness is None:
        return
    for invocation, versions in rows:
        oldest = int(versions.min())
        if student - oldest > max_staleness:
            raise InputError(
                f"{invocation.name}: sampled by policy version {oldest}, the student is version {student} and "
                f"max_staleness is {max_staleness} (trained tokens: {listed})",
                hint="sample again, raise max_staleness, or weigh old tokens with divergence.importance_clip",
            )


def _trained(groups: Sequence[Sequence[Episode]]) -> Iterator[tuple[Invocation, NDArray[np.int64]]]:
    for invocation in (i for group in groups for episode in group for i in episode):
        if trained_mask(invocation).any():
            yield invocation, versions_of(invocation)
