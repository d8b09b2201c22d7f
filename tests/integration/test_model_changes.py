"""Sessions and target models: a session continues only with the model that began it."""

import asyncio
import dataclasses

import pytest

from gammaray.errors import FailedPreconditionError, ModelChangedError
from gammaray.types import FinishReason, TokenOrigin
from orchestrator.storage.keys import Keys
from orchestrator.storage.session_store import RedisStore
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.workers.fleet_helpers import clients, emitted, fleet_of
from tests.support.workers.resume_helpers import first_chunks, request_of, resumed
from tests.support.workers.scripted_workers import PROMPT, continuation, finish, make_session, scripted, until
from tests.support.workers.service_helpers import complete, tokens_of
from tests.support.workers.service_helpers import running as orchestrating
from tests.support.workers.workers_helpers import running, spec_message, verify_block

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OLD, NEW = "a" * 64 + "/float32", "b" * 64 + "/float32"
DEMO = {"vocab_size": 2048, "max_context": 1024}


def stops_after(worker, count):
    """Have a worker vanish instead of answering a block."""

    def answer(block):
        if len(worker.blocks) <= count:
            return worker.work(block)
        worker.stopping = asyncio.create_task(worker.stop())
        return None

    worker.on_block = answer


@pytest.mark.parametrize("count", [3, 0], ids=["after some tokens", "before the first token"])
async def test_only_a_session_without_tokens_moves_to_another_model_when_its_target_fails(count):
    async with (
        scripted("target", identity=OLD) as first,
        scripted("target", identity=NEW) as foreign,
        scripted("target", identity=OLD) as second,
        fleet_of(first, foreign, second) as fleet,
    ):
        session = make_session(max_tokens=20)
        drafter, verifier = clients(fleet, session)
        verifier.prefer(session, first.address)
        stops_after(first, count)
        fleet.targets.links[second.address].sessions |= {"x", "y"}  # least loaded is the foreign one
        await finish(session, drafter, verifier, 0)
        assert emitted(session) == continuation(PROMPT, 20)
        used, other = (second, foreign) if count else (foreign, second)
        assert other.blocks == []
        assert used.blocks[0].spec.model_identity == session.model_identity == used.identity


async def test_target_that_restarts_with_another_model_is_refused_with_both_names():
    async with scripted("target", identity=OLD) as target, fleet_of(target) as fleet:
        session = make_session(max_tokens=20)
        drafter, verifier = clients(fleet, session, wait_s=6.0)
        stops_after(target, 3)
        work = asyncio.create_task(finish(session, drafter, verifier, 0))
        await until(lambda: not fleet.targets.links[target.address].is_up and hasattr(target, "stopping"))
        await target.stopping
        num_blocks, target.identity, target.on_block = len(target.blocks), NEW, target.work
        await target.start()
        with pytest.raises(ModelChangedError, match=f"{OLD} .* {NEW}") as caught:
            await asyncio.wait_for(work, 60)
        assert (caught.value.began, caught.value.serving) == (OLD, (NEW,))
        assert emitted(session) == continuation(PROMPT, 3)
        assert len(target.blocks) == num_blocks


async def test_worker_itself_refuses_the_session_of_another_model(tmp_path):
    model = tiny_model("llama", tmp_path, seed=1)
    prompt = random_tokens(12, seed=3)
    async with running("target", model) as (link, _):
        own = (await link.info()).model_identity
        assert own.endswith("/float32")
        for wanted in ("", own):
            spec = spec_message()
            spec.model_identity = wanted
            assert (await link.ask(verify_block(prompt, spec=spec))).WhichOneof("outcome") == "verdict"
        spec.model_identity = OLD
        error = (await link.ask(verify_block(prompt, session_id="t", spec=spec))).error
        assert error.code == FailedPreconditionError.status.value[0]
        assert OLD in error.message
        assert own in error.message


