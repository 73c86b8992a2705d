"""An episode as a tree, one line a row, drawn like a log of commits: who follows whom, what was kept, what was lost.

Text of a trace is untrusted: it is escaped, and never read as markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from memopd_trace.errors import printable
from memopd_trace.invocation import Episode, Invocation
from memopd_trace.lineage import common_prefix, final_ids, state_difference

ROOT, ROW, LINE, FORK, CROSS, DASH = "○●│├┼─"
ASCII = str.maketrans({"○": "o", "●": "*", "│": "|", "├": "+", "┼": "+", "─": "-", "…": "~"})
HEADER = ("relation", "from", "prompt", "output", "shared", "lost", "new", "trained", "reward", "finish")
LEFT = {"relation", "finish"}  # the others are numbers, and stand to the right
STYLES = {"relation": "cyan", "lost": "red", "new": "green", "reward": "bold", "finish": "dim"}


@dataclass(frozen=True, slots=True)
class Node:
    """One row of the tree. `above` is the row (not the index) of its parent; `shared`, `lost` and `new` count ids:
    in common with the parent's final ids from the first on, the parent's others, the prompt's others."""

    invocation: Invocation
    above: int | None
    shared: int | None
    lost: int | None
    new: int | None
    note: str | None  # what does not hold, or a mark

    @property
    def relation(self) -> str:
        """The relation, with the kind of a rewrite; empty = not recorded."""
        kind = self.invocation.rewrite_kind
        return (self.invocation.relation or "") + (f":{kind}" if kind is not None else "")

    def cells(self) -> tuple[str, ...]:
        """The texts under `HEADER`, escaped."""
        i = self.invocation
        numbers = (i.parent_index, len(i.prompt_ids), len(i.output_ids), self.shared, self.lost, self.new)
        return (
            printable(self.relation, 40),
            *("" if n is None else f"{n:,}" for n in numbers),
            f"{int(i.loss_mask().sum()):,}",
            "" if i.reward is None else f"{i.reward:.6g}",
            printable(i.finish_reason or "", 40),
        )


def nodes(episode: Episode) -> list[Node]:
    """The rows of an episode with what each shares with its parent. A parent that is no earlier row is noted."""
    rows: dict[int, int] = {}
    out = []
    for row, invocation in enumerate(episode):
        above = None if invocation.parent_index is None else rows.get(invocation.parent_index)
        out.append(_node(invocation, above, None if above is None else episode.invocations[above]))
        rows.setdefault(invocation.invocation_index, row)
    return out


def _node(invocation: Invocation, above: int | None, parent: Invocation | None) -> Node:
    marks = ["rejected"] if invocation.accepted is False else []
    if parent is None:
        if invocation.parent_index is not None:
            marks.append(f"its parent {invocation.parent_index} is no earlier row")
        return Node(invocation, None, None, None, None, "; ".join(marks) or None)
    final = final_ids(parent)
    shared = common_prefix(final, invocation.prompt_ids)
    lost = len(final) - shared
    if invocation.relation == "extend" and lost:
        marks.append(f"does not extend {parent.invocation_index}: id {shared} differs")
    elif invocation.relation == "extend" and (column := state_difference(parent, invocation)):
        marks.append(f"does not extend {parent.invocation_index}: {column} differs")
    return Node(invocation, above, shared, lost, len(invocation.prompt_ids) - shared, "; ".join(marks) or None)


def graph(parents: Sequence[int | None]) -> list[str]:
    """The drawing in front of each row, given each row's parent (an earlier row, or `None`).

    A row stands below its parent, in its lane or joined to it by a line; the last child takes the parent's lane over.
    """
    children = Counter(p for p in parents if p is not None)
    lanes: list[int | None] = []  # the row whose children are still to come
    out = []
    for row, parent in enumerate(parents):
        source = lane = None
        if parent is not None:
            source = lanes.index(parent)
            children[parent] -= 1
            lane = None if children[parent] else source
        lane = _free_lane(lanes, source) if lane is None else lane
        out.append(_draw(lanes, lane, source, is_root=parent is None))
        lanes[lane] = row if children[row] else None
        while lanes and lanes[-1] is None:
            lanes.pop()
    return out


def _free_lane(lanes: list[int | None], source: int | None) -> int:
    """A lane to the right of `source` that nobody waits in."""
    start = 0 if source is None else source + 1
    free = next((k for k in range(start, len(lanes)) if lanes[k] is None), len(lanes))
    if free == len(lanes):
        lanes.append(None)
    return free


def _draw(lanes: list[int | None], lane: int, source: int | None, *, is_root: bool) -> str:
    marks = [" " if held is None else LINE for held in lanes]
    gaps = [" "] * len(lanes)
    if source is not None and source != lane:
        marks[source] = FORK
        for k in range(source, lane):
            gaps[k] = DASH
            if k > source:
                marks[k] = DASH if lanes[k] is None else CROSS
    marks[lane] = ROOT if is_root else ROW
    return "".join(mark + gap for mark, gap in zip(marks, gaps, strict=True)).rstrip()


def tree_lines(episode: Episode) -> Iterator[Text]:
    """The episode: a heading, the columns' names, one line a row."""
    yield heading(episode)
    rows = nodes(episode)
    drawn = graph([node.above for node in rows])
    names = [f"{art} {node.invocation.invocation_index}" for art, node in zip(drawn, rows, strict=True)]
    cells = [node.cells() for node in rows]
    widths = [max(map(len, column)) for column in zip(HEADER, *cells, strict=True)]
    first = max(map(len, names))
    yield Text("  " + " " * first + _aligned(HEADER, widths), style="dim")
    for name, node, values in zip(names, rows, cells, strict=True):
        line = Text("  " + name.ljust(first))
        for column, value, width in zip(HEADER, values, widths, strict=True):
            text = value.ljust(width) if column in LEFT else value.rjust(width)
            line.append("  " + text, style="" if value in ("", "0") else STYLES.get(column, ""))
        if node.note is not None:
            line.append("  " + node.note, style="yellow")
        line.rstrip()
        yield line


def heading(episode: Episode) -> Text:
    """The episode's name and totals."""
    line = Text("episode ", style="bold").append(f"'{printable(episode.episode_id)}'")
    kind, group = episode.group_key
    facts = [] if kind == "episode" else [f"{kind} '{printable(group)}'"]
    facts.append(f"{len(episode):,} invocation" + ("" if len(episode) == 1 else "s"))
    if episode.episode_return is not None:
        facts.append(f"return {episode.episode_return:.6g}")
    ends = [name for name in ("terminated", "truncated") if getattr(episode.invocations[-1], name)]
    return line.append("  " + ", ".join([*facts, *ends]), style="not bold dim")


def _aligned(values: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(HEADER, values, widths, strict=True)
    return "".join("  " + (v.ljust(w) if c in LEFT else v.rjust(w)) for c, v, w in cells).rstrip()
