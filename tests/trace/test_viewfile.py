"""Views on disk: what is written is read, only whole files appear, and a view is only for its own tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers_trace import build, valid

from memopd_trace import Invocation, Media, read, validate
from memopd_trace.errors import InputError, UsageError
from memopd_trace.metadata import Producer, ViewInfo, ViewsMetadata
from memopd_trace.schema import VIEWS_COLUMNS
from memopd_trace.viewfile import View, ViewsReader, ViewsWriter
from memopd_trace.views import persistent_history, write_persistent_history

METADATA = ViewsMetadata(
    producer=Producer(name="tests"),
    tokenizer_fingerprint="toy",
    required_features=["visibility", "media", "output_slots"],
    views={"hint": ViewInfo(description="more in front"), "other": ViewInfo()},
)


def recorded(index: int = 0, **more: Any) -> Invocation:
    fields = {"prompt_ids": [5, 6, 7], "output_ids": [8, 2], **more}
    return Invocation(episode_id="e", invocation_index=index, model_id="m", **fields)


def rich_view() -> View:
    """Every column is given."""
    return View(
        episode_id="e",
        invocation_index=0,
        view="hint",
        state_digest=bytes(range(32)),
        prompt_ids=[5, 6, 7],
        position_ids=[0, 1, 2],
        visible_from=[0, 1, 2],
        visible_until=[3, 2, 3],
        output_slots=[2],
        media=[Media(0, 1, bytes(32), "image/png")],
        view_digest=bytes(32),
    )


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_every_column_comes_back_as_it_was_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"v.{suffix}"
    plain = View(episode_id="ü", invocation_index=1, view="other", state_digest=bytes(32), prompt_ids=np.arange(0))
    with ViewsWriter(path, METADATA) as writer:
        writer.write(rich_view())
        writer.write(plain)
    reader = ViewsReader(path)
    assert reader.metadata == METADATA
    for wrote, got in zip((rich_view(), plain), reader, strict=True):
        for column in VIEWS_COLUMNS:
            a, b = getattr(wrote, column.name), getattr(got, column.name)
            assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b or list(a) == list(b), column.name
    assert all(getattr(rich_view(), c.name) is not None for c in VIEWS_COLUMNS)


def test_a_view_has_exactly_the_columns_as_fields() -> None:
    assert list(View.__dataclass_fields__) == [c.name for c in VIEWS_COLUMNS]


def test_nothing_is_left_of_a_file_that_was_not_finished(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ViewsWriter(tmp_path / "v.parquet", METADATA) as writer:
        writer.write(rich_view())
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    with pytest.raises(UsageError, match="suffix"):
        ViewsWriter(tmp_path / "v.json", METADATA)
    with ViewsWriter(path, METADATA) as writer:
        for name in ("recorded", "hints"):
            with pytest.raises(UsageError, match=f"no view '{name}'.*hint, other"):
                writer.write(View.of(recorded(), recorded(), name))
    with pytest.raises(UsageError, match="exists"):
        ViewsWriter(path, METADATA)
    with ViewsWriter(path, METADATA, overwrite=True) as writer:
        writer.write(rich_view())
    assert len(list(ViewsReader(path))) == 1


def test_what_cannot_be_read_is_refused_by_code(tmp_path: Path) -> None:
    trace = build(valid("plain"), tmp_path)
    whole = tmp_path / "v.parquet"
    with ViewsWriter(whole, METADATA) as writer:
        writer.write(rich_view())
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-30])
    table = pq.read_table(whole)
    pq.write_table(table.drop_columns(["prompt_ids"]), tmp_path / "narrow.parquet")
    for path, code in (
        (tmp_path / "none.parquet", "E-NO-INPUT"),
        (tmp_path, "E-UNREADABLE"),
        (tmp_path / "cut.parquet", "E-UNREADABLE"),
        (trace, "E-META-MISSING"),
        (tmp_path / "narrow.parquet", "E-SCHEMA"),
    ):
        with pytest.raises(InputError) as error:
            list(ViewsReader(path))
        assert error.value.code == code, path


def test_a_view_applies_to_its_own_row_and_to_no_other() -> None:
    row = recorded(output_logprobs=[-0.5, -0.1], relation="root")
    viewed = recorded(prompt_ids=[9, 5, 6, 7], position_ids=[0, 1, 2, 3, 4, 5])
    view = View.of(row, viewed, "hint")
    applied = view.apply(row)
    assert applied.prompt_ids.tolist() == [9, 5, 6, 7] and applied.output_ids.tolist() == [8, 2]
    assert applied.compute_digest() == view.view_digest != row.compute_digest() == view.state_digest
    assert applied.key == row.key and applied.relation is None and applied.output_logprobs is not None
    for other in (recorded(output_ids=[8, 3]), recorded(prompt_ids=[5, 6]), recorded(position_ids=[1, 2, 3, 4, 5])):
        with pytest.raises(InputError, match="E-VIEW-STATE"):
            view.apply(other)


def test_persistent_history_of_a_rewriting_agent_is_a_valid_views_file(tmp_path: Path) -> None:
    trace = build(valid("train"), tmp_path)
    rows = write_persistent_history(trace, tmp_path / "v.arrow")
    report = validate(trace, "train", views=tmp_path / "v.arrow")
    assert report.clean and report.traces[0].inputs[0].rows == rows == 4
    assert {r.code for r in report.rules if r.code.startswith("E-VIEW") and r.status != "pass"} == set()
    expected = [p.tolist() for e in read(trace).iter_episodes() for p in persistent_history(e)]
    views = list(ViewsReader(tmp_path / "v.arrow"))
    assert [v.prompt_ids.tolist() for v in views] == expected
    rewritten = [
        i for i, v in zip(read(trace).iter_invocations(), views, strict=True) if len(v.prompt_ids) > len(i.prompt_ids)
    ]
    assert [i.relation for i in rewritten] == ["rewrite"], "the one row whose recorded prompt forgot something"


def test_persistent_history_refuses_what_has_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="in place"):
        write_persistent_history(build(valid("slots"), tmp_path, "slots"), tmp_path / "v.parquet")
    assert not (tmp_path / "v.parquet").exists()
    two = valid("plain")
    other = {**two["metadata"]["models"]["m"], "tokenizer": {"fingerprint": "another", "size": 9, "vocab_size": 9}}
    two["metadata"]["models"]["n"] = other
    with pytest.raises(UsageError, match="2 tokenizers"):
        write_persistent_history(build(two, tmp_path, "two"), tmp_path / "v.parquet")
