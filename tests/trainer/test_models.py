"""The demo's models: a student with fewer layers, and unpacking a GGUF file that nobody should trust."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_models import tiny_tokenizer
from helpers_scorer import PACKABLE, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from memopd_trace.errors import InputError, MissingExtraError, UsageError
from memopd_trainer.models import DEMO_PACKAGE, drop_layers, export_gguf, find_demo_gguf, most_active_layers

IDS = torch.arange(5, 35)[None]


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(IDS).logits  # type: ignore[no-any-return]


class Skip(torch.nn.Module):
    def forward(self, hidden: Any, *more: Any, **named: Any) -> Any:
        return hidden


@pytest.mark.parametrize("kind", PACKABLE)
def test_a_student_is_its_teacher_with_layers_skipped(kind: str, tmp_path: Path) -> None:
    teacher = tiny_model(kind, layers=4)
    drop_layers(save(teacher, tmp_path / "teacher"), [0, 2, 3], tmp_path / "student")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    assert student.config.num_hidden_layers == 3
    assert len({f.stat().st_mode for f in (tmp_path / "student").iterdir() if f.is_file()}) == 1, "all readable alike"
    layers = teacher.transformer.h if kind == "gpt2" else teacher.model.layers
    layers[1] = Skip()
    np.testing.assert_allclose(logits(student), logits(teacher), rtol=0, atol=1e-5)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "student" / name).read_bytes() == (tmp_path / "teacher" / name).read_bytes()


def test_a_count_keeps_the_layers_that_do_most(tmp_path: Path) -> None:
    model = tiny_model(layers=5, vocab_size=300)
    with torch.no_grad():
        for idle in (1, 3):
            for parameter in model.model.layers[idle].parameters():
                parameter *= 0.01
    assert most_active_layers(model, IDS[0].tolist(), 3) == [0, 2, 4]
    drop_layers(save(model, tmp_path / "teacher"), 3, tmp_path / "student")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    for new, old in enumerate((0, 2, 4)):
        a, b = student.model.layers[new].state_dict(), model.model.layers[old].state_dict()
        assert all(torch.equal(a[k], b[k]) for k in b)


def test_layers_that_are_not_there_cannot_be_kept(tmp_path: Path) -> None:
    folder = save(tiny_model(vocab_size=300, layers=2), tmp_path / "teacher")
    for keep in ([], [1, 0], [0, 0], [0, 2], [-1, 0], 0, 3):
        with pytest.raises(UsageError, match="keep"):
            drop_layers(folder, keep, tmp_path / "student")
    with pytest.raises(InputError, match=r"\[E-MODEL-LOAD\] .*nothing"):
        drop_layers(tmp_path / "nothing", 1, tmp_path / "student")
    with pytest.raises(UsageError, match="exists already"):
        drop_layers(folder, 1, folder)
    assert [p.name for p in tmp_path.iterdir()] == ["teacher"]


def write_gguf(path: Path, width: int = 32, layers: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    """A small Llama GGUF with a byte-level tokenizer; the tensors that keep their layout, by Transformers' names."""
    gguf = pytest.importorskip("gguf")
    tokenizer = tiny_tokenizer()
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    merges = [" ".join(m) for m in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(pieces))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(pieces)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> np.ndarray[Any, Any]:
        values = rng.normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(name, values)
        return values

    kept = {"model.embed_tokens.weight": add("token_embd.weight", len(pieces), width)}
    kept["model.norm.weight"] = add("output_norm.weight", width)
    for n in range(layers):
        for part in "qkv":
            add(f"blk.{n}.attn_{part}.weight", width, width)
        for theirs, ours, shape in (
            ("attn_output", "self_attn.o_proj", (width, width)),
            ("ffn_gate", "mlp.gate_proj", (48, width)),
            ("ffn_up", "mlp.up_proj", (48, width)),
            ("ffn_down", "mlp.down_proj", (width, 48)),
            ("attn_norm", "input_layernorm", (width,)),
            ("ffn_norm", "post_attention_layernorm", (width,)),
        ):
            kept[f"model.layers.{n}.{ours}.weight"] = add(f"blk.{n}.{theirs}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_a_gguf_becomes_a_plain_folder_with_its_weights_and_its_ids(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "model.gguf")
    folder = export_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    assert model.dtype == torch.float32
    state = model.state_dict()
    for name, values in weights.items():
        assert np.array_equal(state[name].numpy(), values), name
    text = "the memory of the part, unseen: é"
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    assert ids == tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.gguf", "out"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "E-NO-INPUT"),
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF", "cannot be loaded"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "cannot be loaded"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + b"\xff" * 64, "cannot be loaded"),
    ],
)
def test_a_file_that_is_no_gguf_is_refused_in_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        export_gguf(path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() and len(list(tmp_path.iterdir())) == (content is not None)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_what_transformers_reads_gguf_with_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    write_gguf(tmp_path / "model.gguf")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == package else real(name, *more))
    with pytest.raises(MissingExtraError, match=rf"'{package}'.*memopd-trace\[demo\]"):
        export_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        export_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_the_demo_model_is_found_without_running_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, DEMO_PACKAGE, raising=False)
    with pytest.raises(MissingExtraError, match=DEMO_PACKAGE):
        find_demo_gguf()
    package = tmp_path / DEMO_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    with pytest.raises(MissingExtraError, match=r"\.gguf"):
        find_demo_gguf()
    (package / "model.Q4_1.gguf").write_bytes(b"GGUF")
    assert find_demo_gguf() == package / "model.Q4_1.gguf"


@pytest.mark.slow
def test_the_real_demo_model_is_unpacked(tmp_path: Path) -> None:
    try:
        path = find_demo_gguf()
    except MissingExtraError as error:
        pytest.skip(str(error))
    folder = export_gguf(path, tmp_path / "teacher")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.num_hidden_layers == 30 and len(tokenizer) == model.config.vocab_size == 49152
    ids = torch.tensor([tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax().tolist()).strip() == "Paris"
