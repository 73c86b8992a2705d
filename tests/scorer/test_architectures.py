"""docs/architectures.md says what the installed Transformers' architectures do here, and its check can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sweep_architectures as sweep
import transformers
from helpers_architectures import OTHER_MEANINGS, TYPES, VARIANTS, kinds_in_code, kinds_of_layers, tiny_config
from transformers import CONFIG_MAPPING

from memopd_scorer.probing import Capability

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
SAMPLE = (
    "llama",
    "gemma3_text",
    "gpt_oss",
    "lfm2",
    "deepseek_v3",
    "mamba",
    "bloom",
    "bert",
    "bert, decoder",
    "phi3, longrope",
)


def table() -> dict[str, tuple[str, str]]:
    """name -> (class, verdict), as the page has it."""
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)` \| ([a-zA-Z ]+) \|", PAGE.read_text(), re.MULTILINE)
    return {name: (model_class, verdict) for name, model_class, verdict in rows}


def need_its_version() -> None:
    if f"Transformers {transformers.__version__} " not in PAGE.read_text():
        pytest.skip(f"the page was made with another version than {transformers.__version__}")


def test_the_page_names_every_type_and_no_type_is_silent() -> None:
    need_its_version()
    assert table().keys() == {*TYPES, *VARIANTS}
    verdicts = [verdict for _, verdict in table().values()]
    assert set(verdicts) <= {"exact", "alone", "refused", "not built"}
    assert verdicts.count("exact") > 80 and verdicts.count("not built") < 20


def test_the_tiny_models_have_every_kind_of_layer_that_a_model_of_the_type_may_have() -> None:
    """A default LFM2 has none of the convolutions that make real ones run alone."""
    need_its_version()
    missing: dict[str, set[str]] = {}
    for name in (n for n in TYPES if table()[n][1] != "not built"):
        tiny, default = tiny_config(name), CONFIG_MAPPING[name]()
        decoder = tiny.get_text_config(decoder=True).model_type
        covered = kinds_of_layers(tiny).union(
            *(kinds_of_layers(tiny_config(kind, **o)) for kind, o in VARIANTS.values() if kind in (name, decoder))
        )
        known = kinds_in_code(tiny) - set(OTHER_MEANINGS.get(name, ())) | kinds_of_layers(default)
        if known - covered:
            missing[name] = known - covered
    assert not missing
    assert kinds_in_code(CONFIG_MAPPING["lfm2"]()) - kinds_of_layers(CONFIG_MAPPING["lfm2"]()) == {"conv"}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_the_page_is_as_it_says(name: str) -> None:
    need_its_version()
    row = sweep.guarded(name)
    assert (row.model_class, row.verdict) == table()[name], row


@pytest.mark.slow
def test_the_whole_page_is_as_it_says() -> None:
    need_its_version()
    rows = [sweep.guarded(name) for name in [*VARIANTS, *TYPES]]
    assert {r.name: (r.model_class, r.verdict) for r in rows} == table()


def test_the_check_finds_what_a_blind_probe_lets_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "probe", lambda *_: Capability("tree", "blind", 0.0, 1.0))
    row = sweep.examine("phi3, longrope")
    assert row.verdict == "WRONG"
    assert max(row.errors.values()) > 1e-3


def test_an_architecture_that_ends_its_process_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(name: str) -> sweep.Row:
        while True:
            pass

    monkeypatch.setattr(sweep, "examine", endless)
    row = sweep.guarded("llama", seconds=1)
    assert row.verdict == "WRONG" and "signal 14" in row.reason