@pytest.mark.usefixtures("empty")
async def test_store_keeps_the_first_model_and_refuses_tokens_of_another(redis):
    store = RedisStore(redis, ttl_s=60)

    async def commit(session, token, identity):
        session.model_identity = identity
        session.commit([token])
        await store.append(session, [token], [TokenOrigin.BONUS])

    session = make_session(max_tokens=9)
    await store.create(session, b"")
    assert (await store.read("s")).model_identity == ""
    await commit(session, 4, "")  # a worker that does not say what it is
    await commit(session, 5, OLD)
    await commit(session, 6, OLD)
    for other in (NEW, ""):
        with pytest.raises(ModelChangedError, match=OLD):
            await commit(session, 7, other)
        del session.token_ids[-1]
    stored = await store.read("s")
    assert (stored.model_identity, stored.token_ids) == (OLD, (4, 5, 6))


async def test_resume_and_next_turn_after_the_target_was_replaced(redis_server):
    request, done = request_of(max_tokens=24), request_of(max_tokens=4)
    async with scripted("target", identity=OLD, **DEMO) as old:
        async with orchestrating(redis_server, old.address, "") as one:
            # A salt of its own: the next request would be proposed this output, and end within two chunks.
            whole = await complete(one, dataclasses.replace(request, session_id="whole", cache_salt="x"))
            chunks = await first_chunks(one, request, 2)
            finished = await complete(one, done)
            await one.leases.settled()
        async with scripted("target", identity=NEW, **DEMO) as new:
            settings = {"worker_wait_s": 0.3}
            async with orchestrating(redis_server, new.address, "", **settings) as other:
                follow = dataclasses.replace(done, prompt="\nmore", turn=1)
                for refused in (resumed(request, chunks), follow, follow):
                    with pytest.raises(ModelChangedError, match=f"{OLD} .* {NEW}") as caught:
                        await complete(other, refused)
                    assert caught.value.session_id == refused.session_id
                assert new.blocks == []
                # What is finished needs no model, and new sessions take the one that is there.
                assert tokens_of(await complete(other, resumed(done, []))) == tokens_of(finished)
                assert len(tokens_of(await complete(other, request_of(max_tokens=4)))) == 4
        async with orchestrating(redis_server, old.address, "") as again:  # the old model comes back
            chunks += await complete(again, resumed(request, chunks))
            assert tokens_of(chunks) == tokens_of(whole)
            turn = await complete(again, follow)
            assert turn[-1].finish_reason is FinishReason.LENGTH
            assert (await again.store.read(done.session_id)).model_identity == OLD


async def test_resume_waits_for_a_worker_of_the_old_model(redis_server):
    request = request_of(max_tokens=24)
    async with (
        scripted("target", identity=OLD, **DEMO) as old,
        scripted("target", identity=NEW, **DEMO) as new,
    ):
        async with orchestrating(redis_server, old.address, "") as one:
            chunks = await first_chunks(one, request, 2)
            await one.leases.settled()
        await old.stop()
        both = f"{old.address},{new.address}"
        async with orchestrating(redis_server, both, "", worker_wait_s=60.0) as other:
            rest = asyncio.create_task(complete(other, resumed(request, chunks)))
            await asyncio.sleep(0.3)
            assert not rest.done()
            await old.start()
            assert len(tokens_of(chunks + await rest)) == 24
            assert new.blocks == []


async def test_session_stored_without_a_model_adopts_that_of_its_next_worker(redis_server, redis):
    request = request_of(max_tokens=24)
    async with scripted("target", **DEMO) as unnamed:
        async with orchestrating(redis_server, unnamed.address, "") as one:
            chunks = await first_chunks(one, request, 2)
            await one.leases.settled()
            head = await redis.hgetall(Keys().of(request.session_id)[0])
            assert b"model_identity" not in head
    async with scripted("target", identity=NEW, **DEMO) as new:
        async with orchestrating(redis_server, new.address, "") as other:
            await complete(other, resumed(request, chunks))
            assert (await other.store.read(request.session_id)).model_identity == NEW
