"""Workers as processes: options, readiness, registry, health, drain."""

import asyncio
import json
import signal
import socket
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from redis.asyncio import Redis

from gammaray.config import TargetSettings
from orchestrator.launcher.preflight import free_ports
from services.process.main import run
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import changed
from tests.support.workers.held_engine import HeldEngine
from tests.support.workers.redis_helpers import configured_redis
from tests.support.workers.scripted_workers import until, until_so
from tests.support.workers.service_helpers import worker_process
from tests.support.workers.workers_helpers import Link, propose_block, running, verify_block

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(sys.platform == "win32", reason="signals"),
]

PROMPT = random_tokens(12, seed=3)
EXIT_TIMEOUT_S = 100
UNAVAILABLE = 14


@pytest.fixture
def redis_port():
    with configured_redis() as port:
        yield port


async def entries(port, role="*"):
    async with Redis(port=port) as redis:
        keys = sorted([key async for key in redis.scan_iter(f"gammaray:worker:{role}:*")])
        values = [(key.decode(), await redis.get(key)) for key in keys]
        return {key: json.loads(value) for key, value in values if value is not None}  # gone in between


async def is_gone(port, key):
    return key not in await entries(port)


async def test_sigterm_drains_running_blocks_and_exits_0(model, redis_port):
    url = f"redis://127.0.0.1:{redis_port}/0"
    options = ("--redis-url", url, "--max-batch-tokens", "16")
    with worker_process("target", str(model), *options) as (process, address):
        (key,) = await entries(redis_port)
        link = Link(address, "target")
        blocks = [verify_block(random_tokens(1000, seed=i), session_id=f"s{i}") for i in range(6)]
        pending = await link.send(blocks)
        await link.until(lambda info: info.num_queued > 0)
        process.send_signal(signal.SIGTERM)
        await until_so(lambda: is_gone(redis_port, key))
        assert not all(answer.done() for answer in pending), "it leaves the registry first"
        answers = await asyncio.wait_for(asyncio.gather(*pending), EXIT_TIMEOUT_S)
        assert {answer.WhichOneof("outcome") for answer in answers} == {"verdict"}
        assert await link.call.code() == grpc.StatusCode.OK
        assert await asyncio.to_thread(process.wait, EXIT_TIMEOUT_S) == 0
        await link.close()


async def test_options_and_environment_reach_a_worker_that_sigint_ends(model):
    environment = {"GAMMARAY_CACHE_BUDGET_MB": "7", "GAMMARAY_MODEL": "overridden"}
    with worker_process("draft", str(model), environment=environment) as (process, address):
        link = Link(address, "draft")
        assert (await link.info()).cache_budget_bytes == 7 << 20
        assert (await link.ask(propose_block(PROMPT, 2))).WhichOneof("outcome") == "proposal"
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, EXIT_TIMEOUT_S) == 0
        await link.close()


async def test_draining_worker_sends_a_notice_and_then_rejects_new_blocks(model, monkeypatch):
    monkeypatch.setattr("services.process.worker.DRAIN_TIMEOUT_S", EXIT_TIMEOUT_S)
    async with running("target", model) as (link, worker):
        health = health_pb2_grpc.HealthStub(link.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with HeldEngine(worker) as engine:
            blocks = [verify_block(random_tokens(900, seed=i), session_id=f"long{i}") for i in range(3)]
            pending = await link.send(blocks)
            await engine.waits()
            assert not link.is_asked_to_leave
            stopping = asyncio.create_task(worker.stop())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await until(lambda: link.is_asked_to_leave and worker.streams.is_draining)
            late = await link.ask(verify_block(PROMPT))
            assert late.error.code == UNAVAILABLE
        answers = await asyncio.wait_for(asyncio.gather(*pending), EXIT_TIMEOUT_S)
        assert {answer.WhichOneof("outcome") for answer in answers} == {"verdict"}
        assert await stopping


async def test_drain_gives_up_after_its_timeout(model, monkeypatch):
    monkeypatch.setattr("services.process.worker.DRAIN_TIMEOUT_S", 0.05)
    async with running("target", model, max_batch_tokens=16) as (link, worker):
        blocks = [verify_block(random_tokens(1000, seed=i), session_id=f"s{i}") for i in range(20)]
        await link.send(blocks)
        await link.until(lambda info: info.num_queued > 0)
        began = time.monotonic()
        assert not await worker.stop()
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("listen", "host", "shown"),
    [("0.0.0.0:0", "worker.example", "worker.example"), ("[::]:0", "fd00::4", "[fd00::4]")],
)
async def test_registry_entry_appears_is_renewed_and_disappears(model, redis_port, listen, host, shown):
    settings = {"listen": listen, "redis_url": f"redis://127.0.0.1:{redis_port}/0"}
    async with running("draft", model, host, **settings) as (link, worker):
        port = worker.address.rpartition(":")[2]
        ((key, entry),) = (await entries(redis_port)).items()
        assert key.startswith("gammaray:worker:draft:")
        assert entry == {"address": f"{shown}:{port}"}
        async with Redis(port=redis_port) as redis:
            assert 0 < await redis.pttl(key) <= 5000
            await redis.delete(key)

        async def is_back():
            return key in await entries(redis_port)

        assert await until_so(is_back)
        assert (await link.ask(propose_block(PROMPT, 2))).WhichOneof("outcome") == "proposal"
    assert await entries(redis_port) == {}


async def test_worker_serves_without_redis_and_announces_itself_after_recovery(model):
    (port,) = free_ports("127.0.0.1", 1)
    async with running("target", model, redis_url=f"redis://127.0.0.1:{port}/0") as (link, _):
        assert (await link.ask(verify_block(PROMPT))).WhichOneof("outcome") == "verdict"
        with configured_redis(port=port):
            assert len(await until_so(lambda: entries(port, "target"))) == 1
        assert (await link.ask(verify_block(PROMPT))).WhichOneof("outcome") == "verdict"


@pytest.mark.parametrize("role", ["target", "draft"])
async def test_health_and_reflection_answer(model, role):
    service = f"gammaray.v1.{role.capitalize()}Service"
    async with running(role, model) as (link, _):
        health = health_pb2_grpc.HealthStub(link.channel)
        for name in ("", service):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(link.channel)
        call = stub.ServerReflectionInfo(timeout=5)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {s.name for s in (await call.read()).list_services_response.service}
        assert names == {service, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        await call.done_writing()


def test_settings_that_cannot_be_used_have_their_exit_status_and_are_named(capsys, tmp_path):
    def config(stored):
        stored["transformer_layer_config"] |= {"num_attention_heads": 1, "num_key_value_heads": 2}

    model, head = tiny_model("llama", tmp_path), changed("llama", tmp_path / "head", config)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        for options, status, words in (
            (["--device", "abacus"], 2, "device: got abacus"),
            (["--no-such-option", "1"], 2, "--no-such-option"),
            (["--listen", "nowhere"], 2, "listen: got nowhere"),
            (["--listen", f"127.0.0.1:{holder.getsockname()[1]}"], 2, "can be bound"),
            (["--model", model, "--head", head], 2, "config.json: num_key_value_heads: got 2, allowed"),
            (["--model", tiny_model("mamba", tmp_path)], 3, "cannot be served"),
        ):
            given = tuple(map(str, options))
            found = run(
                "services.target_worker", TargetSettings, "services.target_worker.worker:TargetWorker", given
            )
            output, errors = capsys.readouterr()
            assert (found, output) == (status, ""), options
            assert words in errors.splitlines()[-1]
