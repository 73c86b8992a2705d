"""Several questions, one memory: solvable by who remembers, lost by who forgets; exact ids in every prompt."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_models import STOP, tiny_tokenizer
from helpers_scorer import tiny_model

from memopd_trace import Invocation, Sampling, read, validate
from memopd_trace.errors import UsageError
from memopd_trainer.environments import Outcome, Turn
from memopd_trainer.environments.knowledge import make_knowledge
from memopd_trainer.environments.multi_objective_qa import QaEnvironment, QaTask, between, qa_tasks
from memopd_trainer.environments.search import Search
from memopd_trainer.rollout import collect

TOKENIZER = tiny_tokenizer()
KNOWLEDGE = make_knowledge(seed=3)
SEARCH = Search(KNOWLEDGE.documents)
BUDGET = 200  # tokens of a tokenizer that knows hardly a word, so about as many letters
Policy = Callable[[str], str]


def play(task: QaTask, policy: Policy, budget: int = BUDGET, **more: Any) -> tuple[list[Invocation], Outcome]:
    """An episode of a policy that sees a prompt's text and nothing else."""
    environment = QaEnvironment(TOKENIZER, SEARCH, memory_tokens=budget, **more)
    turn: Turn | Outcome = environment.reset(task)
    rows: list[Invocation] = []
    while isinstance(turn, Turn):
        said = TOKENIZER(policy(TOKENIZER.decode(turn.prompt.ids.tolist())), add_special_tokens=False)["input_ids"]
        rows.append(
            Invocation(
                episode_id="e",
                invocation_index=len(rows),
                model_id="m",
                prompt_ids=turn.prompt.ids,
                output_ids=[*said, STOP],
                segments=turn.prompt.segments,
                finish_reason="stop",
            )
        )
        turn = environment.step(rows[-1])
    return rows, turn


def searching(remember: Callable[[list[str], str, int], list[str]]) -> Policy:
    """Looks up one thing a turn, by what its prompt shows. Its memory is a name for each question, the furthest it has
    come; `remember(names, text found, question at hand)` makes the next one."""

    def policy(prompt: str) -> str:
        user = prompt.split("<|start|>user\n")[1]
        paths = [
            ([*reversed(asked.split(" of the ")[:-1])], asked.split("the ship ")[1])
            for asked in re.findall(r"\d+\. What is the (.*)\?", user)
        ]
        names = (between(user, "<think>", "</think>") or "; ".join(f"0 {ship}" for _, ship in paths)).split("; ")
        names += ["?"] * (len(paths) - len(names))
        query, found = between(user, "<search>", "</search>"), between(user, "<information>", "</information>")
        at = next((n for n, (path, _) in enumerate(paths) if not names[n].startswith((str(len(path)), "?"))), 0)
        if query and found:
            told = re.search(rf"The {query} is (\w+)\.", found)
            names[at] = f"{int(names[at][0]) + 1} {told[1]}" if told and names[at][0].isdigit() else names[at]
            names = remember(names, found, at)
        memory = f"<think>{'; '.join(names)}</think>"
        for n, (path, _) in enumerate(paths):
            step = names[n].split()[0]
            if step.isdigit() and int(step) < len(path):
                return f"{memory}<search>{path[int(step)]} of {names[n].split()[1]}</search>"
        return f"{memory}<answer>{'; '.join(name.split()[-1] for name in names)}</answer>"

    return policy


CAREFUL = searching(lambda names, found, at: names)
FORGETFUL = searching(lambda names, found, at: [name if n >= at else "?" for n, name in enumerate(names)])
HOARDER = searching(lambda names, found, at: [f"{name} {found}" if n == at else name for n, name in enumerate(names)])


@pytest.mark.parametrize(("objectives", "hops"), [(1, 1), (2, 2), (4, 2), (8, 2), (16, 1), (2, 4)])
def test_who_remembers_solves_it_within_budget_and_turns(objectives: int, hops: int) -> None:
    for task in qa_tasks(KNOWLEDGE, 2, objectives=objectives, hops=hops, seed=objectives):
        rows, outcome = play(task, CAREFUL)
        assert outcome.reward == 1.0 and outcome.rewards == {"f1": 1.0, "exact_match": 1.0}
        assert not outcome.truncated and len(rows) == objectives * hops + 1


