"""One episode or one invocation of a trace, to be looked at.

`find_episode`, `only_episode` and `find_invocation` choose; `lineage_tree.tree_lines` draws an episode;
`page` gives one invocation in full: its facts, what separates its state from its parent's, what of positions and
visibility is explicit, its segments with ids or text, and its output token by token. Text of a trace is untrusted: it
is escaped, never read as markup, and stands behind a margin, so that it cannot pass for a line of this program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from memopd_trace import causes
from memopd_trace.errors import UsageError, printable
from memopd_trace.invocation import IDS, Episode, Invocation
from memopd_trace.lineage import common_prefix, final_ids, state_difference
from memopd_trace.metadata import TraceMetadata
from memopd_trace.pieces import Pieces
from memopd_trace.storage import TraceReader

SHOWN = 64  # tokens of a segment, and lines of any other list, unless all are asked for
SEARCHED = 20_000  # episodes whose names are compared with one that is not there
MARGIN = "  │ "
KINDS = {
    "system": "magenta",
    "task": "cyan",
    "user": "cyan",
    "memory": "yellow",
    "observation": "green",
    "tool_result": "green",
    "thought": "blue",
    "action": "bold",
    "template": "dim",
}


def find_episode(reader: TraceReader, episode_id: str) -> Episode:
    """The episode of that name, as it is or as it is printed.

    Raises:
        UsageError: there is none; the message names those that are close.
    """
    names: list[str] = []
    for episode in reader.iter_episodes():
        shown = printable(episode.episode_id, None)
        if episode_id in (episode.episode_id, shown):
            return episode
        if len(names) < SEARCHED:
            names.append(shown)
    close = get_close_matches(episode_id, names, n=3) or names[:3]
    listed = ", ".join(f"'{printable(name)}'" for name in close)
    raise UsageError(
        f"{reader.path}: no episode '{printable(episode_id)}'",
        hint=f"did you mean {listed}?" if close else "the trace holds no rows",
    )


def only_episode(reader: TraceReader) -> Episode:
    """The episode of a trace that has just one.

    Raises:
        UsageError: it has none, or several.
    """
    episodes = reader.iter_episodes()
    first = next(episodes, None)
    if first is None:
        raise UsageError(f"{reader.path}: holds no rows", hint="there is no invocation to show")
    if next(episodes, None) is not None:
        raise UsageError(
            f"{reader.path}: holds several episodes, and the invocation may be of any",
            hint=f"name one, e.g. --episode '{printable(first.episode_id)}'",
        )
    return first


def find_invocation(episode: Episode, index: int) -> Invocation:
    """The invocation of that index.

    Raises:
        UsageError: there is none.
    """
    for invocation in episode:
        if invocation.invocation_index == index:
            return invocation
    indices = [i.invocation_index for i in episode]
    raise UsageError(
        f"episode '{printable(episode.episode_id)}': no invocation {index}",
        hint=f"it has {min(indices)} to {max(indices)}",
    )


def count_episodes(reader: TraceReader) -> int:
    """How many episodes (runs of rows with one name) the trace has; reads all of it."""
    count, last = 0, None
    for batch in reader.iter_batches():
        for name in batch.column("episode_id").to_pylist():
            count += name != last
            last = name
    return count


def page(
    episode: Episode,
    invocation: Invocation,
    metadata: TraceMetadata,
    pieces: Pieces | None = None,
    *,
    full: bool = False,
) -> Iterator[Text]:
    """One invocation of an episode, in full, as lines; `pieces` gives text for ids, `full` leaves nothing out."""
    limit = None if full else SHOWN
    yield Text(invocation.name, style="bold")
    yield from _facts(invocation)
    yield from _against_parent(episode, invocation, metadata, pieces)
    yield from _state(invocation, limit)
    for title, start, stop in _halves(invocation):
        yield Text()
        yield Text(f"{title}, {stop - start:,} tokens", style="bold")
        for span in _spans(invocation, start, stop):
            yield from _span_lines(invocation.sequence_ids, span, pieces, limit)
    yield Text()
    yield from _output_lines(invocation, pieces, limit)


def _fact(name: str, value: str) -> Text:
    return Text(f"  {name.replace('_', ' '):<16} ", style="dim").append(value, style="not dim")


def _facts(invocation: Invocation) -> Iterator[Text]:
    """What the row records about itself."""
    yield _fact("model", printable(invocation.model_id))
    relation = printable(invocation.relation or "not recorded")
    if invocation.rewrite_kind is not None:
        evidence = "" if invocation.rewrite_evidence is None else f", {printable(invocation.rewrite_evidence)}"
        relation += f" ({printable(invocation.rewrite_kind)}{evidence})"
    yield _fact("relation", relation + ("" if invocation.parent_index is None else f" of {invocation.parent_index}"))
    sampled, trained = int(invocation.sampled().sum()), int(invocation.loss_mask().sum())
    outputs = f"{len(invocation.output_ids):,} ({sampled:,} sampled, {trained:,} trained)"
    yield _fact("tokens", f"prompt {len(invocation.prompt_ids):,}, output {outputs}")
    for name in ("group_id", "task_id", "agent_id", "attempt", "accepted", "finish_reason", "token_source"):
        if (value := getattr(invocation, name)) is not None:
            yield _fact(name, printable(str(value)))
    for name in ("policy_version", "kv_policy_version", "reward", "terminated", "truncated", "started_at", "ended_at"):
        if (value := getattr(invocation, name)) is not None:
            yield _fact(name, str(value))
    if invocation.sampling is not None:
        settings = [(n, getattr(invocation.sampling, n)) for n in invocation.sampling.__slots__]
        yield _fact("sampling", ", ".join(f"{n} {v}" for n, v in settings if v is not None) or "nothing set")
    if invocation.rewards is not None:
        yield _fact("rewards", _pairs(invocation.rewards))
    if invocation.extra is not None:
        yield _fact("extra", _pairs(invocation.extra))
    yield _fact("state digest", _digest(invocation))


def _pairs(values: Mapping[str, float | str | None]) -> str:
    """A map's items; a value may be null."""
    texts = (f"{printable(k)} {'null' if v is None else printable(str(v))}" for k, v in values.items())
    return ", ".join(texts) or "none"


