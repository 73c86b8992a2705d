"""Work in forked processes of one warm parent: they begin in milliseconds, and are killed at an exact point.

`Forks` starts the parent, a fresh interpreter that has loaded torch and a teacher. `run` forks a child, which calls a
function of a module by name; the child may kill itself (SIGKILL) before its n-th call of any function or its n-th step
on the disk, as exact as a test wants and as deaf to `finally` as any other kill -9.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DISK_STEPS = {"write", "fsync", "replace", "unlink", "mkdir"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its result, or the signal that ended it; `error` is what it raised. `calls` and `steps` are
    those that it made, of any function and on the disk, if it was to `count` them and lived."""

    result: Any = None
    killed: int = 0
    error: str = ""
    calls: int = 0
    steps: int = 0


class Forks:
    """A warm parent, one child at a time. `warm` is a function `module:name` that is called once, with `arguments`;
    what it returns goes to every child's function."""

    def __init__(self, warm: str, **arguments: Any) -> None:
        root = Path(__file__).parents[1]
        paths = [str(root / part) for part in ("", "scorer", "trainer", "tests")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, str(Path(__file__)), warm, json.dumps(arguments)]
        self._parent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()

    def run(
        self,
        function: str,
        *,
        at_call: int | None = None,
        at_step: int | None = None,
        after: float | None = None,
        by: int = signal.SIGKILL,
        count: bool = False,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> Ended:
        """Call `function` (`module:name`) in a child. The signal `by` meets it before call or step number `at_…` (from
        0), or `after` so many seconds, if it lives so long."""
        stdin, stdout = self._parent.stdin, self._parent.stdout
        assert stdin is not None and stdout is not None
        wish = {
            "function": function,
            "arguments": arguments,
            "at_call": at_call,
            "at_step": at_step,
            "after": after,
            "by": by,
            "count": count,
            "environment": environment or {},
        }
        stdin.write(json.dumps(wish) + "\n")
        stdin.flush()
        return Ended(**json.loads(stdout.readline()))


class _Counter:
    """Counts a process's calls, and sends it the signal `by` at one."""

    def __init__(self, at_call: int | None, at_step: int | None, by: int) -> None:
        self.at_call, self.at_step, self.by = at_call, at_step, by
        self.calls = self.steps = 0

    def __call__(self, frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in DISK_STEPS and not isinstance(function.__self__, str):
            if self.steps == self.at_step:
                os.kill(os.getpid(), self.by)
            self.steps += 1
        elif event == "call":
            if self.calls == self.at_call:
                os.kill(os.getpid(), self.by)
            self.calls += 1


def _find(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _child(wish: dict[str, Any], warm: Any, pipe: int) -> None:
    os.environ.update(wish["environment"])
    counter = _Counter(wish["at_call"], wish["at_step"], wish["by"])
    answer: dict[str, Any] = {}
    watched = wish["at_call"] is not None or wish["at_step"] is not None or wish["count"]
    try:
        function = _find(wish["function"])
        sys.setprofile(counter if watched else None)
        answer["result"] = function(warm, **wish["arguments"])
    except BaseException as error:
        answer["error"] = "".join(traceback.format_exception_only(error)).strip()
    sys.setprofile(None)
    with os.fdopen(pipe, "w") as out:
        json.dump({**answer, "calls": counter.calls, "steps": counter.steps}, out)


def _fork(wish: dict[str, Any], warm: Any) -> dict[str, Any]:
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(source)
            os.dup2(2, 1)  # its prints do not belong to the answers
            _child(wish, warm, sink)
        os._exit(0)
    os.close(sink)
    if wish["after"] is not None:
        time.sleep(wish["after"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, wish["by"])
    with os.fdopen(source) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"killed": os.WTERMSIG(status)}
    answer: dict[str, Any] = json.loads(text)
    return answer


def _serve(warm: str, arguments: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loaded = _find(warm)(**arguments)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        answers.write(json.dumps(_fork(json.loads(line), loaded)) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path.pop(0)
    _serve(sys.argv[1], json.loads(sys.argv[2]))
