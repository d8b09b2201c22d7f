"""Faults of one parameter in one way of asking, planted before a tiny honest server; and that server."""

import pytest

from gammaray.audit.endpoint import Endpoint, Spent
from gammaray.audit.findings import Status
from gammaray.audit.run import CHECKS, run_audit
from gammaray.audit.subject import Subject, default_prompts
from tests.support.audit_helpers import MATRIX, Proxy
from tests.support.http_helpers import listening
from tests.support.tiny_server import tiny_server

LONG = ("bias", "json-schema", "law", "max-tokens", "penalties", "seed", "stop")
# Without a forward pass over a given text, the tiny server's log-probabilities cannot be compared with one.
ALL = [name for name in CHECKS if name not in ("law", "probabilities")]


async def results(url, names, seed=1):
    server = Endpoint(url, "tiny", "", "NO_KEY", 9, Spent(100_000), 300.0)
    subject = Subject(server, None, default_prompts(), 0.005, seed)
    try:
        return {finding.check: finding.result async for finding in run_audit(subject, names)}
    finally:
        await subject.close()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 1001])
async def test_honest_server_passes_in_every_way(seed):
    async with listening(tiny_server()) as url, Proxy(url, []).running() as proxied:
        found = await results(proxied, ALL, seed)
    assert {
        name: result.summary for name, result in found.items() if result.status is not Status.PASSED
    } == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.nightly] * (check in LONG))
        for check in sorted({fault.check for fault in MATRIX.values()})
    ],
)
async def test_faults_of_each_parameter_and_way_are_found_by_its_check(check):
    missed = {}
    async with listening(tiny_server()) as url:
        for name, fault in MATRIX.items():
            if fault.check == check:
                async with Proxy(url, [fault]).running() as proxied:
                    result = (await results(proxied, [check]))[check]
                if result.status is not Status.FAILED:
                    missed[name] = result.summary
    assert missed == {}
