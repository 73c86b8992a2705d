"""The log of a validation: what all rules came to in the inputs seen so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from memopd_trace.errors import InputError
from memopd_trace.places import Place
from memopd_trace.report import Finding, RuleResult, Status
from memopd_trace.rules import RULES
from memopd_trace.rules.registry import Hit, Rule


@dataclass(slots=True)
class Log:
    """What all rules came to: true counts, capped findings, who ran and why not."""

    codes: set[str]
    max_findings: int
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ran: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)

    def add(self, rule: Rule, path: Place, hit: Hit, row: int | None, key: tuple[str | None, int | None]) -> None:
        """Count a hit, and keep it as a finding while there is room."""
        if rule.code not in self.codes:
            return
        self.counts[rule.code] += 1
        if self.counts[rule.code] <= self.max_findings:
            self.findings.append(
                Finding(
                    code=rule.code,
                    severity=rule.severity,
                    path=str(path),
                    message=hit.message,
                    row=row,
                    episode_id=key[0],
                    invocation_index=key[1],
                    column=hit.column,
                    expected=hit.expected,
                    actual=hit.actual,
                    hint=hit.hint or rule.hint,
                    clause_url=rule.clause_url,
                )
            )

    def retract(self, code: str, episode_id: str) -> None:
        """Take back the one hit that a rule had in an episode of this trace."""
        if code in self.codes:
            self.counts[code] -= 1
            self.findings = [f for f in self.findings if (f.code, f.episode_id) != (code, episode_id)]

    def absorb(self, other: Log) -> None:
        """Add what another input came to; of its findings as many as there is room for."""
        kept = Counter({code: min(count, self.max_findings) for code, count in self.counts.items()})
        for finding in other.findings:
            if kept[finding.code] < self.max_findings:
                kept[finding.code] += 1
                self.findings.append(finding)
        self.counts += other.counts
        self.ran |= other.ran
        self.reasons = other.reasons | self.reasons
        self.blocked = other.blocked | self.blocked

    def refuse(self, path: Place, error: InputError) -> str:
        """Record that an input was refused; returns the code."""
        code = error.code or "E-UNREADABLE"
        self.add(RULES[code], path, Hit(None, error.message, hint=error.hint), None, (None, None))
        return code

    def results(self, rules: Iterable[Rule]) -> tuple[RuleResult, ...]:
        """What the rules came to; a refusal is named only where it happened."""
        return tuple(self._result(r) for r in rules if r.phase != "open" or self.counts[r.code])

    def _result(self, rule: Rule) -> RuleResult:
        count = self.counts[rule.code]
        status: Status = "pass"
        if count:
            status = "fail" if rule.severity == "error" else "warn"
        elif rule.code in self.blocked:
            return RuleResult(rule.code, "not run", 0, self.blocked[rule.code])
        elif rule.code not in self.ran:
            return RuleResult(rule.code, "not run", 0, self.reasons.get(rule.code, "the input was refused"))
        return RuleResult(rule.code, status, count)
