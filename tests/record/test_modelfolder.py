"""What a model's folder says of ids and of sampling."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_models import tiny_tokenizer

from memopd_trace import Sampling
from memopd_trace.errors import InputError
from memopd_trace.record.modelfolder import read_model, sampling_defaults, sampling_of


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
