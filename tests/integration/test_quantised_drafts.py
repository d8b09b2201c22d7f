"""The text does not depend on the weights of the draft: coupled verification, through the schedulers."""

import pytest

from benchmarks.pair_loop import Ask, Pair
from gammaray.config import DraftSettings, TargetSettings
from gammaray.demo_pair import resolve_model
from services.engine.loader import load_worker_engine
from services.engine.native.library import load_kernel
from tests.support.engine_helpers import draft_scheduler, target_scheduler
from tests.support.workers.service_helpers import worker_process
from tests.support.workers.workers_helpers import Link, propose_block

pytestmark = [pytest.mark.integration, pytest.mark.slow]

WEIGHTS = ("auto", "int8")
GAMMAS = (1, 6)


@pytest.fixture(scope="module")
def pairs():
    target = load_worker_engine(resolve_model("demo", "target"), TargetSettings(device="cpu"))
    scheduler = target_scheduler(target)
    settings = {weights: DraftSettings(device="cpu", draft_weights=weights) for weights in WEIGHTS}
    path = resolve_model("demo", "draft")
    return {
        weights: Pair(scheduler, draft_scheduler(load_worker_engine(path, own)))
        for weights, own in settings.items()
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_plain_decoding_whatever_the_weights(pairs, temperature):
    accepted = dict.fromkeys(WEIGHTS, 0)
    tested = dict.fromkeys(WEIGHTS, 0)
    for seed in range(3):
        ask = Ask(tuple(range(5 + seed, 40 + seed)), 64, temperature, seed, ())
        plain = pairs["auto"].complete(ask, 0).token_ids
        for weights, pair in pairs.items():
            for gamma in GAMMAS:
                text = pair.complete(ask, gamma)
                assert text.token_ids == plain
                accepted[weights] += sum(cycle.num_accepted for cycle in text.cycles)
                tested[weights] += sum(cycle.num_tested for cycle in text.cycles)
    share = {weights: accepted[weights] / tested[weights] for weights in WEIGHTS}
    assert share["int8"] > share["auto"] - 0.05


async def test_draft_worker_computes_with_the_weights_of_its_option():
    with worker_process("draft", "demo", "--draft-weights", "int8") as (_, address):
        link = Link(address, "draft")
        assert (await link.info()).kernel == f"{load_kernel().variant}, int8 weights"
        assert (await link.ask(propose_block([5, 6, 7], 3))).proposal.token_ids
        await link.close()
