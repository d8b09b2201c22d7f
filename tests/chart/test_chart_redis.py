"""The bundled Redis: started as its pod starts it, with passwords of any characters, and bounded."""

import contextlib
import os
import re
import socket
import subprocess
import time
from pathlib import Path

import pytest
import redis

from gammaray.config import DraftSettings, OrchestratorSettings
from gammaray.deploy.redis_connection import OLDEST_VERSION, SUPPORTED_SERVERS
from orchestrator.launcher.preflight import free_ports
from orchestrator.launcher.redis_server import redis_binary
from tests.support.chart.chart_helpers import NAME, ROOT, container, environment, groups, pods

PASSWORDS = [
    "https://user:pass@host/0?db=1",
    "'\"\\$(id)`id` $HOME $$ %s\tp@ss:w/rd#1%41?&=+ x Gänge ☃, ends with a newline\n",
]
MIB = 2**20


def free_port():
    (port,) = free_ports("127.0.0.1", 1)
    return port


def expanded(text, variables):
    """Return what Kubernetes makes of a container's argument."""
    return re.sub(r"\$\(([^()]+)\)", lambda m: str(variables.get(m[1], m[0])), text.replace("$$", "$"))


@contextlib.contextmanager
def bundled(tmp_path, password, limit=1024 * MIB, values=None):
    """Run the container of the chart's StatefulSet; yields its port and process."""
    only = container(pods(values)["redis"])
    port, (folder, data) = free_port(), (tmp_path / "bin", tmp_path / "data")
    folder.mkdir()
    data.mkdir()
    (folder / "redis-server").symlink_to(redis_binary())
    given = {
        **{
            name: value
            for name, value in environment(pods(values)["redis"]).items()
            if isinstance(value, str)
        },
        "PATH": f"{folder}:{os.environ['PATH']}",
        "REDISCLI_AUTH": password,
        "MEMORY_LIMIT": str(limit),
        "DATA_DIR": str(data),
        "PORT": str(port),
    }
    command = [expanded(part, given) for part in (*only["command"], *only["args"])]
    process = subprocess.Popen(command, env=given, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.02)
        assert process.poll() is None
        yield port, process
    finally:
        process.terminate()
        assert process.wait(20) == 0  # the signal reaches Redis itself, which ends in order


def url_of(port, values=None):
    """Return the URL that the chart gives to Ray pods, but for the address."""
    return environment(groups(values)["draft"]["template"])["GAMMARAY_REDIS_URL"].replace(
        f"{NAME}-redis:6379", f"127.0.0.1:{port}"
    )


def test_bundled_redis_and_the_docs_are_within_the_supported_versions():
    major, minor, shown = re.match(r"redis:((\d+)\.(\d+))", container(pods()["redis"])["image"]).group(
        2, 3, 1
    )
    assert OLDEST_VERSION <= (int(major), int(minor)) < (9, 0)
    assert SUPPORTED_SERVERS == "Redis 6.2 or newer, or Valkey 7.2 or newer"
    page = (ROOT / "docs/install.md").read_text()
    assert f"instead of the chart's ({shown}): Redis 6.2 to 8, or Valkey 7.2 or newer" in page


@pytest.mark.slow
@pytest.mark.parametrize("password", PASSWORDS)
def test_workers_and_orchestrators_can_use_any_password(tmp_path, password):
    assert url_of(6379) == "redis://127.0.0.1:6379/0"
    with bundled(tmp_path, password) as (port, process):
        for settings in (OrchestratorSettings, DraftSettings):
            given = settings(redis_url=url_of(port), redis_password=password)
            assert redis.Redis.from_url(given.redis_login_url).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis.from_url(url_of(port)).ping()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, password=password + "x").ping()
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"redis-server" in arguments
        assert password.encode() not in arguments


@pytest.mark.parametrize(("percent", "limit"), [(60, 512 * MIB), (40, 3 * 2**30)])
def test_redis_rejects_writes_above_maxmemory_below_the_pod_limit(tmp_path, percent, limit):
    values = {"redis": {"maxMemoryPercent": percent}}
    with bundled(tmp_path, "secret", limit, values) as (port, _):
        client = redis.Redis(port=port, password="secret")
        config = client.config_get("*")
        assert int(config["maxmemory"]) == pytest.approx(limit * percent / 100, rel=1e-6)
        assert config["maxmemory-policy"] == "noeviction"
        assert config["appendonly"] == "yes"
        assert config["save"] == ""
        client.set("kept", "x")
        client.config_set("maxmemory", 3 * MIB)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            list(map(client.set, range(10_000), [b"x" * 10_000] * 10_000))
        assert client.get("kept") == b"x"


def test_password_is_put_into_urls_that_have_none():
    for url, password, expected in (
        ("redis://host:6379/0", "", "redis://host:6379/0"),
        ("redis://host:6379/0", "a b+c/@:#%", "redis://:a%20b%2Bc%2F%40%3A%23%25@host:6379/0"),
        ("redis://user@host", "x", "redis://user:x@host"),
        ("rediss://host?ssl_ca_certs=/a@b", "x", "rediss://:x@host?ssl_ca_certs=/a@b"),
        ("redis://:own@host/0", "x", "redis://:own@host/0"),
        ("unix:///run/redis.sock", "x", "unix://:x@/run/redis.sock"),
        ("", "x", ""),
    ):
        assert DraftSettings(redis_url=url, redis_password=password).redis_login_url == expected


def test_readiness_probe_requires_a_pong():
    (_, _, script) = container(pods()["redis"])["readinessProbe"]["exec"]["command"]
    assert script == "redis-cli ping | grep -qx PONG"
    for answer, status in (("PONG", 0), ("LOADING Redis is loading the dataset in memory", 1), ("", 1)):
        fake = f"redis-cli() {{ echo '{answer}'; }}; {script}"
        assert subprocess.run(["bash", "-c", fake], timeout=20).returncode == status
