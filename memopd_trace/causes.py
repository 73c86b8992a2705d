"""Why one call's prompt does not begin with another call's state: what ids, calls and texts tell together.

    placeholder        a run of placeholders has another length, for the same content where that is recorded
    response_prefix    other ids stand between the parent's prompt and its output: a thinking or answer prefix

and, with a tokenizer:

    retokenised        the texts are equal: the text was decoded and encoded again
    reserialised       the same JSON value, written anew (spaces, key order, escapes)
    double_encoded     JSON in a JSON string on one side, plain on the other
    stripped_thinking  without its reasoning, the parent's text goes on
    separator          white space between two control pieces came or went
    whitespace         white space elsewhere came or went: a strip
    controls           the texts agree but for control pieces, which came or went
    system_inserted    a system message stands in front that was not there
    truncated_left     the head of the parent's text is gone
    other_output       the parent's prompt is kept, another answer stands in place of its output: another attempt,
                       or a call that was not recorded

Text that only looks alike proves nothing about the state: causes explain a difference of ids, they never excuse it.
All of it is linear in the length of the two texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from memopd_trace.invocation import IDS, Invocation
from memopd_trace.lineage import Cause, Difference, explain_difference, final_ids, many
from memopd_trace.pieces import Pieces

MAX_PREFIX = 64  # ids between a prompt and its output that may be a response prefix
MAX_OBJECTS, JSON_REACH = 32, 65_536  # JSON values tried, and how many characters in front of the difference
HEAD, MAX_HEADS = 8, 32  # characters by which the head of a cut text is looked for, and places tried
THINKING = re.compile(r"<(think|thinking|reasoning)>|\[THINK\]")
SHOWN = 40  # characters of a text in a message

HEADER = 16  # ids: a template's header may be as long; a shared beginning that is no longer says nothing
# What a difference of ids says was done to a context, for logs and clients that do not declare it.
REWRITE_KINDS: dict[Cause, str] = {
    "truncated_left": "truncate_left",
    "elided": "elide",
    "cut_short": "rewind",
    "stripped_thinking": "strip_thinking",
    "retokenised": "reencode",
    "placeholder": "reencode",
    "whitespace": "reencode",
    "separator": "reencode",
    "controls": "reencode",
    "reserialised": "reserialise",
    "double_encoded": "reserialise",
}

Found = tuple[Cause, str] | None


class Texts(NamedTuple):
    """Two texts that differ: the parent's whole one, the child's prompt, and the length of their common start."""

    parent: str
    child: str
    same: int


def explain(
    parent: Invocation, child: Invocation, bos_id: int | None = None, pieces: Pieces | None = None
) -> Difference:
    """Where and probably why the child's prompt does not begin with the parent's final ids.

    `pieces` must be those of both calls' model; without them only ids are compared.
    """
    before, prompt = final_ids(parent), child.prompt_ids
    plain = explain_difference(before, prompt, bos_id)
    if plain.cause in ("none", "double_bos"):
        return plain
    found = None
    if _may_be_one_content(parent, child):
        found = _placeholder(before, prompt, plain.index, _media_ids(parent) | _media_ids(child))
    if found is None and pieces is not None:
        found = _by_text(parent, before, prompt, pieces)
    found = found or _response_prefix(parent, prompt, plain.index)
    return Difference(found[0], plain.index, found[1]) if found else plain


def _media_ids(invocation: Invocation) -> set[int]:
    ids = invocation.prompt_ids
    return {int(ids[m.start]) for m in invocation.media or () if 0 <= m.start < len(ids)}


def _may_be_one_content(parent: Invocation, child: Invocation) -> bool:
    """Whether some content may stand in runs of two lengths, which begin at one index. Other content there, or a run
    that came closer because what was between is gone, is a change of the context and no other expansion."""
    if not parent.media or not child.media:  # not told: the ids have to do
        return True
    runs = {m.start: m for m in parent.media}
    pairs = ((runs[m.start], m) for m in child.media if m.start in runs)
    return any(was.sha256 == now.sha256 and was.stop != now.stop for was, now in pairs)


def _placeholder(before: IDS, prompt: IDS, at: int, placeholders: set[int]) -> Found:
    for token in placeholders:
        was, now = _run(before, at, token), _run(prompt, at, token)
        if was != now and was and now:
            return "placeholder", f"a run of {was} placeholders {token} became {now}"
    return None


def _run(ids: IDS, at: int, token: int) -> int:
    """The length of the run of `token` that reaches up to or begins at `at`."""
    other = np.asarray(ids != token)
    front = other[:at][::-1]
    behind = other[at:]
    left = int(front.argmax()) if front.any() else len(front)
    right = int(behind.argmax()) if behind.any() else len(behind)
    return left + right


def _response_prefix(parent: Invocation, prompt: IDS, at: int) -> Found:
    output, gone = parent.output_ids, len(parent.prompt_ids) - at
    if not 0 < gone <= MAX_PREFIX or not at or not len(output) or parent.output_slots is not None:
        return None
    last = parent.prompt_ids[-1]
    for start in np.flatnonzero(prompt[at : at + 2 * MAX_PREFIX] == output[0]):
        touches = not start or prompt[at + start - 1] != last
        if touches and np.array_equal(prompt[at + start :][: len(output)], output):
            others = "1 other" if start == 1 else f"{start} others"
            return "response_prefix", f"{many(gone)} in front of the parent's output became {others}"
    return None


def _by_text(parent: Invocation, before: IDS, prompt: IDS, pieces: Pieces) -> Found:
    first, second = pieces.texts([before, prompt])
    first = first.rstrip("\ufffd")  # a character of which the last bytes are still to come
    texts = Texts(first, second, _common(first, second))
    if texts.same == len(first):
        return "retokenised", f"the texts are equal, up to {_shown(first[-SHOWN:])}"
    found = _json(texts) or _thinking(texts) or _spaces(texts, pieces)
    found = found or _controls(before, prompt, pieces) or _cut_left(texts) or _system(texts, pieces)
    if found is None and texts.same >= len(pieces.text(parent.prompt_ids)) and len(parent.output_ids):
        answer = _shown(texts.child[texts.same :])
        return "other_output", f"{answer} stands where the parent's output is: another attempt's, or of a lost call"
    return found


def _common(a: str, b: str) -> int:
    n = min(len(a), len(b))
    x, y = (np.frombuffer(t[:n].encode("utf-32-le", "surrogatepass"), np.uint32) for t in (a, b))
    differs = x != y
    return int(differs.argmax()) if differs.any() else n


def _json(texts: Texts) -> Found:
    for start in _json_starts(texts):
        first, second = _value(texts.parent, start, texts.same), _value(texts.child, start, texts.same)
        if first is None or second is None:
            continue
        if _same(first, second):
            return "reserialised", f"the JSON at character {start} has the same value in another writing"
        if _same(_decoded(first), _decoded(second)):
            return "double_encoded", f"the JSON at character {start} is inside a JSON string on one side"
    return None


def _json_starts(texts: Texts) -> Iterator[int]:
    """Where a JSON value that both texts hold may begin, nearest to the difference first."""
    yield texts.same
    at, floor = texts.same, max(0, texts.same - JSON_REACH)
    for _ in range(MAX_OBJECTS):
        at = max(texts.parent.rfind(c, floor, at) for c in "{[")
        if at < 0:
            return
        yield at


def _value(text: str, start: int, beyond: int) -> Any:
    """The JSON object, list or string at `start` if it reaches beyond the difference; `None` if there is none."""
    if text[start : start + 1] not in ("{", "[", '"'):
        return None
    try:
        value, stop = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value if stop > beyond else None


def _decoded(value: Any) -> Any:
    """What a JSON string holds, if that is JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _same(a: Any, b: Any) -> bool:
    """Whether two values are one JSON value; 1, 1.0 and true are three."""
    try:
        return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    except (ValueError, RecursionError):
        return False


