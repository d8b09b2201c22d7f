"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gammaray.errors import escaped

ALPHA = {"law": 1 / 2, "independence": 1 / 4, "choices": 1 / 8, "seed": 1 / 8}
"""Shares of the audit's probability of a false alarm; the other checks draw no conclusion from chance."""


class Status(str, Enum):
    """Result of a check, or of a whole audit."""

    PASSED = "passed"
    FAILED = "failed"
    INCONCLUSIVE = "inconclusive"
    """The evidence is too little, or something else prevented the check."""
    NOT_POSSIBLE = "not possible"
    """The server lacks a feature that the check needs."""


@dataclass(frozen=True)
class CheckResult:
    status: Status
    summary: str  # one sentence for people
    evidence: Mapping[str, Any] = field(default_factory=dict)  # tokens, positions and numbers, JSON-ready
    curl: str = ""  # command that shows a failure; empty without one

    def cleaned(self) -> CheckResult:
        """Return it with all text escaped, since much of it is the server's."""
        evidence: Mapping[str, Any] = _cleaned(self.evidence)
        return CheckResult(self.status, escaped(self.summary), evidence, escaped(self.curl))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, Mapping):
        return {_cleaned(key): _cleaned(one) for key, one in value.items()}
    return [_cleaned(one) for one in value] if isinstance(value, (list, tuple)) else value


def passed(summary: str, **evidence: Any) -> CheckResult:
    """Return the result of a check that found nothing wrong."""
    return CheckResult(Status.PASSED, summary, evidence)


def failed(summary: str, curl: str, **evidence: Any) -> CheckResult:
    """Return the result of a check that found a fault, which a command shows."""
    return CheckResult(Status.FAILED, summary, evidence, curl)


class Undecided(Exception):
    """A check ends early, with this status and reason."""

    def __init__(self, status: Status, reason: str) -> None:
        self.status = status
        super().__init__(reason)


def not_possible(reason: str) -> Undecided:
    """Return the exception of a check whose feature the server lacks."""
    return Undecided(Status.NOT_POSSIBLE, reason)


def inconclusive(reason: str) -> Undecided:
    """Return the exception of a check without enough evidence."""
    return Undecided(Status.INCONCLUSIVE, reason)


@dataclass(frozen=True)
class Finding:
    """A check's result, with what it took."""

    check: str
    result: CheckResult
    requests: int
    tokens: int
    seconds: float
