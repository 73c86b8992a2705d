"""Damaged vectors of every storage: an exit code of 0, 1 or 3 and a report, whatever the bytes; and the fuzzer sees.

`make fuzz` runs 100,000 trials; `tests/fuzz_vectors.py` says what a trial is.
"""

from __future__ import annotations

import random
from pathlib import Path

import helpers_thrift as thrift
import pytest
from fuzz_mutations import MUTATIONS, aims_at
from fuzz_vectors import COMMAND, Fuzz, Sound, Tally, corpus, damaged, fault, fuzz, put
from helpers_trace import build, valid

from memopd_trace import validate

WORKER = """
import faulthandler, json, os, signal, sys, time
_, _, seed, start, stop, step = sys.argv[1:]
for trial in range(int(start), int(stop), int(step)):
    if trial == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if trial == 5:
        faulthandler.dump_traceback_later(0.1, exit=True)
        time.sleep(60)
    line = {"trial": trial, "exit": 3, "codes": ["E-UNREADABLE"], "seconds": 0.1, "peak": 1, "why": None}
    print(json.dumps(line | {"mutation": "flip", "why": "exit 4" if trial == 8 else None}), flush=True)
"""


def check(tally: Tally, trials: int, codes: int) -> None:
    assert not tally.failures, tally.failures[:3]
    assert set(tally.exits) == {"0", "1", "3"} and sum(tally.exits.values()) == trials
    assert set(tally.mutations) == set(MUTATIONS)
    assert len(tally.codes) > codes


def test_damaged_vectors_give_a_verdict_or_a_refusal(tmp_path: Path) -> None:
    check(fuzz(1000, seed=1, jobs=1, keep=tmp_path), 1000, 50)


@pytest.mark.slow
def test_many_damaged_vectors_give_a_verdict_or_a_refusal(tmp_path: Path) -> None:
    check(fuzz(20_000, seed=2, jobs=1, keep=tmp_path), 20_000, 90)


def test_a_crash_a_hang_and_a_wrong_answer_are_told_apart_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    sounds = [Sound("plain", "core", False, {"trace.parquet": build(valid("plain"), tmp_path).read_bytes()})]
    keep = tmp_path / "keep"
    tally = Fuzz(sounds, 7, keep, tmp_path, worker=[str(tmp_path / "worker.py")]).run(10, jobs=2)
    why = {f["trial"]: f["why"].splitlines()[0] for f in tally.failures}
    assert why == {3: "killed by SIGSEGV", 5: "no answer after 20.0 s", 8: "exit 4"}
    assert tally.exits == {"3": 8, "died": 2}
    kept = (keep / "7-3" / "trace.parquet").read_bytes()
    assert kept == damaged(sounds, 7, 3)[3] != sounds[0].files["trace.parquet"]


@pytest.mark.parametrize(
    ("code", "out", "err", "seconds", "growth", "why"),
    [
        (4, "", "error: internal error", 0, 0, "exit 4"),
        (1, "", "a line", 0, 0, "stderr"),
        (3, "cannot be read: malloc of size 9 failed", "", 0, 0, "alloc of size"),
        (1, "", "", 0, 2**30, "memory grew"),
        (1, "", "", 6, 0, "slow"),
        (2, "", "", 0, 0, "exit 2"),
    ],
)
def test_what_counts_as_a_failure(code: int, out: str, err: str, seconds: float, growth: int, why: str) -> None:
    assert why in str(fault(code, out, err, seconds, growth))
    assert fault(0, "", "", 0.1, 0) is None


def test_the_corpus_has_every_storage_and_is_sound_before_it_is_damaged(tmp_path: Path) -> None:
    sounds = corpus(tmp_path / "corpus")
    assert len({s.name for s in sounds}) == len(sounds) > 500
    for name in (
        "plain.parquet",
        "plain.ipc",
        "plain.folder",
        "plain.v2",
        "plain.gzip",
        "plain.ipc-zstd",
        "folder.folder",
    ):
        (sound,) = [s for s in sounds if s.name == name]
        first, data = next(iter(sound.files.items()))
        assert validate(put(tmp_path, sound, first, data), sound.profile).clean, name


def test_every_mutation_damages_what_it_aims_at(tmp_path: Path) -> None:
    path = build(valid("train"), tmp_path)
    ipc = build({**valid("train"), "storage": "ipc"}, tmp_path)
    files = {"parquet": path.read_bytes(), "ipc": ipc.read_bytes(), "manifest": b'{"rows": 3, "files": []}'}
    for name, (mutate, _) in MUTATIONS.items():
        for data in (d for d in files.values() if aims_at(name, d)):
            damaged_ones = {mutate(random.Random(seed), data, files["ipc"]) for seed in range(20)}
            assert len(damaged_ones - {data}) > 10, name


def test_a_footer_survives_being_read_and_written(tmp_path: Path) -> None:
    data = build(valid("train"), tmp_path).read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    footer, end = thrift.decode(data, len(data) - 8 - size)
    assert end == len(data) - 8
    assert thrift.decode(thrift.encode(footer))[0] == footer
    assert thrift.get(footer, 3) == len(valid("train")["rows"])


def test_the_whole_command_is_run_too() -> None:
    assert 1 < COMMAND <= 50