def _thinking(texts: Texts) -> Found:
    (first, was), (second, now) = _apart(texts.parent), _apart(texts.child)
    if not second.startswith(first) or not (was or now):
        return None
    lost = sum(map(len, was)) - sum(map(len, now))
    if lost > 0:
        return "stripped_thinking", f"{lost} characters of reasoning are gone, the rest of the text is kept"
    return ("response_prefix", "an empty thinking block came or went") if len(was) != len(now) else None


def _apart(text: str) -> tuple[str, list[str]]:
    """The text without its closed thinking blocks, and what is in them; both without white space."""
    kept, thoughts, at = [], [], 0
    for mark in THINKING.finditer(text):
        if mark.start() < at:  # inside a block
            continue
        close = f"</{mark[1]}>" if mark[1] else "[/THINK]"
        stop = text.find(close, mark.end())
        if stop < 0:
            break
        kept.append(text[at : mark.start()])
        thoughts.append(_squeezed(text[mark.end() : stop]))
        at = stop + len(close)
    return _squeezed("".join([*kept, text[at:]])), thoughts


def _spaces(texts: Texts, pieces: Pieces) -> Found:
    if not _squeezed(texts.child).startswith(_squeezed(texts.parent)):
        return None
    marks = tuple(filter(None, (pieces.piece(i) for i in pieces.controls)))
    rest = max(texts.parent[texts.same :], texts.child[texts.same :], key=lambda t: len(t) - len(t.lstrip()))
    if marks and texts.parent[: texts.same].rstrip().endswith(marks) and rest.lstrip().startswith(marks):
        return "separator", f"the white space between two turns differs at character {texts.same}"
    return "whitespace", f"only white space differs, first in front of {_shown(rest.lstrip())}"


def _controls(before: IDS, prompt: IDS, pieces: Pieces) -> Found:
    first, second = (_squeezed(t) for t in pieces.texts([before, prompt], controls=False))
    if first and second.startswith(first):
        was, now = (int(np.isin(ids, pieces.controls).sum()) for ids in (before, prompt))
        return "controls", f"the texts agree but for control pieces: {was} in the parent, {now} in the prompt"
    return None


def _cut_left(texts: Texts) -> Found:
    head, start = texts.child[:HEAD], 0
    for _ in range(MAX_HEADS if head else 0):
        start = texts.parent.find(head, start + 1)
        if start < 0:
            break
        if texts.child.startswith(texts.parent[start:]):
            return "truncated_left", f"the first {start} characters of the parent's text are gone, the rest follows"
    return None


def _system(texts: Texts, pieces: Pieces) -> Found:
    start = texts.child.find(texts.parent[texts.same :], texts.same)
    new = texts.child[texts.same : start]
    if start < 0 or "system" not in new[:SHOWN].lower():
        return None
    head = texts.parent[: texts.same]
    for token in pieces.controls:
        head = head.replace(pieces.piece(token) or "\n", "")
    return None if head.strip() else ("system_inserted", f"{_shown(new)} stands in front of the parent's text")


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[: SHOWN - 1] + "…")
