"""The cases of `spec/cases.md` that a trace can show, each by its own small numbers: found where it is wrong, and not
where it is right. One test a case, named after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers_cases import call, cause, extend, judge, rewrite, root, tokenizer
from helpers_trace import build, valid

from memopd_trace import Report, validate

ONES = {5: "=", 6: "?", 10: "1", 11: "11"}
CHAT = {
    1: "<|bos|>",
    198: "\n",
    644: "<|im_start|>",
    645: "<|im_end|>",
    271: "\n\n",
    7: "yes",
    8: "user",
    9: "assistant",
}
TURNS = (1, 644, 645)  # its control ids


def clean(report: Report) -> bool:
    assert report.clean, report.to_text()
    return sum(t.rows for t in report.traces) > 0


def test_a01_decode_then_encode_is_not_the_identity(tmp_path: Path) -> None:
    given = tokenizer(tmp_path, ONES)
    first = root([6], [10, 10])
    wrong = judge(tmp_path, first, extend([6, 11, 5], [5]), given=given)
    assert wrong.codes == {"E-DISCONTINUITY"} and cause(wrong) == "retokenised"
    assert "differs from invocation 0 at index 1" in wrong.findings[0].message
    assert cause(judge(tmp_path, first, extend([6, 11, 5], [5]))) == "diverged", "ids alone do not tell"
    assert clean(judge(tmp_path, first, extend([6, 10, 10, 5], [5]), given=given))
    assert clean(judge(tmp_path, first, rewrite("reencode", [6, 11, 5], [5]), given=given))
    labelled = judge(tmp_path, first, rewrite("memory", [6, 11, 5], [5]), given=given)
    assert labelled.codes == {"W-REWRITE-KIND"} and labelled.findings[0].expected == "reencode"
    mirror = judge(tmp_path, {**first, "output_text": "1"}, {**first, "output_text": "12"}, given=given)
    assert mirror.codes == {"W-TEXT-MIRROR", "W-IDS-PAST-TEXT"}


def test_a02_a_pair_of_newlines_merges(tmp_path: Path) -> None:
    given = tokenizer(tmp_path, CHAT, TURNS)
    report = judge(tmp_path, root([8], [198, 198]), extend([8, 271], [7]), given=given)
    assert report.codes == {"E-DISCONTINUITY"} and cause(report) == "retokenised"
    assert report.findings[0].expected == "[1:] 198, 198" and report.findings[0].actual == "[1:] 271"


def test_a03_the_engine_ran_on_other_ids(tmp_path: Path) -> None:
    moe = {"num_moe_layers": 1, "experts_per_token": 1, "num_experts": 4}
    features, sampled = ("routed_experts",), [4]
    requested = root([1, 2], sampled, routed_experts=[0])
    assert judge(tmp_path, requested, features=features, model=moe).codes == {"E-ROUTED-LENGTH"}
    assert clean(judge(tmp_path, root([3], sampled, routed_experts=[0]), features=features, model=moe))


def test_a04_the_template_drops_thinking(tmp_path: Path) -> None:
    pieces = {1: "q", 2: ":", 90: "<think>", 91: "hm", 92: "</think>", 3: "a", 4: "r", 5: "s", 7: "t"}
    given = tokenizer(tmp_path, pieces)
    first = root([1, 2], [90, 91, 92, 3])
    wrong = judge(tmp_path, first, extend([1, 2, 3, 4, 5], [4]), given=given)
    assert wrong.codes == {"E-DISCONTINUITY"} and cause(wrong) == "stripped_thinking"
    assert "at index 2;" in wrong.findings[0].message
    assert cause(judge(tmp_path, first, extend([1, 2, 3, 4, 5], [4]))) == "elided"
    assert clean(judge(tmp_path, first, extend([1, 2, 90, 91, 92, 3, 7], [4]), given=given))
    assert clean(judge(tmp_path, first, rewrite("strip_thinking", [1, 2, 3, 4, 5], [4]), given=given))


def chat(*turns: list[int]) -> list[int]:
    """Turns with a newline behind each, and the header of the model's next."""
    return [i for turn in turns for i in (644, 8, *turn, 645, 198)] + [644, 9, 198]


