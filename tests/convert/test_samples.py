"""Real logs of other projects: each converts as docs/samples.md tells, or is refused for a reason."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest
import sweep_samples
from helpers_convert import FIXTURES, LOGS, converted
from sweep_samples import LIST, Sample, page, strictest, sweep

from memopd_trace.convert.formats import find
from memopd_trace.convert.known import profile_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "samples.md"
SAMPLES = os.environ.get("MEMOPD_TRACE_SAMPLES")
needs_samples = pytest.mark.skipif(SAMPLES is None, reason="MEMOPD_TRACE_SAMPLES names no folder of sample logs")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """The samples, converted."""
    return sweep(Path(SAMPLES or "").resolve(), tmp_path_factory.mktemp("samples"))


@needs_samples
def test_every_file_converts_as_far_as_it_can_or_is_refused_for_a_reason(swept: list[Sample]) -> None:
    assert [(s.name, s.faults) for s in swept if s.faults] == []
    names = [name for s in swept for name in s.files]
    assert sorted(names) == sorted(
        f.relative_to(SAMPLES or "").as_posix()
        for f in Path(SAMPLES or "").rglob("*")
        if f.is_file() and f.name != LIST
    )
    assert Counter(s.made.trace is None for s in swept)[True] == len(sweep_samples.REFUSED)


@needs_samples
def test_the_page_is_what_a_fresh_run_says(swept: list[Sample]) -> None:
    assert page(swept) == PAGE.read_text(encoding="utf-8"), "make samples SAMPLES=FOLDER"


def test_the_page_names_no_place_of_a_machine() -> None:
    assert re.findall(r"(?<![\w.*])/\w+/", PAGE.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", sorted(set(LOGS)))
def test_the_gaps_of_every_format_tell_exactly_how_far_its_trace_reaches(
    tmp_path: Path, tokenizer: Path, name: str
) -> None:
    """The tests' own logs, too: no profile is kept that a gap forbids, and none is missed without one."""
    given = {"tokenizer": tokenizer} if find(name).exactness == "text" else {}  # others have ids of their own
    result, rows = converted(tmp_path, name, LOGS[name], logprob_kind="raw", **given)
    assert rows and result.trace is not None
    assert strictest(result.trace) == profile_of(result.losses) != "core"


def _folder(tmp_path: Path, name: str, data: bytes) -> Path:
    target = tmp_path / "samples" / "nemo_gym" / name
    target.parent.mkdir(parents=True)
    target.write_bytes(data)
    return tmp_path / "samples"


def test_the_sweep_tells_exact_ids_from_lost_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "nemo_gym/two.json"
    samples = _folder(tmp_path, "two.json", (FIXTURES / "nemo_gym_two_calls.json").read_bytes())
    monkeypatch.setitem(sweep_samples.EXACT_ROWS, name, 2)
    (tmp_path / "good").mkdir()
    (sample,) = sweep(samples, tmp_path / "good")
    assert sample.faults == [] and sample.clean == "lineage" and sample.sources["engine"] == 2
    assert "1 root, 1 rewrite strip_thinking (inferred)" in page([sample])

    monkeypatch.setitem(sweep_samples.EXACT_ROWS, name, 3)
    monkeypatch.setattr(sweep_samples, "_numbers_of", lambda file: [("prompt", b"1")])
    (tmp_path / "bad").mkdir()
    (sample,) = sweep(samples, tmp_path / "bad")
    assert sample.faults == ["1 lists of numbers are lost, 6 are new", "2 exact rows, expected 3"]


def test_the_sweep_does_not_pass_over_a_refusal(tmp_path: Path) -> None:
    samples = _folder(tmp_path, "other.jsonl", b'{"foo": 1}\n')
    (tmp_path / "scratch").mkdir()
    (sample,) = sweep(samples, tmp_path / "scratch")
    (fault,) = sample.faults
    assert fault.startswith("exit code 3: neither a rollout")
