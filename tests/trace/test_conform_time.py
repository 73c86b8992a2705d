"""Times: any unit reads alike, and one that no calendar here can hold is a misfit and no crash."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memopd_trace import validate
from memopd_trace.cli import run
from memopd_trace.conform import FIRST_SECOND, LAST_SECOND, MisfitError, conform
from memopd_trace.errors import InputError
from memopd_trace.invocation import Invocation
from memopd_trace.metadata import Model, Producer, Tokenizer, TraceMetadata
from memopd_trace.schema import COLUMN
from memopd_trace.storage import read, write

TIME = COLUMN["started_at"].type
UNITS = {"s": 1, "ms": 10**3, "us": 10**6}
TOKENIZER = Tokenizer(fingerprint="f" * 64, size=100, vocab_size=128)
METADATA = TraceMetadata(producer=Producer(name="tests"), models={"m": Model(name="m", tokenizer=TOKENIZER)})


@pytest.mark.parametrize("unit", UNITS)
def test_the_first_and_the_last_second_are_read_and_those_beyond_are_not(unit: str) -> None:
    kind = pa.timestamp(unit, tz="UTC")
    ticks = UNITS[unit]
    edges = pa.array([FIRST_SECOND * ticks, None, (LAST_SECOND + 1) * ticks - 1], kind)
    first, none, last = conform(edges, TIME).to_pylist()
    assert first == datetime(1, 1, 1, tzinfo=UTC) and none is None
    assert last.replace(microsecond=0) == datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
    for beyond in (FIRST_SECOND * ticks - 1, (LAST_SECOND + 1) * ticks, 2**63 - 1, -(2**63)):
        with pytest.raises(MisfitError, match="row 2"):
            conform(pa.array([0, None, beyond], kind), TIME)


def test_nanoseconds_lose_what_a_microsecond_cannot_hold() -> None:
    found = conform(pa.array([-1_500, 1_700_000_000_123_456_789], pa.timestamp("ns", tz="UTC")).slice(1), TIME)
    assert found.cast(pa.int64()).to_pylist() == [1_700_000_000_123_456]


def test_a_trace_with_such_a_time_is_a_finding_that_names_the_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.parquet"
    started = datetime(2024, 1, 1, tzinfo=UTC)
    row = Invocation(
        episode_id="e", invocation_index=0, model_id="m", prompt_ids=[1], output_ids=[2], started_at=started
    )
    write(path, METADATA, [row])
    table = pq.read_table(path)
    place = table.schema.get_field_index("started_at")
    late = pa.array([2**62], pa.int64()).view(TIME)
    pq.write_table(table.set_column(place, table.schema.field(place), late), path)
    report = validate(path)
    assert [(f.code, f.column) for f in report.findings] == [("E-COLUMN-TYPE", "started_at")]
    assert "after year 9999 in row 0" in str(report.findings[0].actual)
    with pytest.raises(InputError, match="E-SCHEMA.*started_at"):
        list(read(path).iter_invocations())
    assert run(["plan", str(path)]) == 3
    assert "started_at" in capsys.readouterr().err
