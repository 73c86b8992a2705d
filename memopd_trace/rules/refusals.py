"""The codes of inputs that are refused, as entries without a function: all are raised as `InputError`.

`REFUSALS` are raised while opening or reading a trace (`memopd_trace.storage`, `memopd_trace.metadata`), before any
row can be judged. `RUN_REFUSALS` are raised by `score`, `audit` and `train`; the validator knows their pages only.
Codes of scores that are refused there and found here (`E-SCORES-STATE`…) are rules: `scores.py`, `scorefiles.py`.
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
        "E-LIMIT",
        "the file asks for more than a reader takes on",
        "open",
        "A file MUST NOT ask a reader for more than the limits.",
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

RUN_REFUSALS: tuple[Rule, ...] = (
    Rule(
        "E-MODEL-LOAD",
        "a model cannot be loaded",
        "run",
        "A model MUST be a Transformers folder with safetensors and tokenizer files, a `.gguf` file, or a hub name.",
        None,
        profiles=(),
    ),
    Rule(
        "E-MODEL-UNSUPPORTED",
        "a model cannot run a state exactly",
        "run",
        "A state MUST be run exactly as recorded or refused by name.",
        None,
        profiles=(),
    ),
    Rule("E-NONFINITE", "a teacher's logits are NaN or infinite", "run", "A score MUST be finite.", None, profiles=()),
    Rule(
        "E-SCORES-OTHER-RUN",
        "a scores folder holds another run",
        "run",
        "A scores folder MUST hold one run.",
        None,
        profiles=(),
    ),
    Rule(
        "E-NO-TARGETS",
        "nothing in a trace is to be trained",
        "run",
        "A trace given to training MUST hold tokens to be trained.",
        None,
        profiles=(),
    ),
    Rule(
        "E-ID-PADDED",
        "a token to be trained is beyond the tokenizer",
        "run",
        "A trained id MUST be one of the tokenizer's real ids.",
        None,
        profiles=(),
    ),
    Rule(
        "E-AUDIT-NO-LOGPROBS",
        "nothing to audit",
        "run",
        "An audited trace MUST hold log-probabilities of a known kind.",
        None,
        profiles=(),
    ),
)
