"""Digests that say which tokenizer a trace's ids belong to, and which model sampled them.

The tokenizer's fingerprint covers what ids *mean*: every id and the piece it stands for, added tokens included.
It leaves out how text is cut into pieces (merges, normaliser, runtime padding settings), so that the file on disk,
the loaded tokenizer and other library versions agree; the chat template has a digest of its own. Torch is imported
only by `weights_digest`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from memopd_trace.metadata import Tokenizer

_VOLATILE_CONFIG = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
)


def json_digest(value: Any) -> str:
    """Hex SHA-256 of `value` as canonical JSON (sorted keys, no spaces, UTF-8)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Hex SHA-256 over the (id, piece) pairs of a vocabulary in the order of ids."""
    return json_digest(sorted((index, piece) for piece, index in vocabulary.items()))


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """The fingerprint of a loaded tokenizer: anything whose `get_vocab()` maps pieces to ids."""
    return vocabulary_fingerprint(tokenizer.get_vocab())


def tokenizer_size(tokenizer: Any) -> int:
    """The number of real ids: the largest id + 1 (`len(tokenizer)` where the ids have no holes)."""
    return int(max(tokenizer.get_vocab().values())) + 1


def chat_template_digest(tokenizer: Any) -> str | None:
    """Hex SHA-256 of the chat template (a text, or several by name); `None` where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else json_digest(template)


def tokenizer_metadata(tokenizer: Any, *, vocab_size: int, stop_ids: Sequence[int] | None = None) -> Tokenizer:
    """The metadata of a loaded tokenizer beside a model of width `vocab_size`.

    `stop_ids` are the ids at which generation ended; the end-of-sequence id where not given.
    """
    eos_ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return Tokenizer(
        fingerprint=tokenizer_fingerprint(tokenizer),
        size=tokenizer_size(tokenizer),
        vocab_size=vocab_size,
        bos_id=tokenizer.bos_token_id,
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_token_id,
        stop_ids=eos_ids if stop_ids is None else list(stop_ids),
        chat_template_digest=chat_template_digest(tokenizer),
    )


def config_digest(model: Any) -> str:
    """Hex SHA-256 of a model's `config`, without what does not change the model (its path, versions, dtype)."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE_CONFIG}
    return json_digest(json.loads(json.dumps(config, default=str)))


def weights_digest(model: Any, dtype: Any = None) -> str:
    """Hex SHA-256 over name, dtype, shape and bytes of every parameter of a torch module, sorted by name.

    Tied parameters count once. Bytes are those of the dtype in memory, so the digest says with which precision the
    model ran; with a torch `dtype`, those that it would have, loaded in that. Where the weights are changes nothing:
    offloaded ones are read, and parts on several ranks gathered (all ranks call this).
    """
    import torch

    from memopd_trace.record.parameters import iter_parameters

    h = hashlib.sha256()
    for name, parameter in iter_parameters(model):
        tensor = parameter.to("cpu", dtype if parameter.is_floating_point() else None).contiguous()
        h.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        h.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()
