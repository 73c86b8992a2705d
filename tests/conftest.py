"""How generated tests run, and fixtures that several parts share: the demo's real model pair, unpacked once into
`.cache/`; an object store."""

from __future__ import annotations

import os
from pathlib import Path

# with one thread a process, two test processes do not wait for each other's
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from pyarrow import fs

# the same examples in every run, however busy the machine is
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

CACHE = Path(__file__).parents[1] / ".cache"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in float32 (some 20 s the first time)."""
    from memopd_trainer.models import export_gguf, find_demo_gguf

    teacher = CACHE / "smollm2"
    CACHE.mkdir(exist_ok=True)
    with FileLock(CACHE / "smollm2.lock"):
        if not teacher.exists():
            export_gguf(find_demo_gguf(), teacher)
    return teacher


@pytest.fixture(scope="session")
def half_smollm2(smollm2: Path) -> Path:
    """The same model with half of its layers."""
    from memopd_trainer.models import drop_layers

    student = CACHE / "smollm2-half"
    with FileLock(CACHE / "smollm2.lock"):
        if not student.exists():
            drop_layers(smollm2, 15, student)
    return student


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """host:port of a server of this process that speaks S3."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"{host}:{port}"
    moto.stop()


@pytest.fixture
def store(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[fs.FileSystem]:
    """An empty bucket `traces`, and the environment that leads there."""
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{s3_server}"),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    s3 = fs.S3FileSystem(
        endpoint_override=s3_server, scheme="http", allow_bucket_creation=True, allow_bucket_deletion=True
    )
    s3.create_dir("traces")
    yield s3
    s3.delete_dir("traces")
