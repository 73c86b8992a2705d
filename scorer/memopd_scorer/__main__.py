"""`torchrun --nproc-per-node N -m memopd_scorer -- …`: `memopd-trace score …` in every process that torchrun starts.

Takes the options of `memopd-trace score`. Only rank 0 prints. Without the `--`, torchrun looks at all options and takes
`--signal` for an abbreviation of one of its own.
"""

from __future__ import annotations

import os
import sys

from memopd_trace.cli import run
from memopd_trace.cli.console import make_streams_safe


def run_rank(command: str, *more: str) -> None:
    """Run a command of memopd-trace as one rank of a team, with the options of this process and `more`, and exit with
    the code of all. Only rank 0 prints."""
    make_streams_safe()
    options = sys.argv[2:] if sys.argv[1:2] == ["--"] else sys.argv[1:]
    arguments = [command, *options, *more]
    if os.environ.get("RANK", "0") != "0":
        arguments.insert(0, "--quiet")
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open until the process ends
    sys.exit(run(arguments))


if __name__ == "__main__":
    run_rank("score", "--engine", "torchrun")
