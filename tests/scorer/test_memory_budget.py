"""A device too small for a pack: half the tokens at a time, said so, and the rows are what they would have been."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_resume import episodes, make_toy, rows_of

from memopd_scorer.halving import Halving, is_out_of_memory
from memopd_scorer.plan import Pack, plan
from memopd_scorer.scoring import ScoreResult, score
from memopd_scorer.teacher import LoadedModel, load
from memopd_trace.cli import run
from memopd_trace.errors import InputError
from memopd_trace.storage import read


def cuda_error() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")


def cpu_error() -> Exception:
    return RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried …")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(teacher folder, trace)."""
    return make_toy(tmp_path_factory.mktemp("toy"))


@dataclass
class Device:
    """Makes a model fail above `limit` tokens in one forward, and counts."""

    limit: int
    error: Callable[[], Exception] = cuda_error
    failed: int = 0
    longest: int = 0

    def shrink(self, model: torch.nn.Module) -> None:
        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tokens = kwargs["input_ids"].shape[-1] if "input_ids" in kwargs else args[0].shape[-1]
            if tokens > self.limit:
                self.failed += 1
                raise self.error()
            self.longest = max(self.longest, tokens)

        model.base_model.register_forward_pre_hook(before, with_kwargs=True)


def small(teacher: Path, device: Device, **options: str) -> LoadedModel:
    """A teacher on that device; it was loaded and probed while there was room."""
    loaded = load(teacher, **options)
    device.shrink(loaded.model)
    return loaded


def run_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def longest_row(trace: Path) -> int:
    return max(len(i) for i in read(trace).iter_invocations())


@pytest.mark.parametrize("layout", ["tree", "packed"])
@pytest.mark.parametrize("error", [cuda_error, cpu_error, MemoryError])
def test_a_pack_without_memory_is_run_in_more_passes_with_the_same_rows(
    error: Callable[[], Exception], layout: Any, toy: tuple[Path, Path], tmp_path: Path
) -> None:
    options = {"layout": layout, "max_tokens": 400, "shard_bytes": 8_000, "dtype": "float64"}
    whole = score(toy[1], load(toy[0], dtype="float64"), tmp_path / "whole", **options)
    device, said = Device(longest_row(toy[1]) - 10, error), []
    result: ScoreResult = score(
        toy[1], small(toy[0], device, dtype="float64"), tmp_path / "s", on_notice=said.append, **options
    )
    assert whole.budget is None and whole.plan.longest_pack > 2 * device.limit
    assert result.budget is not None and result.budget <= device.limit
    assert device.failed == len(said) >= 2, "halved, and halved again"
    assert longest_row(toy[1]) > device.longest > 0, "even a single invocation took two passes"
    assert all(re.match(r"out of memory with a forward of \d+ tokens: going on with at most", line) for line in said)
    assert run_of(tmp_path / "s") == run_of(tmp_path / "whole"), "the same plan, the same run"
    assert (result.shards, result.plan.digest) == (whole.shards, whole.plan.digest)
    mine, theirs = rows_of(tmp_path / "s"), rows_of(tmp_path / "whole")
    assert len(mine) == 20
    for a, b in zip(mine, theirs, strict=True):
        for name in ("episode_id", "invocation_index", "state_digest", "output_index"):
            assert a[name] == b[name]
        np.testing.assert_allclose(a["hidden"], b["hidden"], rtol=0, atol=1e-10)
        np.testing.assert_allclose(a["logprob"], b["logprob"], rtol=0, atol=1e-6)  # stored in float32


