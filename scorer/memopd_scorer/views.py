"""The states of a trace under one view: the tokens that were sampled, after the recorded prompt or another one.

A view is `recorded`, one of a views file, or `persistent-history`, which needs no file. numpy only, no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator

from memopd_scorer.plan import iter_groups
from memopd_scorer.states import STATE_COLUMNS, State, state_of
from memopd_trace.errors import InputError, UsageError
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.places import PathLike
from memopd_trace.schema import RECORDED
from memopd_trace.storage import TraceReader
from memopd_trace.viewfile import View, ViewsReader
from memopd_trace.views import PERSISTENT_HISTORY, persistent_history, under_prompt

Recorded = dict[tuple[str, int], Invocation]  # rows that were read under a view, until their states are made


def open_views(view: str, views: PathLike | None) -> ViewsReader | None:
    """The views file that holds `view`; `None` for a view that needs none.

    Raises:
        UsageError: a file and no view of it, a view without its file, or one that the file does not name.
        InputError: the file is missing or unreadable, or `E-MODEL-UNSUPPORTED` for views with media.
    """
    if views is None:
        if view not in (RECORDED, PERSISTENT_HISTORY):
            raise UsageError(
                f"view '{view}': of which file?",
                hint=_near(view, (RECORDED, PERSISTENT_HISTORY), f"only {PERSISTENT_HISTORY} needs no views file"),
            )
        return None
    reader = ViewsReader(views)
    names = reader.metadata.views
    if view == RECORDED or view not in names:
        raise UsageError(
            f"{views}: no view '{view}'", hint=_near(view, names, f"it names {', '.join(names) or 'none'}")
        )
    if "media" in reader.metadata.required_features:
        raise InputError(
            f"{views}: the views hold media, which are not fed to models yet: only text states can be run exactly",
            code="E-MODEL-UNSUPPORTED",
        )
    return reader


def _near(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name.lower().replace("_", "-"), known, n=1)
    return f"did you mean '{near[0]}'? {otherwise}" if near else otherwise


def iter_states(
    reader: TraceReader,
    view: str,
    views: ViewsReader | None,
    *,
    vocabulary: int | None = None,
    with_recorded: bool = False,
) -> Iterator[list[State]]:
    """The states of a valid trace under a view of it, by groups that may share prefixes; `views` is of `open_views`.

    A row without the view has no state. One episode and its views are read at a time. `with_recorded` keeps beside each
    state under another view the recorded one.

    Raises:
        InputError: `E-VIEW-STATE` or `E-VIEW-ROW`, a view that is not for these rows.
        UsageError: `persistent-history` of a row of in-place generation.
    """
    if view == RECORDED:
        for group in iter_groups(reader.iter_episodes(STATE_COLUMNS)):
            yield [state_of(i, vocabulary=vocabulary) for i in group]
        return
    known: Recorded | None = {} if with_recorded else None
    episodes = _flattened(reader, known) if views is None else _viewed(reader, view, views, known)
    for group in iter_groups(episodes):
        yield [_state_under_view(i, vocabulary, known) for i in group]


def _state_under_view(viewed: Invocation, vocabulary: int | None, known: Recorded | None) -> State:
    return dataclasses.replace(
        state_of(viewed, vocabulary=vocabulary),
        view_digest=viewed.compute_digest(),
        recorded=None if known is None else state_of(known.pop(viewed.key), vocabulary=vocabulary),
    )


def _flattened(reader: TraceReader, known: Recorded | None) -> Iterator[Episode]:
    for episode in reader.iter_episodes():
        prompts = persistent_history(episode)
        rows = (_of_row(i, under_prompt(i, prompt), known) for i, prompt in zip(episode, prompts, strict=True))
        yield Episode(episode.episode_id, tuple(rows))


def _viewed(reader: TraceReader, view: str, views: ViewsReader, known: Recorded | None) -> Iterator[Episode]:
    """Both files side by side: their rows stand in one order."""
    pending = (v for v in views if v.view == view)
    upcoming = next(pending, None)
    for episode in reader.iter_episodes():
        rows: list[Invocation] = []
        for invocation in episode:
            if upcoming is not None and _key(upcoming) == invocation.key:
                rows.append(_of_row(invocation, upcoming.apply(invocation), known))
                upcoming = next(pending, None)
        if rows:
            yield Episode(episode.episode_id, tuple(rows))
    if upcoming is not None:
        raise InputError(
            f"{views.path}: episode '{upcoming.episode_id}', invocation {upcoming.invocation_index}: the trace holds "
            "no such row after those of the views before it",
            code="E-VIEW-ROW",
            hint="`memopd-trace validate TRACE --views FILE` lists what does not fit",
        )


def _of_row(recorded: Invocation, viewed: Invocation, known: Recorded | None) -> Invocation:
    """A viewed row that keeps the trace row's digest; the recorded one is noted in `known`."""
    if known is not None:
        known[recorded.key] = recorded
    return viewed.replace(state_digest=recorded.compute_digest())


def _key(view: View) -> tuple[str, int]:
    return view.episode_id, view.invocation_index
