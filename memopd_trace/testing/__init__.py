"""Property tests for everyone who writes or reads traces: valid ones to draw, and ways to break them.

Needs hypothesis (the extra `testing`). A downstream project's test-suite may hold, with names of its own for `our_…`:

    @given(trace=traces("train", kinds=("extend", "memory", "nulls")))
    def test_what_we_write_is_valid(trace, our_folder):  # their writer, our validator
        metadata, invocations = trace
        report = validate(our_writer(metadata, invocations, our_folder), "train")
        assert report.clean, report.to_text()

    @given(trace=traces("core"))
    def test_we_read_every_trace(trace, our_folder):  # their reader, our traces
        metadata, invocations = trace
        write(our_folder / "trace.parquet", metadata, invocations, overwrite=True)
        assert our_prompts(our_folder / "trace.parquet") == [i.prompt_ids.tolist() for i in invocations]

    @pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
    @settings(deadline=None, max_examples=20)  # it writes files: the first time takes long, and each costs some
    @given(trace=traces("train"))
    def test_we_find_what_is_broken(mutation, trace):  # their checks, our faults
        with tempfile.TemporaryDirectory() as folder:
            path = mutation.write(*trace, Path(folder))
            assume(path is not None)  # this trace has no place for the fault
            assert mutation.code in our_codes(path)

`KINDS` are the words for `kinds=`: steps (how a context follows from another), states, behaviours and forms.
`traits` says which of them a trace shows, so that a test can prove what it saw.

Raises:
    MissingExtraError: hypothesis is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec

from memopd_trace.errors import MissingExtraError

if find_spec("hypothesis") is None:
    raise MissingExtraError("memopd_trace.testing needs 'hypothesis'", hint="pip install 'memopd-trace[testing]'")

from memopd_trace.testing.mutation import Mutation
from memopd_trace.testing.mutations import MUTATIONS
from memopd_trace.testing.seen import TRAITS, traits
from memopd_trace.testing.strategies import declared, episodes, traces
from memopd_trace.testing.values import BEHAVIOURS, FORMS, KINDS, STATES, STEPS, metadata

__all__ = [
    "BEHAVIOURS",
    "FORMS",
    "KINDS",
    "MUTATIONS",
    "STATES",
    "STEPS",
    "TRAITS",
    "Mutation",
    "declared",
    "episodes",
    "metadata",
    "traces",
    "traits",
]
