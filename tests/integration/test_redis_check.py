"""A Redis that cannot be used is told before a cluster starts on it."""

import time

import pytest
from redis_helpers import running_redis

from gammaray.errors import InvalidArgumentError, UnavailableError
from orchestrator.preflight import free_ports
from orchestrator.redis_server import check_redis

pytestmark = pytest.mark.integration


def test_redis_that_answers_passes():
    with running_redis() as server:
        check_redis(server.url)


def test_redis_url_of_another_kind_is_refused():
    with pytest.raises(InvalidArgumentError, match="redis_url: got foo, allowed: redis://"):
        check_redis("foo")


def test_redis_that_is_not_there_is_told_soon_without_the_password():
    [port] = free_ports("127.0.0.1", 1)
    began = time.monotonic()
    with pytest.raises(UnavailableError, match=str(port)) as caught:
        check_redis(f"redis://:secret@127.0.0.1:{port}/0")
    assert time.monotonic() - began < 2
    assert "secret" not in str(caught.value)