@pytest.mark.parametrize("objectives", [2, 4, 8])
def test_who_forgets_what_was_answered_before_keeps_one_answer_in_n(objectives: int) -> None:
    for task in qa_tasks(KNOWLEDGE, 3, objectives=objectives, seed=1):
        _, outcome = play(task, FORGETFUL)
        assert outcome.rewards["exact_match"] == pytest.approx(1 / objectives)


def test_who_hoards_the_texts_loses_what_the_budget_cuts() -> None:
    losses = []
    for task in qa_tasks(KNOWLEDGE, 5, objectives=8, seed=2):
        _, outcome = play(task, HOARDER, max_turns=40)
        losses.append(1 - outcome.rewards["exact_match"])
        _, roomy = play(task, CAREFUL, budget=40)
        assert roomy.rewards["exact_match"] < 1, "and a careful memory needs its budget, too"
    assert np.mean(losses) > 0.4


def test_nobody_answers_by_guessing_or_by_asking_everything_at_once() -> None:
    answers = [c.answer for c in KNOWLEDGE.questions("train", 2)]
    assert len(set(answers)) == len(answers) == 48, "no answer is likelier than another"
    chain = KNOWLEDGE.questions("train", 2)[0]
    assert not any(chain.answer in text for text in SEARCH.best(chain.question, 1)), (
        "a question does not find its answer"
    )
    assert " is an inn." in SEARCH.best(chain.subject, 1)[0], "a name alone finds its namesake"
    (text,) = SEARCH.best(f"captain of {chain.subject}", 1)
    assert f"The captain of {chain.subject} is {chain.values[0]}." in text
    assert len(re.findall(r"The \w+ of", text)) == 3, "with two things beside it"


def test_a_knowledge_base_follows_from_its_seed_and_its_splits_share_no_question() -> None:
    assert make_knowledge(3) == KNOWLEDGE != make_knowledge(4)
    train, held_out = KNOWLEDGE.questions("train", 2), KNOWLEDGE.questions("held_out", 2)
    assert (len(train), len(held_out)) == (48, 16)
    assert not {c.subject for c in train} & {c.subject for c in held_out}
    assert qa_tasks(KNOWLEDGE, 3, seed=1) == qa_tasks(KNOWLEDGE, 3, seed=1) != qa_tasks(KNOWLEDGE, 3, seed=2)
    assert train[0].question == f"What is the home town of the captain of the ship {train[0].subject}?"


def parts(row: Invocation, kind: str) -> list[list[int]]:
    return [row.prompt_ids[s.start : s.stop].tolist() for s in row.segments or () if s.kind == kind]


def test_each_prompt_holds_questions_last_memory_last_search_and_last_text_and_nothing_else() -> None:
    (task,) = qa_tasks(KNOWLEDGE, 1, objectives=2)
    rows, _ = play(task, CAREFUL)
    for before, row in itertools.pairwise(rows):
        said = before.output_ids.tolist()[:-1]
        (memory,), (action,) = parts(row, "memory"), parts(row, "action")
        assert memory + action == said, "id for id what was sampled, without the stop id"
        assert TOKENIZER.decode(memory).endswith("</think>") and "<think>" not in TOKENIZER.decode(action)
        (seen,) = parts(row, "observation")
        found = SEARCH.best(between(TOKENIZER.decode(action), "<search>", "</search>") or "", 1)
        assert [TOKENIZER.decode(seen)] == found
        assert TOKENIZER.decode(row.prompt_ids.tolist()).count("<information>") == 1
        shared = parts(row, "system") + parts(row, "task")
        assert shared == parts(rows[0], "system") + parts(rows[0], "task")


def test_a_memory_over_budget_is_cut_where_the_budget_ends_and_closed() -> None:
    (task,) = qa_tasks(KNOWLEDGE, 1, objectives=2)
    rows, _ = play(task, lambda prompt: f"<think>{'remember ' * 30}</think><search>nothing at all</search>", budget=9)
    for before, row in itertools.pairwise(rows):
        assert parts(row, "memory") == [before.output_ids.tolist()[:9]]
        user = TOKENIZER.decode(row.prompt_ids.tolist()).split("<|start|>user\n")[1]
        assert between(user, "<think>", "</think>") in "remember remember"
        assert user.count("</think>") == 1