def _digest(invocation: Invocation) -> str:
    recorded, computed = invocation.state_digest, invocation.compute_digest()
    if recorded is None:
        return f"{computed.hex()[:16]}… (not recorded)"
    return f"{recorded.hex()[:16]}…" + ("" if recorded == computed else " is not that of this state")


def _against_parent(
    episode: Episode, invocation: Invocation, metadata: TraceMetadata, pieces: Pieces | None
) -> Iterator[Text]:
    """What the state has in common with the parent's, and what separates them."""
    if invocation.parent_index is None:
        return
    before = [i for i in episode if i.invocation_index == invocation.parent_index and i is not invocation]
    yield Text()
    yield Text(f"against its parent, {invocation.parent_index}", style="bold")
    if not before:
        yield _fact("parent", "not there")
        return
    parent = before[0]
    final, prompt = final_ids(parent), invocation.prompt_ids
    shared = common_prefix(final, prompt)
    yield _fact("ids", f"{shared:,} in common, {len(final) - shared:,} lost, {len(prompt) - shared:,} new")
    model = metadata.models.get(invocation.model_id)
    difference = causes.explain(parent, invocation, None if model is None else model.tokenizer.bos_id, pieces)
    yield _fact("cause", f"{difference.cause}: {printable(difference.detail, None)}")
    if difference.cause == "none":
        column = state_difference(parent, invocation)
        yield _fact("state", "continues the parent's" if column is None else f"{column} differs in what they share")


def _state(invocation: Invocation, limit: int | None) -> Iterator[Text]:
    """Positions, visibility, slots and media, as far as they are explicit."""
    lines: list[str] = []
    if invocation.position_ids is not None:
        lines += [
            f"{_range('token', a, b)} at {_range('position', x, y)}" for a, b, x, y in _runs(invocation.position_ids)
        ]
    if invocation.visible_until is not None:
        lines += _visible(invocation.visible_until, len(invocation), "seen by queries before")
    if invocation.visible_from is not None:
        own = np.arange(len(invocation.visible_from))
        lines += _visible(invocation.visible_from, own, "seen from query")
    for media in invocation.media or ():
        what = " ".join(printable(v) for v in (media.mime, media.uri) if v is not None)
        lines.append(
            f"{_range('token', media.start, media.stop - 1)}: content {media.sha256.hex()[:16]}… {what}".rstrip()
        )
    if not lines:
        return
    yield Text()
    yield Text("explicit state", style="bold")
    yield from (Text(f"  {line}") for line in lines[:limit])
    if limit is not None and len(lines) > limit:
        yield Text(f"  and {len(lines) - limit:,} more", style="dim")


def _runs(values: IDS) -> Iterator[tuple[int, int, int, int]]:
    """(first index, last index, first value, last value) of stretches in which the value grows by 1."""
    cuts = np.flatnonzero(np.diff(values.astype(np.int64)) != 1) + 1
    for part in np.split(np.arange(len(values)), cuts):
        if len(part):
            yield int(part[0]), int(part[-1]), int(values[part[0]]), int(values[part[-1]])


def _visible(values: IDS, default: int | NDArray[Any], words: str) -> Iterator[str]:
    """A line for each stretch of keys with one value that is not the default."""
    cuts = np.flatnonzero(np.diff(values)) + 1
    other = np.asarray(values != default)
    for part in np.split(np.arange(len(values)), cuts):
        if len(part) and other[part].any():
            chosen = part[other[part]]
            yield f"{_range('key', int(chosen[0]), int(chosen[-1]))} {words} {values[chosen[0]]}"


