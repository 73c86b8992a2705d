"""The attention backends with their real kernels, on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import assert_equal_states, pack_of
from helpers_scorer import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("backend", ["sdpa", "flex", "flash"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_backends_on_the_device_equal_the_dense_reference(kind: str, backend: str) -> None:
    dtype = torch.bfloat16 if backend == "flash" else torch.float32
    model = tiny_model(kind, dtype).cuda()
    visibilities = (False,) if backend == "flash" else (False, True)
    for visibility in visibilities:
        assert_equal_states(
            model, pack_of(visibility=visibility, scale=20), backend, 3e-2 if backend == "flash" else 1e-4
        )
