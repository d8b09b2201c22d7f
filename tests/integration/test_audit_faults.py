"""`gammaray audit` against a real gammaray: honest, and through a proxy that plants a fault."""

import pytest

from gammaray.audit.findings import Status
from gammaray.audit.run import CHECKS, overall
from orchestrator.api.http.server.app import create_app
from tests.support.audit_helpers import FAULTS, Proxy, audited
from tests.support.http_helpers import listening
from tests.support.workers.service_helpers import running

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.nightly]

OTHERS = [name for name in CHECKS if name not in ("law", "independence")]
TOGETHER = (
    ("top_p ignored", "seed ignored", "usage counts one more", "bias ignored", "schema ignored"),
    ("top_k ignored", "choices equal", "min_tokens ignored", "streams lose a piece", "penalties ignored"),
    ("logprob 0.0", "one token too many", "stop ignored"),
    ("greedy at temperature 0.3", "min_p ignored"),
)
"""Every fault, several to an audit: one takes 15 s, most of it for honest answers."""


def statuses(subject):
    return {name: finding.result.status for name, finding in subject.findings.items()}


def test_every_fault_is_planted():
    assert sorted(name for names in TOGETHER for name in names) == sorted(FAULTS)


@pytest.mark.timeout(900)
async def test_honest_server_passes_every_check(redis_server, workers):
    async with running(redis_server, *workers) as orchestrator, listening(create_app(orchestrator)) as url:
        subject = await audited(url, "demo", [*OTHERS, "independence"], 60_000)
        assert set(statuses(subject).values()) == {Status.PASSED}
        assert overall(subject.findings.values()) is Status.PASSED
        # Too few tokens to say anything of the law.
        subject = await audited(url, "demo", ["law"], 2000)
        assert statuses(subject) == {"law": Status.INCONCLUSIVE}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
async def test_faults_are_found_by_their_own_checks_alone(redis_server, workers, names):
    faults = [FAULTS[name] for name in names]
    async with running(redis_server, *workers) as orchestrator, listening(create_app(orchestrator)) as url:
        async with Proxy(url, faults).running() as proxied:
            subject = await audited(proxied, "demo", OTHERS, 60_000)
    failed = {check for check, status in statuses(subject).items() if status is Status.FAILED}
    assert failed == {fault.check for fault in faults}
    for check in failed:
        assert subject.findings[check].requests <= 200
        assert "curl -sS " in subject.findings[check].result.curl