def _range(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


def _halves(invocation: Invocation) -> list[tuple[str, int, int]]:
    """(title, start, stop) of the parts of the sequence."""
    prompt, n = len(invocation.prompt_ids), len(invocation)
    if invocation.output_slots is not None:
        return [("prompt (its slots not filled)", 0, n)]
    return [("prompt", 0, prompt), ("output", prompt, n)]


Span = tuple[int, int, str | None, str]  # start, stop, kind, where it was copied from


def _spans(invocation: Invocation, start: int, stop: int) -> Iterator[Span]:
    """The stretches of `[start, stop)`: segments, cut to it, and what no segment covers."""
    at = start
    for segment in sorted(invocation.segments or (), key=lambda s: (s.start, s.stop)):
        left, right = max(at, segment.start), min(segment.stop, stop)
        if left >= right:
            continue
        if left > at:
            yield at, left, None, ""
        source = ""
        if segment.source_index is not None and segment.source_start is not None:
            first = segment.source_start + left - segment.start
            source = f"copy of {segment.source_index}[{first}:{first + right - left}]"
        yield left, right, segment.kind, source
        at = right
    if at < stop:
        yield at, stop, None, ""


def _span_lines(ids: IDS, span: Span, pieces: Pieces | None, limit: int | None) -> Iterator[Text]:
    start, stop, kind, source = span
    style = KINDS.get(kind or "", "dim" if kind is None else "white")
    line = Text(f"  [{start}:{stop}] ", style="dim")
    line.append(printable(kind or "no segment", 40), style=f"not dim {style}")
    yield line.append(f"  {source}" if source else "", style="not dim")
    content = ids[start:stop]
    for part, gap in _elide(content, limit):
        if gap:
            yield Text(f"{MARGIN}… {gap:,} tokens …", style="dim")
        text = " ".join(map(str, part.tolist())) if pieces is None else pieces.text(part)
        for line_text in text.split("\n"):
            yield Text(MARGIN, style="dim").append(printable(line_text, None), style=f"not dim {style}")


def _elide(ids: IDS, limit: int | None) -> list[tuple[IDS, int]]:
    """(tokens, how many were left out in front of them): all in one, or the first and the last."""
    if limit is None or len(ids) <= limit:
        return [(ids, 0)]
    half = limit // 2
    return [(ids[:half], 0), (ids[-half:], len(ids) - 2 * half)]


def _output_lines(invocation: Invocation, pieces: Pieces | None, limit: int | None) -> Iterator[Text]:
    """The output token by token: index, id, log-probability, piece, marks."""
    kind = "" if invocation.logprob_kind is None else f" ({printable(invocation.logprob_kind)}, nats)"
    yield Text("sampled tokens", style="bold").append(f"  index, id, log-probability{kind}", style="not bold dim")
    rows = np.arange(len(invocation.output_ids), dtype=np.int32)
    for part, gap in _elide(rows, limit):
        if gap:
            yield Text(f"  … {gap:,} tokens …", style="dim")
        for row in part.tolist():
            yield _token_line(invocation, row, pieces)


def _token_line(invocation: Invocation, row: int, pieces: Pieces | None) -> Text:
    token = int(invocation.output_ids[row])
    logprob = _at(invocation.output_logprobs, row)
    line = Text(f"  {row:>5} {token:>7} ")
    line.append(f"{'null' if logprob is None else format(logprob, '.4f'):>9}", style=_heat(logprob))
    if pieces is not None:
        line.append("  " + printable(repr(pieces.text([token])), 40))
    marks = []
    if _at(invocation.output_sampled, row) is False:
        marks.append("forced")
    if not _at(invocation.loss_mask(), row):
        marks.append("not trained")
    for name, column in (("slot", "output_slots"), ("version", "output_policy_versions")):
        if (value := _at(getattr(invocation, column), row)) is not None:
            marks.append(f"{name} {value}")
    if (mass := _at(invocation.output_kept_logmass, row)) is not None:
        marks.append(f"kept {mass:.4f}")
    line.append("  " + ", ".join(marks) if marks else "", style="yellow")
    return line


def _at(values: Sequence[Any] | NDArray[Any] | None, row: int) -> Any:
    """An item of a per-output array as a Python value; `None` where there is no array, no such item, or a null."""
    if values is None or row >= len(values):
        return None
    value = values[row]
    return None if value is np.ma.masked else value.item()


def _heat(logprob: float | None) -> str:
    """The rarer, the redder."""
    if logprob is None or logprob != logprob:
        return "dim"
    return "" if logprob > -1 else "yellow" if logprob > -4 else "red"
