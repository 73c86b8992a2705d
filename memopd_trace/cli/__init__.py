"""The `memopd-trace` command.

Each group of commands lives in its own module of this package; what needs torch is imported inside the command
that needs it. stdout holds only a command's result; notices and progress go to stderr.

Exit codes: 0 done and clean, 1 findings or a failed check, 2 usage, 3 no input, unreadable or refused input,
4 internal error, 130 interrupted (Ctrl-C, SIGTERM).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from typing import Any

import typer

from memopd_trace import __version__
from memopd_trace.cli import catalogue, convert, demo, export, learn, look, record, teacher, validate
from memopd_trace.cli.console import make_streams_safe, settings, spare_pandas, stderr
from memopd_trace.errors import TraceError, printable

# click itself, or the copy that newer typer carries: the same class by name either way
_CLICK_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

MAX_ERROR = 4000  # characters of the one line: whole paths, whatever a damaged file put into the message
INTERRUPTED = "interrupted; run the same command again to go on"

app = typer.Typer(
    name="memopd-trace",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        print(f"memopd-trace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No notices and no progress on stderr."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Record, check, score and train on the model calls of agents that rewrite their context."""
    settings.quiet, settings.debug = quiet, debug


validate.register(app)
catalogue.register(app)
look.register(app)
record.register(app)
convert.register(app)
export.register(app)
teacher.register(app)
learn.register(app)
demo.register(app)


def main() -> None:
    """Run the command line; every error becomes one line on stderr and an exit code."""
    make_streams_safe()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop, as Ctrl-C: nothing half done stays
    if {"validate", "convert", "export"} & set(sys.argv[1:]):
        spare_pandas()
    code = run(sys.argv[1:])
    if code == 130:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a second Ctrl-C, while Python ends
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; nothing is raised."""
    try:
        result = app(arguments or ["--help"], standalone_mode=False)
        sys.stdout.flush()
        if result == 130:  # typer makes this of a KeyboardInterrupt
            return _interrupted()
        return result if isinstance(result, int) else 0
    except TraceError as error:
        return _fail(str(error), error.exit_code)
    except _CLICK_ERROR as error:
        return _fail(error.format_message().replace(": Value error, ", ": "), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BrokenPipeError:
        return _nobody_reads()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # click makes this of one
            return _nobody_reads()
        return stop.code if isinstance(stop.code, int) else 4
    except OSError as error:
        return _fail(f"{error.filename or _place(error)}: {error.strerror or error}", 3)
    except MemoryError:
        return _fail("out of memory", 4)
    except Exception as error:
        return _fail(f"internal error: {type(error).__name__}: {error} (please report it; --debug shows where)", 4)


def _interrupted() -> int:
    """Say so, whole, however often Ctrl-C is pressed meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        return _fail(INTERRUPTED, 130)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _fail(INTERRUPTED, 130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nobody_reads() -> int:
    """stdout's reader has seen enough: what is left of the result goes nowhere, and nothing is wrong."""
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open until the process ends
    return 0


def _place(error: OSError) -> str:
    """Where an error happened that names no file."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
    return "disk" if error.errno in full else "reading or writing"


def _fail(message: str, code: int) -> int:
    if settings.debug:
        traceback.print_exc()
    stderr(quiet=False).print("error:", style="bold red", end=" ")
    print(printable(message.replace("\n", " "), MAX_ERROR), file=sys.stderr)
    return code
