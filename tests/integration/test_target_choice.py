"""Sessions go to targets with their adapter, of the same weights, that have the library of their grammar."""

import dataclasses
from contextlib import AsyncExitStack

import pytest

from gammaray.errors import FailedPreconditionError, InvalidArgumentError, ModelChangedError, UnavailableError
from gammaray.grammar.matcher import grammar_identity
from gammaray.v1 import target_service_pb2 as pb
from gammaray.v1 import types_pb2
from orchestrator.workers.verifier import check_served
from services.streaming.messages import Model
from services.target_worker.worker import check_identity
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of
from tests.support.workers.scripted_workers import PROMPT, continuation, finish, make_session, scripted

pytestmark = pytest.mark.integration

BASE = "a" * 64 + "/float32"
SQL, OTHER_SQL = f"{BASE}/lora/1", f"{BASE}/lora/2"
PLAIN = {"identity": BASE}
ADAPTED = {"identity": BASE, "adapters": {"sql": SQL}}
OWN = grammar_identity()
FOREIGN = "llguidance-1.9.1"
GRAMMAR = "start: /[a-z]*/"


def session_with(adapter="", identity="", grammar=""):
    session = make_session(max_tokens=12)
    params = dataclasses.replace(session.params, grammar=grammar)
    session = dataclasses.replace(session, params=params, adapter=adapter)
    session.model_identity = identity
    return session


@pytest.mark.parametrize(
    ("targets", "asked", "served"),
    [
        pytest.param([PLAIN, ADAPTED], {"adapter": "sql"}, (1, SQL), id="adapter"),
        pytest.param([ADAPTED], {}, (0, BASE), id="no adapter"),
        pytest.param(
            [{**PLAIN, "grammars": FOREIGN}, {"grammars": OWN}], {"grammar": GRAMMAR}, (1, ""), id="library"
        ),
        pytest.param([{"grammars": ""}], {"grammar": GRAMMAR}, (0, ""), id="unknown library"),
        pytest.param([{"grammars": FOREIGN}], {}, (0, ""), id="no grammar"),
    ],
)
async def test_session_goes_to_a_target_that_serves_it(targets, asked, served):
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted("target", **given)) for given in targets]
        fleet = await stack.enter_async_context(fleet_of(*workers))
        session, (index, identity) = session_with(**asked), served
        drafter, verifier = clients(fleet, session)
        verifier.prefer(session, workers[0].address)
        fleet.targets.links[workers[-1].address].sessions |= {"x", "y"}  # least loaded is the other one
        await finish(session, drafter, verifier, 0)
        assert emitted(session) == continuation(PROMPT, 12)
        assert [bool(worker.blocks) for worker in workers] == [at == index for at in range(len(workers))]
        spec = workers[index].blocks[0].spec
        assert (spec.adapter, spec.model_identity) == (session.adapter, identity)
        assert session.model_identity == identity


@pytest.mark.parametrize(
    ("target", "asked", "error"),
    [
        (PLAIN, {"adapter": "sql"}, UnavailableError),
        ({**PLAIN, "adapters": {"sql": OTHER_SQL}}, {"adapter": "sql", "identity": SQL}, ModelChangedError),
        ({"grammars": FOREIGN}, {"grammar": GRAMMAR}, FailedPreconditionError),
    ],
    ids=["no adapter", "other weights", "other library"],
)
async def test_session_waits_for_a_target_that_serves_it(target, asked, error):
    async with scripted("target", **target) as worker, fleet_of(worker) as fleet:
        session = session_with(**asked)
        with pytest.raises(error) as caught:
            await finish(session, *clients(fleet, session, wait_s=0.3), 0)
        assert worker.blocks == []
        if error is ModelChangedError:
            with pytest.raises(ModelChangedError):
                await check_served(fleet.targets, "s", SQL, 0.1)
            await check_served(fleet.targets, "s", OTHER_SQL, 0.1)
        if error is FailedPreconditionError:
            assert FOREIGN in str(caught.value)
            assert OWN in str(caught.value)


@pytest.mark.parametrize(
    ("adapter", "identity", "error"),
    [
        ("", BASE, None),
        ("sql", SQL, None),
        ("sql", "", None),
        ("sql", BASE, ModelChangedError),
        ("", SQL, ModelChangedError),
        ("legal", SQL, ModelChangedError),
        ("legal", "", InvalidArgumentError),
    ],
)
def test_worker_compares_adapter_and_identity(adapter, identity, error):
    spec = types_pb2.SessionSpec(adapter=adapter, model_identity=identity)
    block = pb.VerifyBlock(session_id="s", spec=spec)
    model = Model("m", 97, 100, "", identity=BASE, adapters={"sql": SQL})
    if error is None:
        check_identity(block, model)
        return
    with pytest.raises(error):
        check_identity(block, model)
    with pytest.raises(InvalidArgumentError, match="allowed: none: this worker serves no adapter"):
        check_identity(
            pb.VerifyBlock(session_id="s", spec=types_pb2.SessionSpec(adapter="x")), Model("m", 97, 100, "")
        )