@pytest.mark.parametrize("boundaries", [1, 3])
def test_a06_the_separator_behind_the_stop_id_is_lost(boundaries: int, tmp_path: Path) -> None:
    given = tokenizer(tmp_path, CHAT, TURNS)
    rows: dict[bool, list[dict[str, Any]]] = {}
    for lost in (True, False):
        prompt, rows[lost] = chat([7], [7]), []
        for at in range(boundaries + 1):
            rows[lost].append(extend(prompt, [7, 645], at - 1) if at else root(prompt, [7, 645]))
            prompt = [*prompt, 7, 645, *([] if lost else [198]), *chat([7])]
    report = judge(tmp_path, *rows[True], given=given, stop_ids=[645], bos_id=1)
    assert report.codes == {"W-SEPARATOR-MISSING"} and report.warnings == boundaries
    assert report.findings[0].expected == "198"
    assert clean(judge(tmp_path, *rows[False], given=given, stop_ids=[645], bos_id=1))


def test_a06_white_space_may_be_written_in_signs_for_bytes(tmp_path: Path) -> None:
    """As most tokenizers in use do: the piece of a newline is no newline."""
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    given = tokenizer(tmp_path, {**CHAT, 198: "\u010a"}, TURNS, decoder=decoder)
    prompt = chat([7], [7])
    lost = extend([*prompt, 7, 645, *chat([7])], [7, 645])
    report = judge(tmp_path, root(prompt, [7, 645]), lost, given=given, stop_ids=[645], bos_id=1)
    assert report.codes == {"W-SEPARATOR-MISSING"}


def test_a06_a_template_without_separators_is_left_alone(tmp_path: Path) -> None:
    given = tokenizer(tmp_path, CHAT, TURNS)
    prompt = [644, 8, 7, 645, 644, 9]
    rows = root(prompt, [7, 645]), extend([*prompt, 7, 645, 644, 8, 7, 645, 644, 9], [7, 645])
    assert clean(judge(tmp_path, *rows, given=given, stop_ids=[645]))


def test_a08_another_response_prefix(tmp_path: Path) -> None:
    first = root([1, 2, 50], [7, 9])
    report = judge(tmp_path, first, extend([1, 2, 80, 81, 7, 9, 5], [4]))
    assert report.codes == {"E-DISCONTINUITY"} and cause(report) == "response_prefix"
    assert "1 id in front of the parent's output became 2 others" in report.findings[0].message
    assert clean(judge(tmp_path, first, extend([1, 2, 50, 7, 9, 5], [4])))


def test_a09_arguments_are_written_anew(tmp_path: Path) -> None:
    pieces = {
        1: "call ",
        30: '{"b": 1',
        31: ',"a":2',
        32: "}",
        33: '{"a":2,',
        34: '"b":1}',
        35: '"{\\"b\\": 1,\\"a\\":2}"',
        2: ".",
    }
    given = tokenizer(tmp_path, pieces)
    first = root([1], [30, 31, 32])
    for ids, expected in (([33, 34], "reserialised"), ([35], "double_encoded")):
        report = judge(tmp_path, first, extend([1, *ids, 2], [2]), given=given)
        assert report.codes == {"E-DISCONTINUITY"} and cause(report) == expected
        assert clean(judge(tmp_path, first, rewrite("reserialise", [1, *ids, 2], [2]), given=given))
    assert clean(judge(tmp_path, first, extend([1, 30, 31, 32, 2], [2]), given=given))


def test_a11_white_space_is_stripped(tmp_path: Path) -> None:
    given = tokenizer(tmp_path, CHAT, TURNS)
    report = judge(tmp_path, root([8], [198, 7]), extend([8, 7, 645], [7]), given=given)
    assert report.codes == {"E-DISCONTINUITY"} and cause(report) == "whitespace"
    assert clean(judge(tmp_path, root([8], [198, 7]), extend([8, 198, 7, 645], [7]), given=given))


def test_a13_two_begin_ids(tmp_path: Path) -> None:
    assert judge(tmp_path, root([1, 1, 3, 4], [5]), bos_id=1).codes == {"W-DOUBLE-BOS"}
    assert clean(judge(tmp_path, root([1, 1, 3, 4], [5]), bos_id=None))
    report = judge(tmp_path, root([1, 3, 4], [5]), extend([1, 1, 3, 4, 5, 6], [7]), bos_id=1)
    assert report.codes == {"W-DOUBLE-BOS", "E-DISCONTINUITY"} and cause(report) == "double_bos"


