"""Fixtures of the converters' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers_convert import toy_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the small tokenizer."""
    return toy_tokenizer(tmp_path_factory.mktemp("tokenizer"))
