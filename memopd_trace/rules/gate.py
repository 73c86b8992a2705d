"""Whether a rule can judge a file as far as it was read: one answer for the validator and the recorder."""

from __future__ import annotations

from memopd_trace.rules.files import FileContext
from memopd_trace.rules.registry import Rule
from memopd_trace.rules.structure import REQUIRED

NO_VALUES = "no row has a value in its columns"


def may_judge(rule: Rule, file: FileContext) -> bool:
    """Whether every column that it reads fits, no reason of its own speaks against it, and there is a value to see."""
    return not unfit(rule, file) and silence(rule, file) is None


def silence(rule: Rule, file: FileContext) -> str | None:
    """Why the rule has had nothing to judge so far, whatever the columns' types."""
    if (reason := file.inputs.lack(rule.wants)) or (rule.unless and (reason := rule.unless(file))):
        return reason
    if not file.rows and rule.phase != "file":
        return "there is no row"
    return NO_VALUES if vacuous(rule, file) else None


def unfit(rule: Rule, file: FileContext) -> str | None:
    """A column that the rule reads and that does not fit the schema."""
    columns = rule.columns if rule.phase == "file" else (*REQUIRED, *rule.columns)
    if rule.phase == "shape":  # it looks at the other columns all the same
        columns = REQUIRED
    return next((name for name in columns if name in file.misfits), None)


def vacuous(rule: Rule, file: FileContext) -> bool:
    """Whether the rule has had nothing to look at so far."""
    return bool(rule.needs) and not any(name in file.first_value for name in rule.needs)
