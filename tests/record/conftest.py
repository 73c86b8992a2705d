"""One upstream, and one proxy in front of it, for all tests of a process that do not end or break them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import helpers_proxy
import httpx2
import pytest


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[helpers_proxy.Upstream]:
    with helpers_proxy.upstream(tmp_path_factory.mktemp("upstream")) as found:
        yield found


@pytest.fixture(scope="session")
def proxy(upstream: helpers_proxy.Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[helpers_proxy.Proxy]:
    folder: Path = tmp_path_factory.mktemp("proxy") / "trace"
    with helpers_proxy.proxy(folder, upstream.url, "--logprob-kind", "raw", "--sampling-defaults", "neutral") as found:
        yield found


@pytest.fixture(scope="session")
def client() -> Iterator[httpx2.Client]:
    with httpx2.Client(trust_env=False, timeout=30) as found:
        yield found
