"""Mutual TLS with real certificates: between orchestrators and workers, and to Redis."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shutil
import ssl
import subprocess
from contextlib import asynccontextmanager
from datetime import timedelta

import grpc
import pytest
from cryptography import x509

from gammaray.config import TargetSettings
from gammaray.errors import InvalidArgumentError
from gammaray.security.tls import TlsFiles, dial, tls_files
from gammaray.types import GenerationRequest
from gammaray.v1 import target_service_pb2 as pb
from gammaray.v1.target_service_pb2_grpc import TargetServiceStub
from orchestrator.launcher.preflight import free_ports
from services.target_worker.worker import TargetWorker
from tests.support.docs_commands import commands
from tests.support.tls_helpers import Authority, role_certificates
from tests.support.workers import redis_helpers
from tests.support.workers.service_helpers import complete, running, tokens_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return role_certificates(Authority(tmp_path_factory.mktemp("certificates"), "ca"))


def named(files: TlsFiles) -> dict[str, str]:
    return {"tls_dir": str(files.cert.parent)}


@asynccontextmanager
async def target(model, files: TlsFiles, **settings):
    settings = {"metrics_listen": "", "listen": "127.0.0.1:0", **settings}
    worker = TargetWorker(TargetSettings(model=str(model), **named(files), **settings))
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


async def ask(address: str, files: TlsFiles | None) -> str:
    """Return the worker's model, or the name of the status that refused us."""
    async with dial(address, files) as channel:
        try:
            return (
                await TargetServiceStub(channel).GetTargetInfo(pb.GetTargetInfoRequest(), timeout=30)
            ).model
        except grpc.aio.AioRpcError as error:
            return error.code().name


async def test_worker_is_called_past_the_proxy(certificates, model, monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with target(model, certificates["worker"]) as worker:
        assert await ask(worker.address, certificates["orchestrator"]) == str(model)


async def test_worker_accepts_only_orchestrators_of_its_ca(certificates, model, tmp_path):
    strangers = role_certificates(Authority(tmp_path, "strangers"))
    async with target(model, certificates["worker"]) as worker:
        assert await ask(worker.address, certificates["orchestrator"]) == str(model)
        assert await ask(worker.address, None) == "UNAVAILABLE"
        assert await ask(worker.address, strangers["orchestrator"]) == "UNAVAILABLE"
        half = dataclasses.replace(strangers["orchestrator"], ca=certificates["worker"].ca)
        assert await ask(worker.address, half) == "UNAVAILABLE"
        assert await ask(worker.address, certificates["worker"]) == "UNAUTHENTICATED"
        assert await ask(worker.address, certificates["server"]) == "UNAUTHENTICATED"
        async with dial(worker.address, certificates["worker"]) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await TargetServiceStub(channel).Verify(timeout=30).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await ask(worker.address, certificates["orchestrator"]) == str(model)


async def test_orchestrator_rejects_a_worker_of_another_ca(certificates, model, tmp_path):
    strangers = role_certificates(Authority(tmp_path, "strangers"))
    async with target(model, strangers["worker"]) as worker:
        assert await ask(worker.address, certificates["orchestrator"]) == "UNAVAILABLE"
    async with target(model, certificates["server"]) as worker:  # a certificate of the wrong role
        assert await ask(worker.address, certificates["orchestrator"]) == "UNAVAILABLE"


async def test_worker_uses_a_renewed_certificate_without_a_restart(model, tmp_path):
    authority = Authority(tmp_path, "ca")
    files = role_certificates(authority)
    async with target(model, files["worker"]) as worker:
        before = await asyncio.to_thread(serial, worker.address, files["orchestrator"])
        assert role_certificates(authority, expires_in=timedelta(days=30)) == files
        after = await asyncio.to_thread(serial, worker.address, files["orchestrator"])
        assert before != after
        assert await ask(worker.address, files["orchestrator"]) == str(model)
        files["worker"].cert.write_text("rubbish")
        assert await asyncio.to_thread(serial, worker.address, files["orchestrator"]) == after


def serial(address: str, files: TlsFiles) -> int:
    """Return the serial number of the certificate that a worker shows."""
    host, port = address.split(":")
    shown = ssl.get_server_certificate((host, int(port)), ca_certs=str(files.ca), timeout=30)
    return x509.load_pem_x509_certificate(shown.encode()).serial_number


@pytest.mark.needs("redis-server")  # the embedded one has no TLS
async def test_completion_over_tls_to_worker_and_redis(certificates, monkeypatch):
    files = certificates["server"]
    port = free_ports("127.0.0.1", 1)[0]
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files.ca}&ssl_certfile={files.cert}&ssl_keyfile={files.key}"
    request = GenerationRequest((1, 2, 3), max_tokens=6, ignore_eos=True)
    tls = {"port": port, "ca-cert-file": files.ca, "cert-file": files.cert, "key-file": files.key}
    lines = (f"tls-{name} {value}" for name, value in tls.items())
    monkeypatch.setattr(redis_helpers, "redis_binary", lambda: "redis-server")
    with redis_helpers.configured_redis(*lines):
        async with target("demo", certificates["worker"], redis_url=url) as worker:
            server = type("Server", (), {"url": url})
            own = named(certificates["orchestrator"])
            async with running(server, worker.address, "", **own) as orchestrator:
                assert len(tokens_of(await complete(orchestrator, request))) == 6
                roles = {process.role: process for process in await orchestrator.status()}
                assert roles["redis"].healthy
                assert "ssl" not in roles["redis"].address


@pytest.mark.parametrize("missing", ["ca.crt", "tls.crt", "tls.key"])
def test_folder_without_one_of_the_files_is_refused(certificates, tmp_path, missing):
    folder = shutil.copytree(certificates["worker"].cert.parent, tmp_path / "folder")
    (folder / missing).unlink()
    with pytest.raises(InvalidArgumentError, match=f"tls_dir: got .*{missing}"):
        tls_files(TargetSettings(tls_dir=str(folder)))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_certificates_of_the_documented_commands_are_accepted(model, tmp_path):
    documented = [line for _, line in commands() if re.match("openssl |mkdir |for role in ", line)]
    script = ["bash", "-euo", "pipefail", "-c", "\n".join(documented)]
    await asyncio.to_thread(subprocess.run, script, cwd=tmp_path, check=True, timeout=60)
    names = ("worker", "orchestrator", "both")
    worker, orchestrator, both = (tls_files(TargetSettings(tls_dir=str(tmp_path / name))) for name in names)
    for key in (tmp_path / "ca-key.pem", worker.key, orchestrator.key, both.key):
        assert key.stat().st_mode & 0o077 == 0
    async with target(model, worker) as served:
        assert await ask(served.address, orchestrator) == str(model)
        assert await ask(served.address, worker) == "UNAUTHENTICATED"
    async with target(model, both) as served:
        assert await ask(served.address, both) == str(model)