def test_a14_text_of_a_tool_becomes_a_control_id(tmp_path: Path) -> None:
    given = tokenizer(tmp_path, {27: "<", 91: "|", 645: "<|im_end|>", 7: "yes", 644: "<|im_start|>"}, (644, 645))
    for kind in ("user", "tool_result"):
        segment = {"start": 0, "stop": 3, "kind": kind}
        report = judge(tmp_path, root([27, 91, 645], [7], segments=[segment]), given=given)
        assert report.codes == {"W-CONTROL-IN-CONTENT"} and "at offset 2" in report.findings[0].message
        inside = root([27, 645, 91, 7], [7], segments=[segment | {"stop": 4}])
        assert judge(tmp_path, inside, stop_ids=[645]).codes == {"W-CONTROL-IN-CONTENT"}, "the metadata names it"
    framed = root([644, 7, 27, 645], [7], segments=[{"start": 0, "stop": 4, "kind": "user"}])
    template = root([27, 91, 645], [7], segments=[{"start": 0, "stop": 3, "kind": "template"}])
    assert clean(judge(tmp_path, framed, given=given)) and clean(judge(tmp_path, template, given=given))


def test_b01_a_compaction_is_declared_or_it_is_a_discontinuity(tmp_path: Path) -> None:
    first = root([1, 2], [3, 4])
    assert clean(judge(tmp_path, first, rewrite("summary", [1, 9], [5])))
    assert judge(tmp_path, first, extend([1, 9], [5])).codes == {"E-DISCONTINUITY"}
    assert judge(tmp_path, first, call([1, 9], [5], 0, "rewrite")).codes == {"E-REWRITE-UNDECLARED"}


def test_b03_the_recorded_parent_wins_and_a_guess_takes_the_longest(tmp_path: Path) -> None:
    states = [([9], [8]), ([9, 8, 7], [6]), ([9], [8, 7, 6, 5]), ([9, 8, 7, 6, 5, 4], [3])]
    silent = [call(p, s) for p, s in states]
    report = judge(tmp_path, *silent)
    assert report.codes == {"W-PARENT-AMBIGUOUS"} and report.findings[0].row == 3
    assert report.findings[0].expected == "2", "the longest; the first match would be 0"
    assert clean(judge(tmp_path, *silent[:3], extend(*states[3], 1)))
    assert judge(tmp_path, *silent[:3], root(*states[3])).codes == {"W-PARENT-OTHER"}
    broken = judge(tmp_path, silent[0], call([9, 8, 7], [60]), silent[2], extend(*states[3], 1))
    assert broken.codes == {"E-DISCONTINUITY"}


def test_b03_a_chain_of_calls_without_lineage_is_not_ambiguous(tmp_path: Path) -> None:
    prompt, rows = [9], []
    for i in range(12):
        rows.append(call(prompt, [8, 20 + i]))
        prompt = [*prompt, 8, 20 + i, 7]
    assert clean(judge(tmp_path, *rows))


def test_b04_a_request_that_was_sent_again(tmp_path: Path) -> None:
    before, first = root([1], [9]), extend([1, 9, 2], [3], attempt=0, accepted=False)
    again = call([1, 9, 2], [4], 1, "retry", attempt=1, accepted=True)
    assert clean(judge(tmp_path, before, first, again, extend([1, 9, 2, 4, 5], [6], 2)))
    assert judge(tmp_path, before, first, {**again, "attempt": 0}).codes == {"E-ATTEMPT-DUPLICATE"}
    twice = extend([1, 9, 2], [4], attempt=0)
    assert judge(tmp_path, before, first, twice).codes == {"E-ATTEMPT-DUPLICATE"}
    assert clean(judge(tmp_path, before, first, extend([1, 9, 5], [4], attempt=0))), "another request"
    assert judge(tmp_path, before, {**first, "accepted": None}, again).codes == {"W-ATTEMPT-OPEN"}
    built_on = judge(tmp_path, before, first, again, extend([1, 9, 2, 3, 5], [6], 1))
    assert built_on.codes == {"E-PARENT-REJECTED"}


