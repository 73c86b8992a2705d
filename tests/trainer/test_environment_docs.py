"""docs/environments.md and docs/loop.md: the environment of one's own runs, and the loop's configuration is one."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import yaml
from helpers_models import STOP, tiny_tokenizer
from helpers_scorer import tiny_model

from memopd_trace import Invocation, Sampling, read, validate
from memopd_trainer.environments import Outcome
from memopd_trainer.environments.suites import open_suite, qa_suite
from memopd_trainer.loop_config import parse_loop_config
from memopd_trainer.rollout import collect

DOCS = Path(__file__).parents[2] / "docs"
TOKENIZER = tiny_tokenizer()


def example(name: str, language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    return str(code)


def own() -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "your_module"}
    exec(compile(example("environments.md", "python"), "environments.md", "exec", dont_inherit=True), scope)
    return scope


def test_the_environment_of_ones_own_is_short_and_its_rollouts_validate(tmp_path: Path) -> None:
    scope = own()
    lines = (
        example("environments.md", "python").split("class Guessing")[1].split("def guessing")[0].strip().splitlines()
    )
    assert len(lines) <= 30
    suite = scope["guessing"](TOKENIZER, turns=2)
    collect(
        tiny_model(vocab_size=len(TOKENIZER)),
        TOKENIZER,
        suite.make_environment,
        suite.tasks[:3],
        out_path=tmp_path / "t.parquet",
        rollouts_per_task=2,
        sampling=Sampling(temperature=1.0),
        max_new_tokens=5,
    )
    report = validate(tmp_path / "t.parquet", "train")
    assert report.clean, report.to_text()
    episodes = list(read(tmp_path / "t.parquet").iter_episodes())
    assert len(episodes) == 6 and all(1 <= len(e) <= 2 for e in episodes)


def test_it_tells_higher_from_lower_and_keeps_the_last_guess_alone() -> None:
    environment = own()["Guessing"](TOKENIZER)
    turn = environment.reset(own()["Secret"]("s", 4))
    told = []
    for index, guess in enumerate("784"):
        said = TOKENIZER(f"I say {guess}", add_special_tokens=False)["input_ids"]
        row = Invocation(
            episode_id="e",
            invocation_index=index,
            model_id="m",
            prompt_ids=turn.prompt.ids,
            output_ids=[*said, STOP],
            segments=turn.prompt.segments,
            finish_reason="stop",
        )
        turn = environment.step(row)
        if not isinstance(turn, Outcome):
            told.append(TOKENIZER.decode(turn.prompt.ids.tolist()))
    assert isinstance(turn, Outcome) and turn.reward == 1.0 and not turn.truncated
    start = "Guess a number from 0 to 9:"
    assert told == [f"{start}I say 7 lower:", f"{start}I say 8 lower:"]


def test_the_configuration_of_a_loop_is_one() -> None:
    config = parse_loop_config(yaml.safe_load(example("loop.md", "yaml")))
    assert config.has_scores and config.on_bad == "quarantine"
    assert len(open_suite(config.rollouts.environment, TOKENIZER, config.rollouts.options).tasks) >= 8


def test_the_defaults_that_the_docs_name_are_those_of_the_code() -> None:
    text = (DOCS / "environments.md").read_text()
    for name, parameter in inspect.signature(qa_suite).parameters.items():
        if name != "tokenizer":
            shown = "null" if parameter.default is None else parameter.default
            assert f"`{name}: {shown}`" in text, name
