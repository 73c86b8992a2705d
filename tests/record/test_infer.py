"""The lineage that ids alone tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers_models import tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from memopd_trace import Invocation, Sampling
from memopd_trace.errors import InputError
from memopd_trace.record.infer import infer_lineage
from memopd_trace.record.modelfolder import read_model, sampling_defaults, sampling_of


def row(index: int, prompt: list[int], output: list[int], **more: Any) -> Invocation:
    return Invocation(
        episode_id="e",
        invocation_index=index,
        model_id="m",
        prompt_ids=prompt,
        output_ids=output,
        **more,  # type: ignore[arg-type]
    )


LONG = list(range(100, 130))
FIRST = row(0, LONG, [7, 8], relation="root")


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([*LONG, 7, 8, 9], {"relation": "extend", "parent_index": 0}),
        (LONG, {"relation": "fork", "parent_index": 0}),
        ([*LONG[:20], 5, 6], {"relation": "rewrite", "parent_index": 0, "rewrite_kind": "opaque"}),
        ([*LONG[:25], 7, 8, 9], {"relation": "rewrite", "parent_index": 0, "rewrite_kind": "opaque"}),
        ([*LONG[:18], *LONG[20:], 7, 8, 9], {"relation": "rewrite", "parent_index": 0, "rewrite_kind": "elide"}),
        (LONG[:20], {"relation": "rewrite", "parent_index": 0, "rewrite_kind": "rewind"}),
        ([*LONG[:3], *range(200, 230)], {"relation": "root"}),
        ([1, 2, 3], {"relation": "root"}),
    ],
)
def test_what_the_ids_show(prompt: list[int], found: dict[str, Any]) -> None:
    columns = infer_lineage(row(1, prompt, [1]), [FIRST]).columns
    assert columns == found | ({"rewrite_evidence": "inferred"} if found["relation"] == "rewrite" else {})


def test_an_attempt_that_was_given_up_is_followed_only_by_its_retry() -> None:
    left = FIRST.replace(accepted=False)
    assert infer_lineage(row(1, LONG, [1]), [left]).columns == {"relation": "retry", "parent_index": 0, "attempt": 1}
    assert infer_lineage(row(1, [*LONG, 7, 8, 9], [1]), [left]).columns == {"relation": "root"}
    again = row(1, LONG, [7, 8], relation="retry", parent_index=0, attempt=1, accepted=False)
    third = infer_lineage(row(2, LONG, [1]), [left, again]).columns
    assert third == {"relation": "retry", "parent_index": 1, "attempt": 2}
    assert infer_lineage(row(1, LONG, [1]), [FIRST], again=True).columns["relation"] == "retry"


def test_branches_that_the_prompt_follows_as_well_are_told_and_ancestors_are_not() -> None:
    second = row(1, [*LONG, 7, 8, 9], [3], relation="extend", parent_index=0)
    twin = row(2, [*LONG, 7, 8, 9], [3], relation="fork", parent_index=1)
    child = row(3, [*LONG, 7, 8, 9, 3, 4], [1])
    found = infer_lineage(child, [FIRST, second, twin])
    assert found.columns["parent_index"] == 2 and found.others == (1,)
    assert infer_lineage(child, [FIRST, second]).others == ()


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=6), st.data())
def test_an_extension_is_one_and_no_longer_one_is_overlooked(prompts: list[list[int]], data: Any) -> None:
    rows: list[Invocation] = []
    for prompt in prompts:
        new = row(len(rows), prompt, data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
        columns = infer_lineage(new, rows).columns
        whole = [i for i in rows if prompt[: len(i)] == i.sequence_ids.tolist()]
        assert (columns["relation"] == "extend") == bool(whole)
        if whole:
            assert len(rows[columns["parent_index"]]) == max(map(len, whole))
        rows.append(new.replace(**columns))


def test_a_models_folder_says_what_ids_mean_and_how_it_samples(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 400, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": null}'
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.6, "top_k": 20}')
    model, pieces = read_model(tmp_path, "m")
    from memopd_trace.record.fingerprint import chat_template_digest, tokenizer_fingerprint

    found = model.tokenizer
    assert found.fingerprint == tokenizer_fingerprint(tokenizer) == pieces.fingerprint
    assert (found.size, found.vocab_size, found.bos_id, found.pad_id) == (len(tokenizer), 400, 1, None)
    assert (found.eos_ids, found.stop_ids) == ([2], [2, 5])
    assert found.chat_template_digest == chat_template_digest(tokenizer)
    defaults = sampling_defaults(tmp_path)
    assert defaults == Sampling(temperature=0.6, top_k=20)
    assert sampling_of({"top_k": -1, "seed": 3, "top_p": "x", "min_p": True}, defaults) == Sampling(
        temperature=0.6, top_k=0, seed=3
    )
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="holds no JSON object"):
        read_model(tmp_path, "m")