def test_b05_a_call_was_lost(tmp_path: Path) -> None:
    given = tokenizer(tmp_path, CHAT, TURNS)
    first = root(chat([7]), [7, 645])
    hole = judge(tmp_path, first, {**extend(chat([7], [8]), [7]), "invocation_index": 2})
    assert hole.codes == {"E-INDEX"}
    lost = extend([*chat([7]), 7, 645, 198, *chat([8]), 8, 645, 198, *chat([7])], [7, 645])
    report = judge(tmp_path, first, lost, given=given, stop_ids=[645])
    assert report.codes == {"W-CALL-MISSING"} and report.findings[0].row == 1
    whole = extend([*chat([7]), 7, 645, 198, *chat([8], [7])], [7, 645])
    assert clean(judge(tmp_path, first, whole, given=given, stop_ids=[645]))
    other = judge(tmp_path, first, extend([*chat([7]), 8, 645, 198, *chat([7])], [7]), given=given)
    assert cause(other) == "other_output"


def test_b07_a_rejected_attempt_is_not_trained(tmp_path: Path) -> None:
    rejected = root([1], [2, 3], accepted=False, output_loss_mask=[True, True])
    assert judge(tmp_path, rejected).codes == {"E-LOSS-REJECTED"}
    assert clean(judge(tmp_path, {**rejected, "output_loss_mask": [False, False]}))


def test_c01_the_stop_id_is_sampled_and_trained(tmp_path: Path) -> None:
    def row(ids: list[int], mask: list[bool] | None = None) -> Report:
        return judge(tmp_path, root([4], ids, output_loss_mask=mask, finish_reason="stop"), stop_ids=[2], pad_id=2)

    assert clean(row([5, 6, 2], [True, True, True])) and clean(row([5, 6, 2]))
    assert row([5, 6, 2], [True, True, False]).codes == {"W-STOP-UNTRAINED"}
    assert clean(row([5, 6, 2], [False, False, False])), "nothing is trained"
    assert row([5, 6, 2, 2, 2], [True] * 5).codes == {"W-IDS-AFTER-STOP"}
    assert row([5, 6]).codes == {"W-STOP-MISSING"}


def test_c03_a_stop_word_is_cut_from_one_view_only(tmp_path: Path) -> None:
    longer = root([4], [11, 12], output_logprobs=[-0.1, -0.2, -0.3], logprob_kind="raw")
    report = judge(tmp_path, longer)
    assert report.codes == {"E-LENGTH-OUTPUT"} and (report.findings[0].expected, report.findings[0].actual) == (
        "2",
        "3",
    )
    given = tokenizer(tmp_path, {4: "q", 11: "a", 12: "b", 13: "#", 14: "#!"})
    report = judge(tmp_path, root([4], [11, 12, 13, 14], output_text="ab"), given=given)
    assert report.codes == {"W-IDS-PAST-TEXT"} and "the last 2 of 4 ids" in report.findings[0].message
    assert clean(judge(tmp_path, root([4], [11, 12, 13, 14], output_text="ab##!"), given=given))


def test_c04_the_head_of_a_prompt_is_cut(tmp_path: Path) -> None:
    report = judge(tmp_path, root([1, 2, 3], [4]), extend([2, 3, 4, 5], [6]))
    assert report.codes == {"E-DISCONTINUITY"} and cause(report) == "truncated_left"
    given = tokenizer(tmp_path, CHAT, TURNS)
    bare = judge(
        tmp_path, root(chat([7]), [7]), extend([i for i in chat([7]) if i not in TURNS] + [7], [8]), given=given
    )
    assert cause(bare) == "controls", "decoded without control pieces, and encoded again"


def test_c06_ids_of_the_padded_vocabulary(tmp_path: Path) -> None:
    sizes = {"size": 8, "vocab_size": 10}
    report = judge(tmp_path, root([1], [3, 9]), root([1, 2], [3]), **sizes)
    assert report.codes == {"W-ID-PADDED"} and [f.row for f in report.findings] == [0], "other rows are unaffected"
    assert judge(tmp_path, root([1, 9], [3]), **sizes).codes == {"W-ID-PADDED"}, "prompts are looked at too"
    assert judge(tmp_path, root([1], [3, 10]), **sizes).codes == {"E-ID-RANGE"}


