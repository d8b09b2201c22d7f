"""Sessions with a LoRA adapter are served by workers that have it, with the same weights."""

from __future__ import annotations

import pytest

from gammaray.errors import InvalidArgumentError, ModelChangedError, UnavailableError
from gammaray.v1 import target_service_pb2 as pb
from gammaray.v1 import types_pb2
from orchestrator.workers.verifier import check_served
from services.streaming.messages import Model
from services.target.worker import check_identity
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of
from tests.support.workers.scripted_workers import PROMPT, continuation, finish, make_session, scripted

pytestmark = pytest.mark.integration

BASE = "a" * 64 + "/float32"
SQL, OTHER_SQL = f"{BASE}/lora/1", f"{BASE}/lora/2"


def adapted(name="sql"):
    session = make_session(max_tokens=12)
    session.adapter = name
    return session


async def test_session_goes_only_to_a_worker_with_its_adapter():
    async with (
        scripted("target", identity=BASE) as plain,
        scripted("target", identity=BASE, adapters={"sql": SQL}) as capable,
        fleet_of(plain, capable) as fleet,
    ):
        assert fleet.adapters == ["sql"]
        fleet.targets.links[capable.address].sessions |= {"x", "y"}  # least loaded is the other one
        session = adapted()
        drafter, verifier = clients(fleet, session)
        await finish(session, drafter, verifier, 0)
        assert emitted(session) == continuation(PROMPT, 12)
        assert plain.blocks == []
        spec = capable.blocks[0].spec
        assert (spec.adapter, spec.model_identity, session.model_identity) == ("sql", SQL, SQL)


async def test_session_without_an_adapter_goes_to_any_worker():
    async with (
        scripted("target", identity=BASE, adapters={"sql": SQL}) as capable,
        fleet_of(capable) as fleet,
    ):
        session = make_session(max_tokens=3)
        await finish(session, *clients(fleet, session), 0)
        assert (capable.blocks[0].spec.adapter, session.model_identity) == ("", BASE)


async def test_adapter_of_other_weights_does_not_continue_a_session():
    async with (
        scripted("target", identity=BASE, adapters={"sql": OTHER_SQL}) as changed,
        fleet_of(changed) as fleet,
    ):
        session = adapted()
        session.model_identity = SQL
        drafter, verifier = clients(fleet, session, wait_s=0.3)
        with pytest.raises(ModelChangedError):
            await finish(session, drafter, verifier, 0)
        with pytest.raises(ModelChangedError):
            await check_served(fleet.targets, "s", SQL, 0.1)
        await check_served(fleet.targets, "s", OTHER_SQL, 0.1)
        assert changed.blocks == []


async def test_session_waits_for_a_worker_with_its_adapter():
    async with scripted("target", identity=BASE) as plain, fleet_of(plain) as fleet:
        drafter, verifier = clients(fleet, adapted(), wait_s=0.3)
        with pytest.raises(UnavailableError):
            await finish(adapted(), drafter, verifier, 0)
        assert plain.blocks == []


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


def test_worker_without_adapters_says_so():
    block = pb.VerifyBlock(session_id="s", spec=types_pb2.SessionSpec(adapter="sql"))
    with pytest.raises(InvalidArgumentError, match="got sql, allowed: none: this worker serves no adapter"):
        check_identity(block, Model("m", 97, 100, ""))
