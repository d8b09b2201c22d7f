"""The private Redis: its password is kept, it is restarted, acknowledged writes survive kill -9."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from gammaray.errors import UnavailableError
from orchestrator.launcher import redis_server
from orchestrator.storage.client import CHECK_TIMEOUT_S, check_redis
from tests.support.workers.redis_helpers import running_redis, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def push(client, value):
    try:
        return client.execute_command("RPUSH", "tokens", value) > 0
    except redis.ConnectionError:
        return False


def kill(server):
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.is_running)


def test_redis_killed_while_writing_keeps_all_acknowledged_writes():
    with running_redis() as server:
        url, first, answered = server.url, server.pid, 0
        client = redis.Redis.from_url(url)
        killer = threading.Thread(target=kill, args=[server])
        while push(client, answered):
            answered += 1
            if answered == 100:
                killer.start()
        killer.join()
        assert not server.is_running
        server.revive()
        assert server.is_running
        assert (server.url, server.pid != first) == (url, True)
        there = redis.Redis.from_url(url).lrange("tokens", 0, -1)
        # One more may be there: its answer was lost.
        assert [int(value) for value in there] in (list(range(answered)), list(range(answered + 1)))
        assert answered >= 100


def test_restarted_redis_keeps_its_memory_limit(tmp_path):
    with redis_server.RedisServer.start(tmp_path, 300 * 2**20) as server:
        for _ in range(2):
            client = redis.Redis.from_url(server.url)
            assert client.config_get("maxmemory") == {"maxmemory": str(300 * 2**20)}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            client.close()
            kill(server)
            server.revive()
    assert 2**28 <= redis_server.default_maxmemory() <= 2**32


def test_redis_that_ends_repeatedly_is_not_restarted(monkeypatch):
    monkeypatch.setattr(redis_server, "MAX_REVIVALS", 2)
    monkeypatch.setattr(redis_server, "REVIVALS_PER_S", 60.0)  # of which this takes less on any machine
    with running_redis() as server:
        for _ in range(2):
            kill(server)
            server.revive()
        kill(server)
        with pytest.raises(UnavailableError, match="2 times within"):
            server.revive()


def test_missing_redis_is_reported_quickly_without_the_password():
    with socket.socket() as taken:  # and not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=str(port)) as caught:
            check_redis(f"redis://:secret@127.0.0.1:{port}/0")
    assert time.monotonic() - began < CHECK_TIMEOUT_S, "it is refused, and not waited for"
    assert "secret" not in str(caught.value)


def test_private_redis_requires_its_password_and_keeps_it_out_of_arguments_and_files():
    with running_redis() as server:
        check_redis(server.url)
        port, password = urlsplit(server.url).port, urlsplit(server.url).password
        for stranger in (f"redis://127.0.0.1:{port}/0", f"redis://:guess@127.0.0.1:{port}/0"):
            with pytest.raises(UnavailableError):
                check_redis(stranger)
        assert password
        process = psutil.Process(server.pid)
        assert password not in " ".join(process.cmdline())
        files = [path for path in Path(process.cwd()).rglob("*") if path.is_file()]
        assert not any(password.encode() in path.read_bytes() for path in files)