def test_c07_placeholders_are_expanded_twice(tmp_path: Path) -> None:
    image = {"start": 1, "stop": 5, "sha256": "ab" * 32}
    once, twice = [1, *[60] * 4, 2], [1, *[60] * 7, 2]
    features = ("media",)
    report = judge(tmp_path, root(twice, [3], media=[image]), features=features)
    assert report.codes == {"E-MEDIA-RUN"}
    assert (report.findings[0].expected, report.findings[0].actual) == ("4 in 1 runs", "7")
    assert clean(judge(tmp_path, root(once, [3], media=[image]), features=features))
    two = [image, image | {"start": 5, "stop": 8}]
    assert clean(judge(tmp_path, root(twice, [3], media=two), features=features)), "two images side by side"
    whole = {**image, "stop": 8}
    grown = judge(
        tmp_path, root(once, [3], media=[image]), extend([*twice, 3, 5], [4], media=[whole]), features=features
    )
    assert cause(grown) == "placeholder" and "a run of 4 placeholders 60 became 7" in grown.findings[-1].message


def test_c07_other_contents_are_no_other_expansion(tmp_path: Path) -> None:
    """A rewrite that puts two runs side by side, or another picture in the place of one, did what it says."""
    given = tokenizer(tmp_path, {1: "a", 2: "b", 3: "c", 60: "<image>"})
    first, second = ({"start": 1, "stop": 3, "sha256": c * 32} for c in ("ab", "cd"))
    parent = root([1, 60, 60, 2, 60, 60, 60, 1], [3], media=[first, second | {"start": 4, "stop": 7}])
    closer = [1, 60, 60, 60, 60, 60, 1, 3], [first, second | {"start": 3, "stop": 6}]
    instead = [1, 60, 60, 60, 1, 3], [second | {"start": 1, "stop": 4}]
    larger = [1, 60, 60, 60, 2, 60, 60, 60, 1, 3], [first | {"stop": 4}, second | {"start": 5, "stop": 8}]
    for (prompt, media), found in ((closer, None), (instead, None), (larger, "W-REWRITE-KIND")):
        row = rewrite("elide", [*prompt, 2], [3], media=media)
        report = judge(tmp_path, parent, row, features=("media",), given=given)
        assert report.codes == ({found} if found else set()), report.to_text()


def test_d01_what_the_logprobs_are_must_be_known(tmp_path: Path) -> None:
    row = root([4], [0], output_logprobs=[-0.40761], sampling={"temperature": 0.5})
    assert judge(tmp_path, row).codes == {"E-LOGPROB-KIND"}
    assert clean(judge(tmp_path, {**row, "logprob_kind": "raw"}))
    assert clean(judge(tmp_path, {**row, "logprob_kind": "tempered", "output_logprobs": [-0.14293]}))
    assert clean(judge(tmp_path, {**row, "sampling": {"temperature": 1.0}})), "at T = 1 all kinds are one"


def test_d02_a_renormalised_logprob_needs_the_kept_mass(tmp_path: Path) -> None:
    row = root([4], [0], output_logprobs=[-0.47], logprob_kind="processed", sampling={"temperature": 1.0, "top_p": 0.8})
    assert judge(tmp_path, row).codes == {"E-SUPPORT-UNKNOWN"}
    assert clean(judge(tmp_path, {**row, "output_kept_logmass": [-0.22314]}))
    assert judge(tmp_path, {**row, "output_kept_logmass": [0.8]}).codes == {"E-KEPT-MASS"}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "E-LOGPROB-NULL"),
        ("NaN", "E-LOGPROB-NAN"),
        ("-Infinity", "E-LOGPROB-INF"),
        (-9999.0, "E-LOGPROB-SENTINEL"),
        (0.03, "E-LOGPROB-POSITIVE"),
        (1.0, "E-LOGPROB-POSITIVE"),
        (0.0005, "W-LOGPROB-ROUNDING"),
        (-0.5, None),
    ],
)
def test_d05_each_way_to_say_no_value(value: Any, code: str | None, tmp_path: Path) -> None:
    row = root([4], [5, 6], output_logprobs=[value, -0.5], logprob_kind="raw")
    assert judge(tmp_path, row).codes == ({code} if code else set())
    untrained = {**row, "output_logprobs": [None, -0.5], "output_sampled": [False, True]}
    assert clean(judge(tmp_path, untrained))


