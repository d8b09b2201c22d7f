"""An unusable Redis is reported before a cluster starts."""

import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from gammaray.errors import InvalidArgumentError, UnavailableError
from orchestrator.storage.client import CHECK_TIMEOUT_S, check_redis
from tests.support.workers.redis_helpers import running_redis

pytestmark = pytest.mark.integration


def test_redis_that_answers_passes():
    with running_redis() as server:
        check_redis(server.url)


def test_redis_url_of_another_kind_is_refused():
    with pytest.raises(InvalidArgumentError, match="redis_url: got foo, allowed: redis://"):
        check_redis("foo")


def test_missing_redis_is_reported_quickly_without_the_password():
    with socket.socket() as taken:  # and not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=str(port)) as caught:
            check_redis(f"redis://:secret@127.0.0.1:{port}/0")
    assert time.monotonic() - began < CHECK_TIMEOUT_S, "it is refused, and not waited for"
    assert "secret" not in str(caught.value)


def test_malformed_redis_url_is_reported_without_its_password():
    with pytest.raises(InvalidArgumentError) as caught:
        check_redis("http://user:secret@127.0.0.1:1/0")
    assert "secret" not in str(caught.value)


def test_private_redis_requires_its_password():
    with running_redis() as server:
        parts = urlsplit(server.url)
        for stranger in (f"redis://127.0.0.1:{parts.port}/0", f"redis://:guess@127.0.0.1:{parts.port}/0"):
            with pytest.raises(UnavailableError):
                check_redis(stranger)


def test_private_redis_keeps_its_password_out_of_arguments_and_files():
    with running_redis() as server:
        password = urlsplit(server.url).password
        assert password
        process = psutil.Process(server.pid)
        assert password not in " ".join(process.cmdline())
        files = [path for path in Path(process.cwd()).rglob("*") if path.is_file()]
        assert not any(password.encode() in path.read_bytes() for path in files)
