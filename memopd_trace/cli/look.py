"""Commands with which people look at traces: `stats`, `show`, `diff`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from memopd_trace.cli.console import OutputFormat, notice, progress
from memopd_trace.errors import InputError, UsageError, printable

if TYPE_CHECKING:
    from rich.text import Text

EPISODES = 5  # drawn when none is named


def stats(
    path: Path = typer.Argument(..., readable=False, help="A trace file or folder."),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """Say what a trace holds: rows, tokens, lengths, sharing, lineage, log-probabilities, policy versions, rewards.

    Example: memopd-trace stats runs/today.parquet --format json
    """
    from rich.text import Text

    from memopd_trace.cli.stats_text import sections
    from memopd_trace.look.stats import stats as count

    with progress("reading"):
        totals = count(path)
    if format is OutputFormat.json:
        sys.stdout.write(totals.to_json())
        return
    for title, rows in sections(totals.to_dict()):
        _print([Text(title, style="bold")])
        width = max(len(name) for name, _ in rows)
        _print(Text(f"  {name:<{width}}  ", style="dim").append(value, style="not dim") for name, value in rows)
    if totals.rows_unsound:
        notice(f"arrays of {totals.rows_unsound} rows do not fit together; `memopd-trace validate` names them")


def show(
    path: Path = typer.Argument(..., readable=False, help="A trace file or folder."),
    episode: str | None = typer.Option(None, metavar="ID", help=f"This episode; else the first {EPISODES}."),
    invocation: int | None = typer.Option(None, metavar="N", help="This invocation of the episode, in full."),
    tokenizer: Path | None = typer.Option(
        None, metavar="DIR", readable=False, help="A folder with a tokenizer.json: text beside ids."
    ),
    full: bool = typer.Option(False, "--full", help="All episodes; all tokens."),
) -> None:
    """Draw the lineage of episodes, or show one invocation: segments, tokens, what separates it from its parent.

    Example: memopd-trace show runs/today.parquet --episode question-1/0 --invocation 3 --tokenizer models/student
    """
    from rich.text import Text

    from memopd_trace.look import show as look
    from memopd_trace.look.lineage_tree import tree_lines
    from memopd_trace.storage import TraceReader

    reader = TraceReader(path)
    if invocation is not None:
        found = look.only_episode(reader) if episode is None else look.find_episode(reader, episode)
        chosen = look.find_invocation(found, invocation)
        pieces = None if tokenizer is None else _pieces(tokenizer, reader, chosen.model_id)
        _print(look.page(found, chosen, reader.metadata, pieces, full=full))
        return
    if tokenizer is not None:
        raise UsageError("--tokenizer: text is shown of one invocation", hint="add --invocation N")
    if episode is not None:
        _print(tree_lines(look.find_episode(reader, episode)))
        return
    shown = 0
    for item in islice(reader.iter_episodes(), None if full else EPISODES):
        _print([*([Text()] if shown else []), *tree_lines(item)])
        shown += 1
    more = 0 if full or shown < EPISODES else look.count_episodes(reader) - shown
    if more or not shown:
        _print([Text(f"and {more:,} more episodes; --episode ID names one" if more else "no episodes", style="dim")])


def diff(
    a: Path = typer.Argument(..., metavar="A", readable=False, help="A trace file or folder."),
    b: Path = typer.Argument(..., metavar="B", readable=False, help="Another."),
    column: list[str] = typer.Option([], metavar="NAME", help="Compare only this column (may be repeated)."),
    ignore_column: list[str] = typer.Option([], metavar="NAME", help="Do not compare this column (may be repeated)."),
    rows_only: bool = typer.Option(False, "--rows-only", help="Do not compare the metadata."),
    format: OutputFormat = typer.Option(OutputFormat.text, "--format"),
) -> None:
    """Compare two traces by state, row by row, wherever the rows stand.

    Exit code 0: equal; 1: they differ; 3: an input is missing, unreadable or refused.

    Example: memopd-trace diff before.parquet after.parquet --ignore-column extra
    """
    from memopd_trace.cli.diff_text import lines
    from memopd_trace.look.diff import diff as compare

    with progress("comparing"):
        result = compare(a, b, columns=column, ignore=ignore_column, metadata=not rows_only)
    if format is OutputFormat.json:
        sys.stdout.write(result.to_json())
    else:
        _print(lines(result))
    raise typer.Exit(0 if result.equal else 1)


def _pieces(tokenizer: Path, reader: Any, model_id: str) -> Any:
    """The tokenizer, if it is the model's.

    Raises:
        InputError: it cannot be read, or is another one (`E-TOKENIZER-MISMATCH`).
    """
    from memopd_trace.pieces import load_pieces

    pieces = load_pieces(tokenizer)
    model = reader.metadata.models.get(model_id)
    if model is not None and model.tokenizer.fingerprint != pieces.fingerprint:
        recorded = printable(model.tokenizer.fingerprint)
        raise InputError(
            f"{tokenizer}: fingerprint {pieces.fingerprint}, the trace's model '{printable(model_id)}' has {recorded}",
            code="E-TOKENIZER-MISMATCH",
            hint="its text would be another; give the tokenizer that the trace was recorded with",
        )
    return pieces


def _print(lines: Iterable[Text]) -> None:
    """Lines on stdout, styled only at a terminal; never wrapped, never read as markup."""
    from rich.console import Console

    from memopd_trace.look.lineage_tree import ASCII

    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    plain = not _can_draw(console.encoding)
    for line in lines:
        if plain:
            line.plain = line.plain.translate(ASCII)
        console.print(line)


def _can_draw(encoding: str) -> bool:
    try:
        "○●│├┼─…".encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(stats)
    app.command()(show)
    app.command()(diff)