def test_d05_certainty_throughout(tmp_path: Path) -> None:
    def zeros(n: int) -> set[str]:
        return judge(tmp_path, root([4], [5] * n, output_logprobs=[0.0] * n, logprob_kind="raw")).codes

    assert zeros(8) == {"W-LOGPROB-ZERO"} and zeros(7) == set()


def test_d08_half_precision(tmp_path: Path) -> None:
    exact = np.linspace(-12.3456789, -0.2, 40).astype(np.float32)
    coarse = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    found = [
        judge(tmp_path, root([4], [5] * 40, output_logprobs=values.tolist(), logprob_kind="raw")).codes
        for values in (coarse, exact)
    ]
    assert found == [{"W-LOGPROB-QUANTISED"}, set()]


def test_e01_versions_within_a_call(tmp_path: Path) -> None:
    row = root([4], [5, 6, 7, 8], output_policy_versions=[3, 3, 4, 4], policy_version=4)
    assert clean(judge(tmp_path, row))
    assert judge(tmp_path, {**row, "policy_version": 3}).codes == {"E-POLICY-VERSION"}
    assert judge(tmp_path, {**row, "output_policy_versions": [4, 4, 3, 4]}).codes == {"W-VERSION-DECREASES"}


def test_e02_keys_and_values_of_old_weights(tmp_path: Path) -> None:
    report = judge(tmp_path, root([4], [5], policy_version=5, kv_policy_version=2))
    assert report.codes == {"W-KV-STALE"} and "3 versions old" in report.findings[0].message
    first, second = root([4], [5], policy_version=4), extend([4, 5, 6], [7], policy_version=5)
    assert judge(tmp_path, first, second).codes == {"W-KV-UNKNOWN"}
    assert clean(judge(tmp_path, first, {**second, "kv_policy_version": 5}))
    assert clean(judge(tmp_path, {**first, "policy_version": 5}, second)), "no weights changed"
    assert judge(tmp_path, first, {**second, "kv_policy_version": 6}).codes == {"E-KV-VERSION"}


@pytest.mark.parametrize(
    ("positions", "codes"), [(4, set()), (5, {"E-ROUTED-LENGTH"}), (3, {"E-ROUTED-LENGTH"})], ids=["4", "5", "3"]
)
def test_e04_routes_cover_the_inputs(positions: int, codes: set[str], tmp_path: Path) -> None:
    """Prompt 2 + action 3 tokens, 2 layers, 2 experts a token. One position too many is an error: dropping it is easy
    for a writer, and a reader that dropped it would guess at which end it stands."""
    moe = {"num_moe_layers": 2, "experts_per_token": 2, "num_experts": 4}
    row = root([5, 6], [7, 8, 9], routed_experts=[0, 1, 2, 3] * positions)
    report = judge(tmp_path, row, features=("routed_experts",), model=moe)
    assert report.codes == codes
    if positions == 5:
        assert report.findings[0].hint == "leave out the last position, whose token was no input"


def test_e04_experts_are_the_models_and_distinct(tmp_path: Path) -> None:
    moe = {"num_moe_layers": 2, "experts_per_token": 2, "num_experts": 4}
    for cell, code in (([0, 4], "E-ROUTED-ID"), ([2, 2], "E-ROUTED-TWICE")):
        row = root([5, 6], [7, 8, 9], routed_experts=[0, 1, 2, 3] * 3 + [0, 1, *cell])
        assert judge(tmp_path, row, features=("routed_experts",), model=moe).codes == {code}


def test_f05_a_first_token_has_no_predecessor(tmp_path: Path) -> None:
    assert judge(tmp_path, root([], [4, 5])).codes == {"E-NO-CONTEXT"}
    assert clean(judge(tmp_path, root([], [4, 5], output_sampled=[False, True])))


