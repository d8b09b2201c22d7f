"""Runs an audit: the probe, then each check, and what they spent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace

from gammaray.audit import chance, limits, parameters, reference, sameness
from gammaray.audit.answers import AnswerError
from gammaray.audit.endpoint import RefusedError
from gammaray.audit.findings import CheckResult, Finding, Status, Undecided
from gammaray.audit.sameness import Check
from gammaray.audit.subject import MODES, WHOLE, Mode, Subject
from gammaray.errors import DeadlineExceededError, GammarayError, InvalidArgumentError, UnavailableError

_ONCE = (WHOLE,)

CHECKS: dict[str, tuple[Check, Sequence[Mode]]] = {
    "logprob-zero": (limits.check_logprob_zero, MODES),
    "greedy": (sameness.check_greedy, MODES),
    "seed": (sameness.check_seed, MODES),
    "choices": (chance.check_choices, _ONCE),
    "batch": (sameness.check_batch, _ONCE),
    "stream": (sameness.check_stream, _ONCE),
    "usage": (limits.check_usage, MODES),
    "max-tokens": (limits.check_max_tokens, MODES),
    "min-tokens": (limits.check_min_tokens, MODES),
    "stop": (limits.check_stop, MODES),
    "top-p": (parameters.check_top_p, MODES),
    "top-k": (parameters.check_top_k, MODES),
    "min-p": (parameters.check_min_p, MODES),
    "bias": (parameters.check_bias, MODES),
    "penalties": (parameters.check_penalties, MODES),
    "json-schema": (limits.check_json_schema, MODES),
    "probabilities": (reference.check_probabilities, _ONCE),
    "independence": (chance.check_independence, _ONCE),
    "law": (chance.check_law, _ONCE),
}
"""Checks by name, and the ways in which each asks, in their order: `law` takes what is left of the budget."""


async def run_audit(subject: Subject, names: Collection[str]) -> AsyncIterator[Finding]:
    """Run checks in order; keep and yield each finding. GammarayError if the server cannot be asked."""
    try:
        await subject.probe()
    except GammarayError:
        raise
    except Exception as error:  # of Undecided, or what an answer of another form leads to
        raise UnavailableError(f"{subject.server.url}: {_kind(error)}{error}") from None
    for name, (check, modes) in CHECKS.items():
        if name in names:
            subject.findings[name] = await _found(subject, name, check, modes)
            yield subject.findings[name]


async def _found(subject: Subject, name: str, check: Check, modes: Sequence[Mode]) -> Finding:
    spent = subject.server.spent
    before, started = (spent.requests, spent.tokens), time.perf_counter()
    subject.tell(name)
    subject.so_far = None

    def finding(result: CheckResult) -> Finding:
        seconds = time.perf_counter() - started
        return Finding(name, result, spent.requests - before[0], spent.tokens - before[1], seconds)

    # Where streams lose text, other checks of streams would say so again.
    modes = [mode for mode in modes if not (mode.is_streamed and subject.failed("stream"))]
    possible = [mode for mode in modes if mode not in subject.absent] or _ONCE
    views = [subject if mode == WHOLE else replace(subject, mode=mode) for mode in possible]
    try:
        results = await asyncio.gather(*(_result(view, check) for view in views))
    except asyncio.CancelledError:
        subject.findings[name] = finding(subject.so_far or CheckResult(Status.INCONCLUSIVE, "interrupted"))
        raise
    return finding(_joined(dict(zip(possible, results, strict=True))).cleaned())


async def _result(subject: Subject, check: Check) -> CheckResult:
    """Return what a check finds in one way; every error but a cancellation is a result."""
    try:
        return await check(subject)
    except Undecided as reason:
        return CheckResult(reason.status, str(reason))
    except RefusedError as error:
        return CheckResult(Status.NOT_POSSIBLE, f"the server refuses it: {error}")
    except AnswerError as error:
        return CheckResult(Status.FAILED, str(error), curl=error.curl)
    except InvalidArgumentError as error:
        return CheckResult(Status.INCONCLUSIVE, f"alternatives are no distribution: {error}")
    except (DeadlineExceededError, UnavailableError) as error:
        result = CheckResult(Status.INCONCLUSIVE, f"a request failed: {error}")
        if subject.so_far is not None:
            so_far = subject.so_far
            result = replace(so_far, summary=f"{so_far.summary}; then {result.summary}")
        return result
    except Exception as error:  # the answers are of another program, and the other checks are to be made
        return CheckResult(Status.INCONCLUSIVE, f"the check ended with {_kind(error)}{error}")


def _kind(error: Exception) -> str:
    return "" if isinstance(error, Undecided) else f"{type(error).__name__}: "


def _joined(results: dict[Mode, CheckResult]) -> CheckResult:
    """Return the result over all ways: one that is not possible counts only if no other was."""
    order = [Status.FAILED, Status.INCONCLUSIVE, Status.PASSED, Status.NOT_POSSIBLE]
    status = min((result.status for result in results.values()), key=order.index)
    those = {mode: result for mode, result in results.items() if result.status is status}
    (mode, first), *others = those.items()
    summary = first.summary if mode == WHOLE else f"{mode}: {first.summary}"
    if others:
        summary += f"; also {', '.join(str(other) for other, _ in others)}"
    evidence = {**first.evidence}
    if len(results) > 1:
        evidence["ways"] = {str(m): f"{r.status.value}: {r.summary}" for m, r in results.items()}
    return CheckResult(status, summary, evidence, first.curl)


def overall(findings: Collection[Finding]) -> Status:
    """Return an audit's result: failed if a check is, passed if one passed and none is inconclusive."""
    found = {finding.result.status for finding in findings}
    if Status.FAILED in found:
        return Status.FAILED
    is_passed = Status.PASSED in found and Status.INCONCLUSIVE not in found
    return Status.PASSED if is_passed else Status.INCONCLUSIVE
