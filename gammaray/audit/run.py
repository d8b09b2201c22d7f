"""Runs an audit: the probe, then each check, and what they spent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import replace

from gammaray.audit import chance, limits, parameters, reference, sameness
from gammaray.audit.answers import AnswerError
from gammaray.audit.endpoint import RefusedError
from gammaray.audit.findings import CheckResult, Finding, Status, Undecided
from gammaray.audit.sameness import Check
from gammaray.audit.subject import Subject
from gammaray.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError

CHECKS: dict[str, Check] = {
    "logprob-zero": limits.check_logprob_zero,
    "greedy": sameness.check_greedy,
    "seed": sameness.check_seed,
    "choices": chance.check_choices,
    "batch": sameness.check_batch,
    "stream": sameness.check_stream,
    "usage": limits.check_usage,
    "max-tokens": limits.check_max_tokens,
    "min-tokens": limits.check_min_tokens,
    "stop": limits.check_stop,
    "top-p": parameters.check_top_p,
    "top-k": parameters.check_top_k,
    "min-p": parameters.check_min_p,
    "bias": parameters.check_bias,
    "penalties": parameters.check_penalties,
    "json-schema": limits.check_json_schema,
    "probabilities": reference.check_probabilities,
    "independence": chance.check_independence,
    "law": chance.check_law,
}
"""Checks by name, in their order: `law` takes what is left of the budget."""


async def run_audit(subject: Subject, names: Collection[str]) -> AsyncIterator[Finding]:
    """Run checks in their order, put their findings into `subject.findings`, and yield each."""
    await subject.probe()
    for name, check in CHECKS.items():
        if name in names:
            subject.findings[name] = await _found(subject, name, check)
            yield subject.findings[name]


async def _found(subject: Subject, name: str, check: Check) -> Finding:
    spent = subject.server.spent
    before, started = (spent.requests, spent.tokens), time.perf_counter()
    subject.tell(name)
    subject.so_far = None

    def finding(result: CheckResult) -> Finding:
        seconds = time.perf_counter() - started
        return Finding(name, result, spent.requests - before[0], spent.tokens - before[1], seconds)

    try:
        result = await check(subject)
    except asyncio.CancelledError:
        subject.findings[name] = finding(subject.so_far or CheckResult(Status.INCONCLUSIVE, "interrupted"))
        raise
    except Undecided as reason:
        result = CheckResult(reason.status, str(reason))
    except RefusedError as error:
        result = CheckResult(Status.NOT_POSSIBLE, f"the server refuses it: {error}")
    except AnswerError as error:
        result = CheckResult(Status.FAILED, str(error), curl=error.curl)
    except InvalidArgumentError as error:
        result = CheckResult(Status.INCONCLUSIVE, f"alternatives are no distribution: {error}")
    except (DeadlineExceededError, UnavailableError) as error:
        result = CheckResult(Status.INCONCLUSIVE, f"a request failed: {error}")
        if subject.so_far is not None:
            so_far = subject.so_far
            result = replace(so_far, summary=f"{so_far.summary}; then {result.summary}")
    return finding(result)


def overall(findings: Collection[Finding]) -> Status:
    """Return an audit's result: failed if a check is, passed if one passed and none is inconclusive."""
    found = {finding.result.status for finding in findings}
    if Status.FAILED in found:
        return Status.FAILED
    is_passed = Status.PASSED in found and Status.INCONCLUSIVE not in found
    return Status.PASSED if is_passed else Status.INCONCLUSIVE