def test_h01_tokens_of_the_environment_are_not_trained(tmp_path: Path) -> None:
    mask = [True] * 4 + [False] * 3 + [True] * 5
    row = root([1, 2, 3], list(range(10, 22)), output_sampled=mask)
    assert clean(judge(tmp_path, row))
    assert judge(tmp_path, {**row, "output_loss_mask": [True] * 12}).codes == {"E-LOSS-UNSAMPLED"}
    tool = {"start": 7, "stop": 10, "kind": "tool_result"}
    assert clean(judge(tmp_path, {**row, "segments": [tool]}))
    report = judge(tmp_path, {**row, "segments": [tool], "output_sampled": None})
    assert report.codes == {"E-LOSS-CONTENT"} and "output[4]" in report.findings[0].message


def test_i02_ids_of_another_tokenizer(tmp_path: Path) -> None:
    given = tokenizer(tmp_path, ONES)
    row = root([6], [10], output_text="1")
    assert clean(judge(tmp_path, row, given=given))
    vector = valid("plain")
    report = validate(build(vector, tmp_path), tokenizer=given)
    assert report.codes == {"E-TOKENIZER-MISMATCH"}
    reasons = {r.code: r.reason for r in report.rules if r.status == "not run"}
    assert reasons["W-TEXT-MIRROR"] == "the tokenizer is not the trace's"


def plain_file(path: Path, metadata: bool = True, **columns: pa.Array) -> Path:
    vector = valid("plain")
    arrays = {
        "episode_id": pa.array(["e"]),
        "invocation_index": pa.array([0], pa.int32()),
        "model_id": pa.array(["m"]),
        "prompt_ids": pa.array([[5, 6]], pa.list_(pa.int32())),
        "output_ids": pa.array([[7, 8]], pa.list_(pa.int32())),
    } | columns
    raw = {b"memopd_trace": json.dumps(vector["metadata"]).encode()} if metadata else None
    pq.write_table(pa.table(arrays).replace_schema_metadata(raw), path)
    return path


def test_j04_nullability_is_judged_by_the_values(tmp_path: Path) -> None:
    element = pa.list_(pa.field("element", pa.int32(), nullable=True))
    assert clean(validate(plain_file(tmp_path / "a.parquet", prompt_ids=pa.array([[5, 6]], element))))
    report = validate(plain_file(tmp_path / "b.parquet", prompt_ids=pa.array([[5, None]], element)))
    assert report.codes == {"E-COLUMN-TYPE"}


def test_j07_metadata_dropped_by_another_tool(tmp_path: Path) -> None:
    report = validate(plain_file(tmp_path / "a.parquet", metadata=False))
    assert report.codes == {"E-META-MISSING"} and report.exit_code() == 3
    hint = report.findings[0].hint or ""
    assert "another tool may have dropped it" in hint and "spec/files.md, section 1" in hint


def test_j09_a_struct_of_lists_is_no_list_of_structs(tmp_path: Path) -> None:
    for starts, stops in (([0, 1], [1, 2, 3]), ([0, 1], [1, 2])):
        turned = pa.array([{"start": starts, "stop": stops, "kind": ["a"] * len(starts)}])
        report = validate(plain_file(tmp_path / "a.parquet", segments=turned))
        assert report.codes == {"E-COLUMN-TYPE"}, "of equal length or not: it is not guessed which belongs to which"


@pytest.mark.parametrize("kind", [pa.float16(), pa.binary(2)], ids=str)
def test_j10_half_floats_are_not_reinterpreted(kind: pa.DataType, tmp_path: Path) -> None:
    values = [np.float16(-0.5), np.float16(-1)] if kind == pa.float16() else [b"\x00\xb8", b"\x00\xbc"]
    report = validate(plain_file(tmp_path / "a.parquet", output_logprobs=pa.array([values], pa.list_(kind))))
    assert report.codes == {"E-COLUMN-TYPE"}


def test_j13_rows_written_twice(tmp_path: Path) -> None:
    """Equal or not, it is an error: no reader drops one of two rows, so both would be trained. The message tells."""
    first = root([5], [6])
    for output, words in (([6], "with the same ids"), ([7], "with other ids")):
        report = judge(tmp_path, first, {**first, "output_ids": output, "invocation_index": 0})
        assert report.codes == {"E-KEY-DUPLICATE"} and words in report.findings[0].message
