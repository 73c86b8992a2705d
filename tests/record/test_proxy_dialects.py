"""Engines tell ids in ways of their own: SGLang's, and the routes of a model with experts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers_proxy
import httpx2
import numpy as np
import pytest
from helpers_proxy import chat, rows
from helpers_upstream import CHOSEN, EXPERTS, LAYERS, npy, routes

from memopd_trace import read, validate
from memopd_trace.record.modelfolder import _experts
from memopd_trace.record.proxy.dialect import decode_routes, dialect_of
from memopd_trace.record.proxy.server import make_metadata

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EPISODE = {"X-Memopd-Episode": "e"}
SHAPE = {"num_moe_layers": LAYERS, "experts_per_token": CHOSEN, "num_experts": EXPERTS}


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[helpers_proxy.Upstream]:
    with helpers_proxy.upstream(tmp_path_factory.mktemp("sglang"), dialect="sglang") as found:
        yield found


def test_sglangs_chats_are_recorded_and_the_client_sees_what_sglang_would_have_sent(
    sglang: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    """The proxy finds out by itself what it stands before."""
    with helpers_proxy.proxy(tmp_path / "trace", sglang.url, "--logprob-kind", "raw") as found:
        asked = chat("w50 task", seed=3, request_id="sg-1")
        through = client.post(found.url + CHAT, json=asked, headers=EPISODE).json()
        direct = client.post(sglang.url + CHAT, json=asked).json()
        own = client.post(found.url + CHAT, json=asked | {"return_meta_info": True, "n": 2}, headers=EPISODE).json()
        for path, more in ((CHAT, {"stream": True}), (COMPLETIONS, {"prompt": "w50"})):
            assert client.post(found.url + path, json=asked | more, headers=EPISODE).status_code == 200
        summary = found.stop()
    hidden = {"prompt_token_ids": None, "meta_info": None}
    assert through["choices"] == [choice | hidden for choice in direct["choices"]]
    assert [c["meta_info"]["id"] for c in own["choices"]] == ["sg-1", "sg-1"]
    assert summary["not_recorded"] == {
        "SGLang gives no ids with a stream": 1,
        "SGLang gives no ids with plain completions": 1,
    }
    produced = [line for line in sglang.produced() if line["id"] == "sg-1"]
    recorded = rows(tmp_path / "trace")
    for row, line in zip(recorded, [produced[0], *produced[2:4]], strict=True):
        assert (row.prompt_ids.tolist(), row.output_ids.tolist()) == (line["prompt"], line["output"])
        assert row.output_logprobs is not None and row.policy_version == 7
        assert np.ma.getdata(row.output_logprobs).tolist() == np.float32(line["logprobs"]).tolist()
    assert validate(tmp_path / "trace", "lineage").clean


def test_a_server_is_known_by_who_owns_its_models() -> None:
    assert dialect_of([{"id": "m", "owned_by": "sglang"}]) == "sglang"
    assert dialect_of([{"id": "m", "owned_by": "vllm"}]) == dialect_of([{"id": "m"}]) == "vllm"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_expert_routes_are_taken_where_they_fit_the_model(
    dialect: str, upstream: helpers_proxy.Upstream, sglang: helpers_proxy.Upstream, client: Any, tmp_path: Path
) -> None:
    url = upstream.url if dialect == "vllm" else sglang.url
    metadata = make_metadata(["toy"], None, routes=True)
    metadata.models["toy"] = metadata.models["toy"].model_copy(update=SHAPE)
    options = {"dialect": dialect, "expert_routes": True, "metadata": metadata}
    with helpers_proxy.inside(tmp_path / "trace", url, **options) as found:
        answer = client.post(found.url + CHAT, json=chat("w51 task", mode="routes"), headers=EPISODE).json()
        found.stop()
    (row,) = rows(tmp_path / "trace")
    assert row.routed_experts is not None
    assert row.routed_experts.tolist() == routes(row.sequence_ids.tolist()).reshape(-1).tolist()
    assert read(tmp_path / "trace").metadata.required_features == ["routed_experts"]
    assert validate(tmp_path / "trace", "lineage").clean
    assert dialect == "vllm" or answer["sglext"] is None


def test_expert_routes_that_do_not_fit_or_were_not_asked_for_cost_no_call(
    upstream: helpers_proxy.Upstream, client: httpx2.Client, tmp_path: Path
) -> None:
    wrong = make_metadata(["toy"], None, routes=True)
    wrong.models["toy"] = wrong.models["toy"].model_copy(update=SHAPE | {"num_moe_layers": 3})
    for number, metadata in enumerate((wrong, None)):
        folder = tmp_path / str(number)
        with helpers_proxy.inside(folder, upstream.url, metadata=metadata) as found:
            client.post(found.url + CHAT, json=chat("w52 task", mode="routes"), headers=EPISODE)
            (reason,) = found.stop()["left_out_of_rows"]
        assert reason.startswith("expert routes left out: " + ("not asked for" if number else "they do not fit"))
        (row,) = rows(folder)
        assert row.routed_experts is None and len(row.output_ids)


def test_routes_are_read_in_both_encodings_and_nothing_else_is() -> None:
    given = routes([5, 6, 7])
    assert decode_routes(npy(given)).tolist() == given.reshape(-1).tolist()
    for bad in (None, 5, "no base64!", npy(given - 9), npy(given * 1.5), npy(np.array([None])), "AAA="):
        with pytest.raises((TypeError, ValueError)):
            decode_routes(bad)


def test_a_models_folder_says_how_routes_are_read_only_where_every_layer_has_them() -> None:
    config = json.loads('{"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 4}')
    assert _experts(config) == {"num_moe_layers": 4, "experts_per_token": 2, "num_experts": 8}
    for more in ({"first_k_dense_replace": 1}, {"mlp_only_layers": [0]}, {"moe_layer_freq": [0, 1]}):
        assert _experts(config | more) == {}
    assert _experts({"num_hidden_layers": 4}) == {}
