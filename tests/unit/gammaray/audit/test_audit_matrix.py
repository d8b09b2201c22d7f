"""Faults of one parameter in one way of asking, planted before a tiny honest server; and that server."""

import pytest

from gammaray.audit.findings import Status
from gammaray.audit.run import CHECKS
from tests.support.audit_helpers import MATRIX, Proxy, audited
from tests.support.http_helpers import listening
from tests.support.tiny_server import tiny_server

LONG = ("bias", "json-schema", "law", "max-tokens", "penalties", "seed", "stop")
# Without a forward pass over a given text, the tiny server's log-probabilities cannot be compared with one.
ALL = [name for name in CHECKS if name not in ("law", "probabilities")]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 1001])
async def test_honest_server_passes_in_every_way(seed):
    async with listening(tiny_server()) as url, Proxy(url, []).running() as proxied:
        found = (await audited(proxied, "tiny", ALL, 100_000, seed)).findings
    assert [one for one in found.values() if one.result.status is not Status.PASSED] == []


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
                    result = (await audited(proxied, "tiny", [check], 100_000)).findings[check].result
                if result.status is not Status.FAILED:
                    missed[name] = result.summary
    assert missed == {}
