"""The scorer: plans packed trees over a trace and computes a teacher's signals at every sampled token.

`plan` needs numpy only; `score` and `audit` need the extra `[score]` and are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memopd_scorer.auditing import audit
    from memopd_scorer.scoring import score

__all__ = ["audit", "score"]


def __getattr__(name: str) -> Any:
    if name == "score":
        from memopd_scorer.scoring import score

        return score
    if name == "audit":
        from memopd_scorer.auditing import audit

        return audit
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
