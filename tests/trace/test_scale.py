"""Large inputs: several at once, samples of them, and memory that is bounded whatever the writer did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_trace import build, changed, valid

from memopd_trace import TraceWriter, read, validate
from memopd_trace.arrowfile import iter_file, iter_wanted
from memopd_trace.cli import run
from memopd_trace.errors import UsageError
from memopd_trace.invocation import Invocation, invocations_from_batch
from memopd_trace.jobs import WorkerDiedError, in_order
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.rules import RULES, choose
from memopd_trace.sample import NEEDS_ALL_ROWS, NOT_SHOWN

TOKENIZER = Tokenizer(fingerprint="f" * 64, size=100, vocab_size=128)
METADATA = TraceMetadata(producer=Producer(name="tests"), models={"m": Model(name="m", tokenizer=TOKENIZER)})


def row(episode: int, index: int, prompt: list[int] | np.ndarray) -> Invocation:
    return Invocation(
        episode_id=f"e{episode}", invocation_index=index, model_id="m", prompt_ids=prompt, output_ids=[7]
    )  # fmt: skip


def trace(path: Path, episodes: int, bad: tuple[int, ...] = (), calls: int = 3) -> Path:
    """Episodes of `calls` rows; the second row of a `bad` one holds an id outside the vocabulary."""
    with TraceWriter(path, METADATA, rows_per_part=10 * calls) as writer:
        for e in range(episodes):
            for i in range(calls):
                writer.write(row(e, i, [999 if e in bad and i == 1 else 5] * 4))
    return path


# several inputs


def test_processes_give_the_report_that_one_gives(tmp_path: Path) -> None:
    paths = [build(changed("train", (0, {"prompt_ids": [-1]})), tmp_path, f"bad{i}") for i in range(2)]
    paths += [build(valid("train"), tmp_path, "good"), tmp_path / "absent.parquet"]
    alone = validate(paths, "train", max_findings=1)
    assert alone.errors > 2 and alone.refused == 1
    assert validate(paths, "train", max_findings=1, jobs=3).to_dict() == alone.to_dict()


def test_a_report_keeps_the_order_of_its_inputs_however_long_each_takes(tmp_path: Path) -> None:
    paths = [trace(tmp_path / f"{n}.parquet", n) for n in (300, 1)]
    report = validate(paths, jobs=2)
    assert [(t.path, t.episodes) for t in report.traces] == [(str(paths[0]), 300), (str(paths[1]), 1)]


def kill_the_second(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_killed_process_is_an_error_and_no_verdict() -> None:
    with pytest.raises(WorkerDiedError, match="killed") as caught:
        list(in_order(kill_the_second, [0, 1, 2], 2))
    assert caught.value.exit_code == 4 and caught.value.hint


def test_one_job_or_one_input_needs_no_process() -> None:
    here = os.getpid()
    assert list(in_order(lambda _: os.getpid(), [1, 2], 1)) == [here, here]
    assert list(in_order(lambda _: os.getpid(), [1], 8)) == [here]


INTERRUPTED = """
import os, signal, sys, time
from memopd_trace.jobs import in_order
def wait(n):
    if n == 0:
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
if __name__ == "__main__":
    try:
        list(in_order(wait, [0, 1], 2))
    except KeyboardInterrupt:
        print("stopped")