@pytest.mark.parametrize(
    ("said", "f1", "exact"),
    [
        ("a; b", 0.0, 0.0),
        ("{0}; {1}", 1.0, 1.0),
        ("{1}; {0}", 0.0, 0.0),
        ("{0}", 0.5, 0.5),
        ("the {0} x; {1}; c", 5 / 6, 0.5),
    ],
)
def test_answers_are_judged_in_order_and_missing_ones_count_nothing(said: str, f1: float, exact: float) -> None:
    (task,) = qa_tasks(KNOWLEDGE, 1, objectives=2)
    text = f"<answer>{said.format(*(c.answer for c in task.chains))}</answer>"
    _, outcome = play(task, lambda prompt: text)
    assert outcome.rewards == {"f1": pytest.approx(f1), "exact_match": pytest.approx(exact)}
    assert outcome.reward == outcome.rewards["f1"]
    assert play(task, lambda prompt: text, reward="exact_match")[1].reward == exact


def test_a_turn_without_an_action_is_told_so_and_turns_run_out() -> None:
    (task,) = qa_tasks(KNOWLEDGE, 1, objectives=2)
    rows, outcome = play(task, lambda prompt: "hm")
    assert len(rows) == 2 * 2 + 3 and outcome.truncated and outcome.reward == 0.0
    user = [TOKENIZER.decode(r.prompt_ids.tolist()) for r in rows]
    assert "neither a search nor an answer" in user[1] and "Turns left: 7" in user[0] and "Turns left: 1" in user[-1]
    assert "Nothing was found." in TOKENIZER.decode(
        play(task, lambda prompt: "<search>zzz</search>")[0][1].prompt_ids.tolist()
    )


def test_a_tag_within_a_thought_is_no_action() -> None:
    (task,) = qa_tasks(KNOWLEDGE, 1, objectives=2)
    said = "<think>I could <answer>guess</answer></think><search>" + task.chains[0].subject + "</search>"
    rows, outcome = play(task, lambda prompt: said)
    assert outcome.truncated and len(rows) == 7
    assert TOKENIZER.decode(parts(rows[1], "memory")[0]).endswith("</answer></think>")


def test_limits_are_refused_by_name() -> None:
    for objectives in (0, 17):
        with pytest.raises(UsageError, match=f"{objectives} objectives"):
            qa_tasks(KNOWLEDGE, 1, objectives=objectives)
    with pytest.raises(UsageError, match="5 hops"):
        qa_tasks(KNOWLEDGE, 1, hops=5)
    with pytest.raises(UsageError, match="no split 'test'"):
        KNOWLEDGE.questions("test", 2)  # type: ignore[arg-type]
    for more, message in (({"memory_tokens": 0}, "memory_tokens is 0"), ({"reward": "bleu"}, "no reward 'bleu'")):
        with pytest.raises(UsageError, match=message):
            QaEnvironment(TOKENIZER, SEARCH, **more)  # type: ignore[arg-type]
    for ships in (3, 1000):
        with pytest.raises(UsageError, match="ships"):
            make_knowledge(ships=ships)


def test_rollouts_of_it_validate_under_train(tmp_path: Path) -> None:
    model = tiny_model(vocab_size=len(TOKENIZER))
    model.config.max_position_embeddings = 2048
    collect(
        model,
        TOKENIZER,
        lambda: QaEnvironment(TOKENIZER, SEARCH, memory_tokens=8, max_turns=3),
        qa_tasks(KNOWLEDGE, 1, objectives=2),
        out_path=tmp_path / "t.parquet",
        rollouts_per_task=2,
        sampling=Sampling(temperature=1.0),
        max_new_tokens=12,
    )
    report = validate(tmp_path / "t.parquet", "train")
    assert report.clean, report.to_text()
    rows = list(read(tmp_path / "t.parquet").iter_invocations())
    assert [r.rewrite_kind for r in rows] == [None, "memory", "memory"] * 2 and rows[-1].truncated
