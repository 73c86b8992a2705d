"""What `memopd_trace.testing` draws is valid, and shows what it says."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers_testing import sample, trace_sample
from hypothesis import HealthCheck, assume, event, given, settings

from memopd_trace import testing, validate, write
from memopd_trace.errors import UsageError
from memopd_trace.rules.registry import PROFILES
from memopd_trace.schema import RELATIONS, REWRITE_KINDS
from memopd_trace.testing import KINDS, MUTATIONS, STEPS, TRAITS, declared, episodes, metadata, traces, traits
from memopd_trace.testing.mutation import table_of

HOLDS = {"core": ["core"], "lineage": ["core", "lineage"], "policy": ["core", "policy"], "train": list(PROFILES)}
WORDS = {*RELATIONS, *REWRITE_KINDS, "x_"}
MORE = {"reencode": {"reserialise"}, "opaque": {"x_"}}  # kinds that are drawn under two words
UNDER_CORE_ONLY = {"bare", "retokenized"}
COMMON = {"max_examples": 12, "deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def check(trace: Any, profile: str, folder: Path) -> None:
    """No finding, not even a warning, under every profile that the trace claims."""
    for trait in traits(*trace):
        event(trait)
    write(folder / "t.arrow", *trace, overwrite=True)
    for held in HOLDS[profile]:
        report = validate(folder / "t.arrow", held)
        assert report.clean, report.to_text()


@pytest.mark.parametrize("profile", PROFILES)
def test_a_generated_trace_never_raises_a_finding(profile: str, tmp_path: Path) -> None:
    @given(traces(profile))
    @settings(**COMMON)
    def holds(trace: Any) -> None:
        check(trace, profile, tmp_path)

    holds()


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_not_one_of_thousands_of_generated_traces_raises_a_finding(profile: str, tmp_path: Path) -> None:
    @given(traces(profile, max_episodes=4, max_calls=8))
    @settings(**COMMON | {"max_examples": 3000})
    def holds(trace: Any) -> None:
        check(trace, profile, tmp_path)

    holds()


def test_every_trait_is_generated_all_kinds_together() -> None:
    train, core = ({word for t in trace_sample(profile) for word in traits(*t)} for profile in ("train", "core"))
    assert train | core >= set(TRAITS)
    assert not train & UNDER_CORE_ONLY


def test_every_relation_and_rewrite_has_a_step() -> None:
    assert {*STEPS, "root", "rewrite", "reserialise"} == {*RELATIONS, *REWRITE_KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_asked_for_is_drawn_and_nothing_else(kind: str) -> None:
    """A rewrite that happens to be none becomes `opaque`, the only step that may come unasked."""
    wanted = {kind} | MORE.get(kind, set())
    examples = sample(traces(kinds=(kind,)), 16)
    shown = {word for trace in examples for word in traits(*trace) & {*KINDS, *WORDS}}
    assert wanted <= shown
    assert shown - wanted <= {"root", "rewrite", "opaque"}
    if kind not in STEPS:
        assert all(row.invocation_index == 0 for _, rows in examples for row in rows), "no step, no second call"


def test_episodes_of_given_metadata_stand_in_one_file(tmp_path: Path) -> None:
    (meta,) = sample(metadata(("models",)), 1)
    first, second = (sample(episodes(meta, kinds=("fork", "eviction"), episode_id=name), 3)[-1] for name in "ab")
    rows = [*first, *second]
    write(tmp_path / "t.parquet", declared(meta, rows), rows)
    report = validate(tmp_path / "t.parquet", "train")
    assert report.clean and report.traces[0].episodes == 2, report.to_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"kinds": ("forks",)}, "no kind 'forks'"),
        ({"kinds": "forks"}, "no kind 'forks'"),
        ({"profile": "all"}, "no profile 'all'"),
        ({"max_calls": 0}, "0"),
    ],
)
def test_what_there_is_not_is_refused_by_name(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        sample(traces(**arguments), 1)


def test_the_examples_run_as_they_stand(tmp_path: Path) -> None:
    """With a writer, a reader and checks that are another project's own: plain pyarrow."""
    text = testing.__doc__ or ""
    block = text[text.index("    @given") : text.index("`KINDS`")]
    names: dict[str, Any] = {
        **vars(testing),
        **{"given": given, "settings": settings, "pytest": pytest, "tempfile": tempfile, "Path": Path},
    }
    names |= {
        "assume": assume,
        "validate": validate,
        "write": write,
        "our_codes": lambda path: validate(path, "train").codes,
    }
    names["our_prompts"] = lambda path: pq.read_table(path).column("prompt_ids").to_pylist()

    def our_writer(metadata: Any, invocations: Any, folder: Path = tmp_path) -> Path:
        pq.write_table(table_of(metadata, invocations), folder / "ours.parquet")
        return folder / "ours.parquet"

    ours = names | {"our_writer": our_writer}
    exec(textwrap.dedent(block), ours)
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = [b for b in readme.split("```python\n")[1:] if b.startswith("from hypothesis")]
    exec(block.split("```")[0], others := {"our_writer": our_writer})
    few = settings(max_examples=4, deadline=None)
    few(ours["test_what_we_write_is_valid"])(our_folder=tmp_path)
    few(ours["test_we_read_every_trace"])(our_folder=tmp_path)
    ours["test_we_find_what_is_broken"](mutation=MUTATIONS[0])
    few(others["test_what_we_write_is_valid"])()


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_package_itself_does_not_import_hypothesis() -> None:
    assert python("import sys, memopd_trace, memopd_trace.cli; print('hypothesis' in sys.modules)") == "False"


def test_without_the_extra_its_name_is_told() -> None:
    code = """
import sys
from memopd_trace.errors import MissingExtraError
sys.modules["hypothesis"] = None
try:
    import memopd_trace.testing
except MissingExtraError as error:
    print(error)
"""
    assert python(code) == "memopd_trace.testing needs 'hypothesis' (pip install 'memopd-trace[testing]')"
