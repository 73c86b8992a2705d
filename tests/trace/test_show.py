"""The picture of an episode and of one invocation: what it draws is so, and what a trace says is only text in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_look import METADATA, Rows, row, save
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel

from memopd_trace import Episode, Invocation, Media, Sampling, Segment, read
from memopd_trace.errors import UsageError
from memopd_trace.look.lineage_tree import FORK, LINE, ROOT, ROW, graph, nodes, tree_lines
from memopd_trace.look.show import count_episodes, find_episode, find_invocation, only_episode, page
from memopd_trace.pieces import Pieces, load_pieces

HOSTILE = "[bold]e\x1b[2J\r\x9b\u202e0:smile:"
SHOWN = "[bold]e\\x1b[2J\\r\\x9b\\u202e0:smile:"


def tree(rows: Rows) -> list[str]:
    return [line.plain for line in tree_lines(Episode(rows[0].episode_id, tuple(rows)))]


def look(rows: Rows, index: int, pieces: Pieces | None = None, **options: Any) -> str:
    episode = Episode(rows[0].episode_id, tuple(rows))
    lines = page(episode, find_invocation(episode, index), METADATA, pieces, **options)
    return "\n".join(line.plain for line in lines)


def parents_of(drawing: list[str]) -> list[int | None]:
    """Read a drawing as a person does: down the lanes and along the joining lines."""
    owner: dict[int, int] = {}  # the last row in each lane
    found: list[int | None] = []
    for number, line in enumerate(drawing):
        (lane,) = (k for k, mark in enumerate(line) if mark in (ROOT, ROW))
        assert lane % 2 == 0
        joined = [k for k in range(lane) if line[k] == FORK]
        if line[lane] == ROOT:
            assert not joined
            found.append(None)
        elif joined:
            assert len(joined) == 1 and set(line[joined[0] + 1 : lane]) <= set("─┼")
            found.append(owner[joined[0]])
        else:
            found.append(owner[lane])
        owner[lane] = number
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=14))
def test_a_drawing_can_be_read_back(backs: list[int]) -> None:
    parents = [row - back if 0 < back <= row else None for row, back in enumerate(backs)]
    assert parents_of(graph(parents)) == parents


def test_the_drawing_of_a_fork() -> None:
    drawn = graph([None, 0, 1, 1, 2, 1, None])
    assert drawn == ["○", "●", "├─●", "├─┼─●", "│ ●", "●", "○"]
    assert LINE in "".join(drawn)


def run() -> Rows:
    return [
        row("e", 0, [5, 6], [7, 2], relation="root", group_id="g", reward=0.25, finish_reason="stop"),
        row("e", 1, [5, 6, 7, 2, 8], [9, 2], relation="extend", parent_index=0),
        row("e", 2, [5, 6, 8, 7], [2], relation="rewrite", rewrite_kind="memory", parent_index=1, terminated=True),
        row("e", 3, [5, 9], [2], relation="extend", parent_index=1, accepted=False),
        row("e", 4, [5], [2], parent_index=9),
    ]


def test_a_line_tells_what_was_kept_lost_and_new() -> None:
    heading, header, *lines = tree(run())
    assert heading == "episode 'e'  group 'g', 5 invocations, return 0.25"
    columns = "relation from prompt output shared lost new trained reward finish"
    assert header.split() == columns.split()
    root, extend, rewrite, broken, orphan = (line.split() for line in lines)
    assert root == ["○", "0", "root", "2", "2", "2", "0.25", "stop"]
    assert extend == ["●", "1", "extend", "0", "5", "2", "4", "0", "1", "2"]
    assert rewrite == ["├─●", "2", "rewrite:memory", "1", "4", "1", "2", "5", "2", "1"]
    assert broken[:9] == ["●", "3", "extend", "1", "2", "1", "1", "6", "1"]
    assert lines[3].endswith("0                  rejected; does not extend 1: id 1 differs")
    assert lines[4].endswith("its parent 9 is no earlier row") and orphan[:3] == ["○", "4", "9"]


def test_columns_stand_below_each_other() -> None:
    _, header, *lines = tree(run())
    place = header.index("prompt") + len("prompt")
    assert [line[:place].split()[-1] for line in lines] == ["2", "5", "4", "2", "1"]


def test_an_extension_in_another_state_is_noted() -> None:
    rows = run()[:2]
    moved = rows[1].replace(position_ids=[0, 1, 2, 4, 5, 6, 7])
    assert tree([rows[0], moved])[-1].endswith("does not extend 0: position_ids differs")
    assert "does not" not in "".join(tree(rows))


def test_shared_counts_are_those_of_a_plain_comparison() -> None:
    rng = np.random.default_rng(0)
    rows = [row("e", 0, [1], [1])]
    for index in range(1, 60):
        rows.append(row("e", index, rng.integers(0, 2, 5), rng.integers(0, 2, 2), parent_index=rng.integers(0, index)))
    kept = 0
    for node in nodes(Episode("e", tuple(rows)))[1:]:
        assert node.above is not None
        parent = [*rows[node.above].prompt_ids, *rows[node.above].output_ids]
        prompt = list(node.invocation.prompt_ids)
        same = 0
        while same < min(len(parent), len(prompt)) and parent[same] == prompt[same]:
            same += 1
        kept += same
        assert (node.shared, node.lost, node.new) == (same, len(parent) - same, len(prompt) - same)
    assert kept > 30, "prefixes met"


def test_an_invocation_is_told_with_its_segments_and_its_parent() -> None:
    first = row("e", 0, [5, 6, 7], [8, 9, 2], relation="root")
    second = row(
        "e",
        1,
        [5, 6, 8, 9, 40],
        [10, 2],
        relation="rewrite",
        rewrite_kind="memory",
        rewrite_evidence="explicit",
        parent_index=0,
        segments=(Segment(0, 2, "task", 0, 0), Segment(2, 4, "memory", 0, 3), Segment(4, 6, "thought")),
        output_logprobs=[-0.25, None],
        logprob_kind="raw",
        output_sampled=[True, False],
        output_policy_versions=[3, 4],
        sampling=Sampling(temperature=0.5, top_k=3),
        rewards={"f1": 0.5},
    )
    text = look([first, second], 1)
    assert text.startswith("episode 'e', invocation 1\n")
    for line in (
        "relation         rewrite (memory, explicit) of 0",
        "tokens           prompt 5, output 2 (1 sampled, 1 trained)",
        "sampling         temperature 0.5, top_k 3",
        "rewards          f1 0.5",
        "ids              2 in common, 4 lost, 3 new",
        "[0:2] task  copy of 0[0:2]\n  │ 5 6\n",
        "[2:4] memory  copy of 0[3:5]\n  │ 8 9\n",
        "[4:5] thought\n  │ 40\n",
        "output, 2 tokens\n  [5:6] thought\n  │ 10\n  [6:7] no segment\n  │ 2\n",
        "sampled tokens  index, id, log-probability (raw, nats)\n      0      10   -0.2500  version 3\n",
        "      1       2      null  forced, not trained, version 4",
    ):
        assert line in text, line
    assert "explicit state" not in text


def test_what_breaks_an_extension_is_explained() -> None:
    first = row("e", 0, list(range(10, 30)), [30, 2], relation="root")
    cut = row("e", 1, [*range(15, 31), 2, 31], [2], relation="extend", parent_index=0)
    assert "truncated_left: the parent's first 5 ids are gone, the rest follows" in look([first, cut], 1)
    kept = row("e", 1, [*range(10, 31), 2, 31], [2], relation="extend", parent_index=0)
    assert "state            continues the parent's" in look([first, kept], 1)
    later = kept.replace(visible_from=[*range(9), 8, *range(10, 24)])
    assert "state            visible_from differs in what they share" in look([first, later], 1)


def test_explicit_positions_visibility_slots_and_media_are_told_in_stretches() -> None:
    explicit = row(
        "e",
        0,
        [5, 60, 60, 6, 7],
        [8, 2],
        position_ids=[0, 1, 2, 5, 6, 7, 9],
        visible_until=[7, 5, 5, 7, 7, 7, 7],
        visible_from=[0, 1, 1, 3, 4, 5, 6],
        media=(Media(1, 3, b"\xab" * 32, "image/png", HOSTILE),),
    )
    text = look([explicit], 0)
    for line in (
        "tokens 0 to 2 at positions 0 to 2\n  tokens 3 to 5 at positions 5 to 7\n  token 6 at position 9\n",
        "  keys 1 to 2 seen by queries before 5\n",
        "  key 2 seen from query 1\n",
        f"  tokens 1 to 2: content abababababababab… image/png {SHOWN}\n",
    ):
        assert line in text, line
    in_place = row("e", 0, [5, 99, 99], [8, 9], output_slots=[2, 1])
    assert "      0       8      null  slot 2\n      1       9      null  slot 1" in look([in_place], 0)


def test_a_wrong_digest_is_named() -> None:
    assert "is not that of this state" in look([row("e", 0, [5], state_digest=b"x" * 32)], 0)
    right = row("e", 0, [5])
    assert "digest" in (text := look([right.replace(state_digest=right.compute_digest())], 0))
    assert "is not" not in text and "not recorded)" not in text


def test_long_stretches_are_cut_in_the_middle_unless_all_is_asked_for() -> None:
    long = row("e", 0, list(range(90)) * 10, list(range(80)))
    text, everything = look([long], 0), look([long], 0, full=True)
    assert "… 836 tokens …" in text and text.count("… 16 tokens …") == 2
    assert "…" not in everything.replace("… (not recorded)", "")
    assert len(text) < len(everything) / 2
    numbers = everything.split("prompt, 900 tokens")[1].split("\n")[2].removeprefix("  │ ")
    assert [int(n) for n in numbers.split()] == list(range(90)) * 10


def test_arrays_that_do_not_fit_do_no_harm() -> None:
    odd = {"output_logprobs": [-1.0], "output_loss_mask": [True], "visible_until": [9], "position_ids": [4]}
    rows = [row("e", 0, [5], [6, 2], **odd), row("e", 1, [5, 6], [2], parent_index=0, relation="extend", **odd)]
    longer = rows[1].replace(prompt_ids=[5, 6, 2])
    assert "      1       2      null  not trained" in look(rows, 0)
    assert "state            visible_until differs in what they share" in look([rows[0], longer], 1)
    assert len(tree(rows)) == 4


@pytest.fixture
def toy(tmp_path: Path) -> Pieces:
    """Words 0 to 99, of which a few are hostile."""
    words = {f"w{i}": i for i in range(100)}
    hostile = {5: "\x1b[31mred", 6: "[red]markup[/red]", 7: "line\nsampled tokens", 8: "\u202etfel"}
    for token, word in hostile.items():
        words.pop(f"w{token}")
        words[word] = token
    RawTokenizer(WordLevel(words, "w0")).save(str(tmp_path / "tokenizer.json"))
    return load_pieces(tmp_path)


def test_a_tokenizer_gives_text_which_stays_text(toy: Pieces) -> None:
    segments = (Segment(0, 4, "task"), Segment(4, 5, HOSTILE))
    text = look([row("e", 0, [5, 6, 7, 8, 9], [10, 5], segments=segments)], 0, toy)
    assert "[0:4] task\n  │ \\x1b[31mred [red]markup[/red] line\n  │ sampled tokens \\u202etfel\n" in text
    assert text.count("\nsampled tokens") == 1, "a line of the trace stands behind a margin"
    assert f"[4:5] {SHOWN}\n  │ w9\n" in text
    assert "      0      10      null  'w10'" in text and "'\\x1b[31mred'" in text


def test_a_traces_strings_are_escaped_everywhere() -> None:
    names = ("model_id", "relation", "rewrite_kind", "rewrite_evidence", "finish_reason", "group_id", "agent_id")
    hostile: dict[str, Any] = dict.fromkeys(names, HOSTILE)
    rows: list[Invocation] = [
        row(HOSTILE, 0, [5], **hostile, task_id=HOSTILE, rewards={HOSTILE: 1.0}, extra={HOSTILE: HOSTILE, "k": None})
    ]
    for text in ("\n".join(tree(rows)), look(rows, 0)):
        assert SHOWN in text
        assert not {c for c in text if not c.isprintable() and c != "\n"}


def test_choosing(tmp_path: Path) -> None:
    path = save(tmp_path / "t.parquet", [row("e", 0, [5]), row("e", 1, [5]), row(HOSTILE, 0, [5])])
    reader = read(path)
    assert count_episodes(reader) == 2
    assert len(find_episode(reader, "e")) == 2
    assert find_episode(reader, SHOWN).episode_id == HOSTILE, "an id can be given as it is printed"
    with pytest.raises(UsageError, match=r"several episodes.*--episode 'e'"):
        only_episode(reader)
    with pytest.raises(UsageError, match="no invocation 7 .it has 0 to 1"):
        find_invocation(find_episode(reader, "e"), 7)
    with pytest.raises(UsageError, match="holds no rows"):
        only_episode(read(save(tmp_path / "empty.parquet", [])))
