"""Whether a rule can judge a file as far as it was read: one answer for the validator and the recorder."""

from __future__ import annotations

from memopd_trace.rules.files import FileContext
from memopd_trace.rules.registry import Rule
from memopd_trace.rules.structure import REQUIRED


def may_judge(rule: Rule, file: FileContext) -> bool:
    """Whether every column that it reads fits, no reason of its own speaks against it, and there is a value to see."""
    return not unfit(rule, file) and not (rule.unless and rule.unless(file)) and not vacuous(rule, file)


def unfit(rule: Rule, file: FileContext) -> str | None:
    """A column that the rule reads and that does not fit the schema."""
    columns = rule.columns if rule.phase == "file" else (*REQUIRED, *rule.columns)
    if rule.phase == "shape":  # it looks at the other columns all the same
        columns = REQUIRED
    return next((name for name in columns if name in file.misfits), None)


def vacuous(rule: Rule, file: FileContext) -> bool:
    """Whether the rule has had nothing to look at so far."""
    return bool(rule.needs) and not any(name in file.first_value for name in rule.needs)
