"""`torchrun --nproc-per-node N -m memopd_trainer -- CONFIG [KEY=VALUE…]`: `memopd-trace train …` on several processes.

Only rank 0 prints and writes.
"""

from __future__ import annotations

from memopd_scorer.__main__ import run_rank

if __name__ == "__main__":
    run_rank("train")
