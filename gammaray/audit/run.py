"""Runs an audit: the probe, then each check, and what they spent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import replace

from gammaray.audit.answers import AnswerError
from gammaray.audit.chance import check_choices, check_independence, check_law
from gammaray.audit.endpoint import RefusedError
from gammaray.audit.findings import CheckResult, Finding, Status, Undecided
from gammaray.audit.limits import (
    check_json_schema,
    check_logprob_zero,
    check_max_tokens,
    check_min_tokens,
    check_stop,
    check_usage,
)
from gammaray.audit.parameters import check_bias, check_min_p, check_penalties, check_top_k, check_top_p
from gammaray.audit.reference import check_probabilities
from gammaray.audit.sameness import Check, check_batch, check_greedy, check_seed, check_stream
from gammaray.audit.subject import Subject
from gammaray.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    UnauthenticatedError,
    UnavailableError,
)

CHECKS: dict[str, Check] = {
    "logprob-zero": check_logprob_zero,
    "greedy": check_greedy,
    "seed": check_seed,
    "choices": check_choices,
    "batch": check_batch,
    "stream": check_stream,
    "usage": check_usage,
    "max-tokens": check_max_tokens,
    "min-tokens": check_min_tokens,
    "stop": check_stop,
    "top-p": check_top_p,
    "top-k": check_top_k,
    "min-p": check_min_p,
    "bias": check_bias,
    "penalties": check_penalties,
    "json-schema": check_json_schema,
    "probabilities": check_probabilities,
    "independence": check_independence,
    "law": check_law,
}
"""Checks by name, in their order: `law` takes what is left of the budget."""


async def run_audit(subject: Subject, names: Collection[str]) -> AsyncIterator[Finding]:
    """Run checks in their order, put their findings into `subject.findings`, and yield each.

    Raises:
        GammarayError: The server cannot be reached at all, or refuses the key.
    """
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
        result = CheckResult(Status.FAILED, str(error))
    except InvalidArgumentError as error:
        result = CheckResult(Status.INCONCLUSIVE, f"alternatives are no distribution: {error}")
    except UnauthenticatedError:
        raise
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
    return (
        Status.PASSED if Status.PASSED in found and Status.INCONCLUSIVE not in found else Status.INCONCLUSIVE
    )
