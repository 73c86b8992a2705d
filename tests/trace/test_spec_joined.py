"""The numbers in the texts on views and scores: every example block is read from the text and recomputed here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memopd_trace.invocation import Invocation
from memopd_trace.schema import TABLES
from memopd_trace.tiers import least_kl, rebuild

SPEC = Path(__file__).parents[2] / "spec"
TEXTS = {name: (SPEC / name).read_text(encoding="utf-8") for name in ("views.md", "scores.md")}
BLOCK = re.compile(r"^```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = {e["example"]: e for text in TEXTS.values() for e in map(json.loads, BLOCK.findall(text))}
Example = dict[str, Any]


def near(actual: float, written: float) -> bool:
    return round(float(actual), 5) == written


def log_softmax(logits: Any) -> NDArray[np.float64]:
    z = np.asarray(logits, float)
    return np.asarray(z - np.log(np.exp(z).sum(-1, keepdims=True)))


def view(e: Example) -> None:
    row = Invocation(
        episode_id="e", invocation_index=0, model_id="m", prompt_ids=e["prompt_ids"], output_ids=e["output_ids"]
    )
    viewed = row.replace(prompt_ids=np.array(e["view"]["prompt_ids"], np.int32))
    assert row.compute_digest().hex() == e["state_digest"]
    assert viewed.compute_digest().hex() == e["view_digest"]
    assert viewed.sequence_ids.tolist() == e["viewed_sequence"] and len(viewed) == e["n"]
    assert viewed.positions().tolist() == e["positions"]
    start = len(e["view"]["prompt_ids"])
    assert e["output_at"] == [start, start + 1] and e["predicted_by_query"] == [start - 1, start]


def view_visibility(e: Example) -> None:
    for query, keys in e["keys_of_query"].items():
        seen = [k for k in range(e["n"]) if k <= int(query) < e["visible_until"][k]]
        assert seen == keys


def score(e: Example) -> None:
    q = log_softmax(e["logits"])
    assert near(q[e["sampled_id"]], e["logprob"])
    assert near(np.log(np.exp(e["logits"]).sum()), e["logsumexp"])
    assert near(-(np.exp(q) * q).sum(), e["entropy"]) and near(np.log(len(q)), e["entropy_at_most"])
    assert np.argsort(-q).tolist()[:2] == e["topk_ids"]
    assert all(near(q[i], p) for i, p in zip(e["topk_ids"], e["topk_logprobs"], strict=True))
    assert near(np.log(1 - np.exp(q[e["topk_ids"]]).sum()), e["tail_logprob"])
    assert near(np.log(np.exp([*e["logits"], e["padded_logit"]]).sum()), e["logsumexp_with_padding"])


def score_alignment(e: Example) -> None:
    assert [e["output_ids"][i] for i in e["output_index"]] == e["target_ids"]
    assert [len(e["prompt_ids"]) + i - 1 for i in e["output_index"]] == e["predicted_by_query"]
    q = log_softmax(e["logits"])
    assert all(near(q[m, t], p) for m, (t, p) in enumerate(zip(e["target_ids"], e["logprob"], strict=True)))


def score_temperature(e: Example) -> None:
    z = np.array(e["logits"], float)
    assert near(log_softmax(z)[0], e["at_1"]) and near(log_softmax(z / 0.5)[0], e["at_0.5"])
    assert near(log_softmax(z)[0] / 0.5, e["wrong"])


def state(e: Example) -> None:
    import torch

    from memopd_scorer.head import Head

    head = Head(torch.tensor(e["weight"], dtype=torch.float32), None, e["logit_scale"], e["softcap"], e["size"])
    hidden = torch.tensor([e["hidden"]], dtype=torch.float32)
    assert head.logits(hidden)[0].tolist() == e["logits"]
    assert near(float(head.logits(hidden).logsumexp(-1)), e["logsumexp"])
    assert hidden.bfloat16().view(torch.uint16)[0].tolist() == e["bfloat16_bits"]
    assert head.digest() == e["head_digest"]


def rebuilt(e: Example, tier: str) -> NDArray[np.float32]:
    found = rebuild(np.array([e["codes"]]), np.array([e["hidden_scale"]], np.float32), tier)
    assert all(near(a, b) for a, b in zip(found[0], e["rebuilt"], strict=True))
    return found


def tier_float16(e: Example) -> None:
    (scale,) = e["hidden_scale"]
    assert scale == 2.0 ** (2 - 15) and 2**1 <= max(e["hidden"]) < 2**2
    assert (np.array(e["hidden"]) / scale).astype(np.float16).tolist() == e["codes"]
    assert rebuilt(e, "float16").tolist() == [[3, 819 * scale]]


def tier_int8(e: Example) -> None:
    (scale,) = e["hidden_scale"]
    assert scale == round(max(e["hidden"]) / 127, 8)
    assert np.rint(np.array(e["hidden"]) / scale).tolist() == e["codes"]
    weight, token = np.array(e["weight"]), e["sampled_id"]
    scored, other = np.array(e["hidden"]) @ weight.T, rebuilt(e, "int8")[0] @ weight.T
    q, r = log_softmax(scored), log_softmax(other)
    assert near(np.log(np.exp(scored).sum()), e["logsumexp"]) and near(
        np.log(np.exp(other).sum()), e["hidden_logsumexp"]
    )
    assert near(q[token], e["logprob"]) and near(r[token], e["rebuilt_logprob"])
    assert near((np.exp(q) * (q - r)).sum(), e["hidden_kl"])
    assert r[token] > q[token] + e["tolerance"]
    p, nearest = np.exp(q[token]), np.exp(r[token] - e["tolerance"])
    two_events = p * np.log(p / nearest) + (1 - p) * np.log((1 - p) / (1 - nearest))
    assert near(two_events, e["hidden_kl_at_least"])
    assert near(least_kl(q[[token]], r[[token]], e["tolerance"])[0], e["hidden_kl_at_least"])


CHECKS = {
    "view": view,
    "view-visibility": view_visibility,
    "score": score,
    "score-alignment": score_alignment,
    "score-temperature": score_temperature,
    "state": state,
    "tier-float16": tier_float16,
    "tier-int8": tier_int8,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_examples_numbers_follow_from_one_another(name: str) -> None:
    CHECKS[name](EXAMPLES[name])


def test_every_example_is_recomputed() -> None:
    assert set(EXAMPLES) == set(CHECKS)


def test_every_list_has_a_row_in_its_texts_table() -> None:
    for table in ("views", "scores"):
        rows = re.findall(r"^\| `(\w+)` \| (?:u?int|float|T)", TEXTS[f"{table}.md"], re.MULTILINE)
        lists = [c.name for c in TABLES[table] if str(c.type).startswith("list") and c.name != "media"]  # type: ignore[index]
        assert rows == lists
