"""A few seconds of fuzzing: nothing hangs, breaks, leaks or is refused without a type."""

import pytest

from tests.fuzz.campaign import Campaign
from tests.fuzz.fuzz_run import run
from tests.fuzz.openapi_fuzz import SURFACE, schemathesis

SEED = 11
TIMEOUT_S = 200.0


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_fuzzing_finds_nothing(cluster):
    campaign = run(cluster, seconds=8, seed=SEED)
    print(campaign)
    assert not campaign.num_wrong, str(campaign)
    surfaces = {surface for surface, _ in campaign.counts}
    assert surfaces >= {"http", "grpc", "target stream", "draft stream", "hostile drafter", "hostile target"}


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_schemathesis_finds_nothing(cluster):
    campaign = Campaign(0, SEED)
    options = ("--phases", "fuzzing", "--max-examples", "8", "--no-shrink")
    await schemathesis(cluster.http, campaign, SEED, TIMEOUT_S, *options)
    assert not campaign.num_wrong, str(campaign)
    assert campaign.counts[SURFACE, "generated"] > 0