"""


def test_an_interrupt_ends_all_processes_at_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("stopped\n", "", 0)


# samples


@pytest.mark.parametrize("storage", ["t.parquet", "t.arrow", "folder"])
def test_a_sample_is_whole_episodes_and_the_same_ones_each_time(storage: str, tmp_path: Path) -> None:
    path = trace(tmp_path / storage, 40, bad=tuple(range(40)))
    report = validate(path, sample=6)
    summary = report.traces[0]
    assert (summary.rows, summary.episodes, summary.of_rows, summary.of_episodes) == (18, 6, 120, 40)
    assert report.codes == {"E-ID-RANGE"}, "an episode that was cut would break its keys"
    found = [(f.path, f.episode_id, f.row) for f in report.findings]
    assert found == [(f.path, f.episode_id, f.row) for f in validate(path, sample=6).findings]
    everywhere = {(f.path, f.episode_id, f.row) for f in validate(path).findings}
    assert len(found) == 6 and set(found) < everywhere, "a row keeps its number"


def test_what_needs_all_rows_is_not_run_on_a_sample(tmp_path: Path) -> None:
    path = trace(tmp_path / "folder", 40)
    report = validate(path, sample=3)
    assert report.clean
    assert {r.code: r.reason for r in report.rules if r.reason == NOT_SHOWN} == dict.fromkeys(NEEDS_ALL_ROWS, NOT_SHOWN)
    assert set(NEEDS_ALL_ROWS) < set(RULES)
    assert "3 episodes (a sample of 120 and 40)" in report.to_text()


def test_a_sample_as_large_as_the_trace_judges_every_row(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.parquet", 7, bad=(2, 5))
    assert validate(path, sample=100).errors == validate(path).errors == 2


def test_a_sample_of_a_trace_without_readable_ids_says_what_is_wrong_with_them(tmp_path: Path) -> None:
    table = pq.read_table(trace(tmp_path / "t.parquet", 3))
    numbers = table.set_column(0, "episode_id", pa.array(range(9)))
    pq.write_table(numbers, tmp_path / "numbers.parquet")
    pq.write_table(table.drop_columns(["episode_id"]), tmp_path / "none.parquet")
    assert validate(tmp_path / "numbers.parquet", sample=2).codes == {"E-COLUMN-TYPE"}
    assert validate(tmp_path / "none.parquet", sample=2).codes == {"E-COLUMN-MISSING"}


def test_numbers_below_one_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ({"sample": 0}, {"jobs": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            validate(tmp_path, **option)  # type: ignore[arg-type]
    assert run(["validate", str(trace(tmp_path / "t.parquet", 9, bad=(1,))), "--sample", "9", "--jobs", "2"]) == 1
    assert "sample of 27 and 9" in capsys.readouterr().out


# batches and memory


def test_batches_are_small_whatever_the_row_groups_are(tmp_path: Path) -> None:
    ids = pa.array([list(range(20_000))] * 600, pa.list_(pa.int32()))
    pq.write_table(pa.table({"prompt_ids": ids}), tmp_path / "one.parquet", row_group_size=600)
    sizes = [batch.num_rows for batch in iter_file(tmp_path / "one.parquet")]
    assert sum(sizes) == 600 and max(sizes) <= 16 * 2**20 // 80_000
    with pa.ipc.new_file(tmp_path / "one.arrow", pa.schema([("prompt_ids", ids.type)])) as writer:
        writer.write_table(pa.table({"prompt_ids": ids}))
    sizes = [batch.num_rows for batch in iter_file(tmp_path / "one.arrow")]
    assert sum(sizes) == 600 and max(sizes) <= 16 * 2**20 // 80_000


def test_row_groups_without_a_wanted_row_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": range(100)}), path, row_group_size=10)
    decoded: list[object] = []
    original = pq.ParquetFile.iter_batches

    def spy(self: pq.ParquetFile, **options: object) -> object:
        decoded.append(options["row_groups"])
        return original(self, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    wanted = np.isin(np.arange(100), [3, 47, 48])
    found = [(rows.tolist(), batch.column("a").to_pylist()) for rows, batch in iter_wanted(path, wanted)]
    assert found == [([3], [3]), ([47, 48], [47, 48])]
    assert decoded == [[0], [4]]


@pytest.mark.parametrize("code", [r.code for r in choose("train") if r.phase == "episode" and not r.wants])
def test_a_rule_reads_the_columns_that_it_declares(code: str, tmp_path: Path) -> None:
    """Alone it is given these columns only; any other raises."""
    for name in ("relations", "media", "train", "slots", "visibility"):
        report = validate(build(valid(name), tmp_path, name), "train", select=[code])
        assert not report.refused


def test_a_column_that_was_not_asked_for_raises_and_arrays_are_views(tmp_path: Path) -> None:
    batch = next(read(trace(tmp_path / "t.parquet", 2)).iter_batches())
    part = next(invocations_from_batch(batch, {"prompt_ids", "episode_id"}))
    assert part.episode_id == "e0" and not part.prompt_ids.flags.writeable
    with pytest.raises(AttributeError, match="output_ids"):
        _ = part.output_ids
    whole = next(invocations_from_batch(batch))
    assert whole.prompt_ids.flags.writeable and whole.state_digest == whole.compute_digest()


def test_an_ipc_file_takes_words_that_its_first_batch_did_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr("memopd_trace.batching.ROWS_PER_BATCH", 1)
    model = METADATA.models["m"]
    metadata = METADATA.model_copy(update={"models": dict.fromkeys(("m", "n"), model)})
    wanted = [("m", "root", None), ("n", "extend", None), ("m", "rewrite", "x_own"), ("n", "rewrite", "summary")]
    with TraceWriter(tmp_path / "t.arrow", metadata) as writer:
        for index, (name, relation, kind) in enumerate(wanted):
            writer.write(row(0, index, [5]).replace(model_id=name, relation=relation, rewrite_kind=kind))
    with pa.ipc.open_file(tmp_path / "t.arrow") as file:
        assert file.num_record_batches == 4
    found = [(i.model_id, i.relation, i.rewrite_kind) for i in read(tmp_path / "t.arrow").iter_invocations()]
    assert found == wanted


# a child's ru_maxrss begins with its parent's, so the status is read
PEAK = """
import re, sys
from memopd_trace import validate
report = validate(sys.argv[1])
assert report.clean, report.to_text()
print(int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["ours", "one row group"])
def test_two_gib_of_rows_are_checked_in_one(writer: str, tmp_path: Path) -> None:
    """A foreign writer puts everything into one row group, dictionary-encoded, in pages of its default size."""
    path, ids = tmp_path / "t.parquet", np.random.default_rng(0).integers(5, 95, 8000).astype(np.int32)
    rows = 2**31 // (4 * len(ids)) + 1
    with TraceWriter(path, METADATA) as out:
        for number in range(rows if writer == "ours" else 50):
            out.write(row(number // 5, number % 5, np.roll(ids, number)))
    if writer != "ours":
        table = pq.read_table(path).drop_columns("state_digest")
        whole = pa.concat_tables([_renamed(table, n) for n in range(rows // 50 + 1)])
        pq.write_table(whole, path, row_group_size=len(whole), compression="snappy")
        assert pq.read_metadata(path).num_row_groups == 1
        del whole
    assert sum(batch.nbytes for batch in read(path).iter_batches()) > 2**31
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    assert 50 < int(done.stdout) < 1024, "MiB"


def _renamed(table: pa.Table, number: int) -> pa.Table:
    ids = pa.array([f"{number}-{name}" for name in table.column("episode_id").to_pylist()])
    return table.set_column(0, table.schema.field(0), ids)
