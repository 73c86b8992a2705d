"""What the tests of reports share: one report with every kind of outcome, and one made of hostile words."""

from __future__ import annotations

from pathlib import Path

from helpers_trace import build, changed, valid

from memopd_trace import Report, validate

# ends an XML element, a property, a command, a line, a link, a URI; and what no encoding can write
HOSTILE = "]]></failure>&\x00\x1b[2J\x85\u2028\ufffe\r\n::error::x\n##[add-mask]x](https://e.example)%0A,title=a:\u202e"
SURROGATE = "\udcff"  # how Python shows a byte of a file name that is not UTF-8


def mixed(folder: Path, *, profile: str = "train", max_findings: int = 100) -> Report:
    """A clean trace, one with two errors of one code and a warning, and a missing one."""
    good = build(valid("train"), folder, "good")
    nan = {"output_logprobs": [-0.7, "NaN", -1.6]}, {"output_logprobs": ["NaN", -1.6]}
    bad = changed("train", (0, nan[0] | {"kv_policy_version": 1}), (1, nan[1]))
    return validate([good, build(bad, folder, "bad"), folder / "gone.parquet"], profile, max_findings=max_findings)


def hostile(folder: Path) -> Report:
    """A trace whose strings and whose name try to break out of every format."""
    changes = {"episode_id": HOSTILE.replace("\ufffe", ""), "finish_reason": HOSTILE, "logprob_kind": HOSTILE}
    vector = changed("train", (0, changes), (1, changes))
    vector["metadata"]["producer"]["name"] = HOSTILE
    path = build(vector, folder, "t")
    odd = folder / f"a b%:,]]>&\n::error::{SURROGATE}##[add-mask]x](y).parquet"
    path.rename(odd)
    return validate([odd, folder / f"gone{HOSTILE}"])
