"""The codes of inputs that are refused: raised while opening or reading, before any row can be judged.

They are entries without a function: `memopd_trace.storage` and `memopd_trace.metadata` raise them as
`InputError`.
"""

from __future__ import annotations

from memopd_trace.rules.registry import Rule

REFUSALS: tuple[Rule, ...] = (
    Rule("E-NO-INPUT", "there is no such file or folder", "open", "An input MUST exist.", None),
    Rule(
        "E-UNREADABLE",
        "the file is damaged, or neither Parquet nor Arrow IPC",
        "open",
        "A trace file MUST be a whole Parquet or Arrow IPC file.",
        None,
    ),
    Rule(
        "E-INCOMPLETE",
        "a folder without a complete manifest, or with a part missing",
        "open",
        "A trace folder MUST hold a `manifest.json` marked complete, and every part that it lists.",
        None,
    ),
    Rule(
        "E-META-MISSING",
        "the file carries no trace metadata",
        "open",
        "The schema metadata MUST hold the key `memopd_trace`.",
        None,
    ),
    Rule(
        "E-META-INVALID",
        "the metadata is not JSON of the declared form",
        "open",
        "The value of `memopd_trace` MUST be JSON of the declared form.",
        None,
    ),
    Rule(
        "E-VERSION-MAJOR",
        "the file has another major version of the format",
        "open",
        "A reader MUST refuse a major version that it does not know.",
        None,
    ),
    Rule(
        "E-FEATURE-UNKNOWN",
        "the file requires a feature that this reader does not know",
        "open",
        "A reader MUST refuse a required feature that it does not know.",
        None,
    ),
    Rule(
        "E-SCHEMA",
        "a reader met a column that does not fit the schema",
        "open",
        "A reader MUST refuse a column that it cannot read as its declared type.",
        None,
    ),
)