def test_a_larger_device_goes_on_where_a_small_one_ended(toy: tuple[Path, Path], tmp_path: Path) -> None:
    options = {"max_tokens": 200, "shard_bytes": 3_000}
    device = Device(longest_row(toy[1]) + 10)
    first = score(toy[1], small(toy[0], device), tmp_path / "s", **options)  # type: ignore[arg-type]
    assert device.failed and first.shards > 2
    rows = rows_of(tmp_path / "s")
    sorted((tmp_path / "s").glob("shard-*"))[1].unlink()
    again = score(toy[1], toy[0], tmp_path / "s", **options)  # type: ignore[arg-type]
    assert (again.shards_scored, again.budget) == (1, None)
    for a, b in zip(rows, rows_of(tmp_path / "s"), strict=True):
        assert (a["episode_id"], a["invocation_index"]) == (b["episode_id"], b["invocation_index"])
        np.testing.assert_allclose(a["logprob"], b["logprob"], rtol=0, atol=1e-5)


def test_what_cannot_be_divided_is_named_and_the_finished_ones_are_kept(
    toy: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(longest_row(toy[1]) - 1)
    refuse = "memopd_scorer.probing._static_reason"
    with pytest.raises(InputError, match=r"episode 'grow', invocation 2: no memory for its \d+ tokens, ") as caught:
        with monkeypatch.context() as only_alone:
            only_alone.setattr(refuse, lambda model: "layers that no tree can fork")
            teacher = small(toy[0], device)
        score(toy[1], teacher, tmp_path / "s", max_tokens=200, shard_bytes=1)
    assert "CUDA out of memory" in str(caught.value) and "\n" not in str(caught.value)
    finished = len(list((tmp_path / "s").glob("shard-*")))
    assert finished > 0
    monkeypatch.setattr(refuse, lambda model: "layers that no tree can fork")
    result = score(toy[1], toy[0], tmp_path / "s", max_tokens=200, shard_bytes=1)
    assert result.shards_scored == result.shards - finished


def test_a_device_without_memory_for_one_token_is_told(toy: tuple[Path, Path], tmp_path: Path) -> None:
    device = Device(0)
    with pytest.raises(InputError, match=r"invocation 2: no memory for its \d+ tokens among the \d+ of its pack, 1 at"):
        score(toy[1], small(toy[0], device), tmp_path / "s", max_tokens=200)


def test_the_command_line_says_it_on_stderr(
    toy: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(longest_row(toy[1]) + 10)
    monkeypatch.setattr("memopd_scorer.scoring.load", lambda path, **_: small(path, device))
    command = ["score", str(toy[1]), "--teacher", str(toy[0]), "--signal", "sampled", "--format", "json", "-o"]
    assert run([*command, str(tmp_path / "s")]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["targets"] > 100
    lines = captured.err.splitlines()
    assert lines and all(line.startswith("out of memory with a forward of ") for line in lines)
    device.limit = 0
    assert run([*command, str(tmp_path / "t")]) == 3
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: episode '")


def test_what_the_failed_attempt_held_is_let_go_before_the_next_one() -> None:
    class Buffer:
        pass

    (pack,) = plan(episodes(), max_tokens=10_000)
    held: list[weakref.ref[Buffer]] = []

    def attempt(pack: Pack, tokens: int | None) -> Any:
        assert all(ref() is None for ref in held), "an earlier attempt's memory is still taken"
        buffer = Buffer()
        held.append(weakref.ref(buffer))
        if tokens is None or tokens > 20:
            raise cuda_error()
        return "signals"

    gc.disable()  # only counting references is prompt
    try:
        halving = Halving(attempt, lambda text: None)
        assert halving.run(pack) == "signals"
    finally:
        gc.enable()
    assert len(held) > 3 and 10 < (halving.budget or 0) <= 20


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("out of memory"), KeyError("x")])
def test_other_errors_are_no_reason_to_halve(error: Exception) -> None:
    (pack,) = plan(episodes(), max_tokens=10_000)

    def attempt(pack: Pack, tokens: int | None) -> Any:
        raise error

    assert not is_out_of_memory(error)
    with pytest.raises(type(error)):
        Halving(attempt, lambda text: None).run(pack)


def test_what_a_real_allocator_says_is_understood() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as numpy_caught:
        np.empty(2**60, np.uint8)
    assert is_out_of_memory(numpy_caught.value)
