"""Which addresses a worker may announce in which Redis."""

import pytest

from gammaray.errors import InvalidArgumentError
from services.process.addresses import check_announced

# A documentation network (RFC 5737): no host has such an address, and nothing is sent to it.
ELSEWHERE = "redis://:secret@192.0.2.1:6379/0"


@pytest.mark.parametrize(
    ("listen", "redis_url", "host"),
    [
        ("127.0.0.1:0", "redis://127.0.0.1:6379", ""),
        ("127.0.0.1:0", "redis://localhost", ""),
        ("[::1]:0", "redis://[::1]:6379", ""),
        ("127.0.0.1:0", "unix:///run/redis.sock", ""),
        ("127.0.0.1:0", "redis+sentinel://127.0.0.1:1,localhost:2/main", ""),
        ("10.77.0.3:50051", ELSEWHERE, ""),
        ("target:50051", ELSEWHERE, ""),
        ("0.0.0.0:50051", ELSEWHERE, "10.77.0.3"),  # a Ray node's address is announced
        ("127.0.0.1:0", ELSEWHERE, "127.0.0.1"),  # a Ray cluster of this machine alone
    ],
)
def test_address_that_orchestrators_can_dial_is_announced(listen, redis_url, host):
    check_announced(listen, redis_url, host)


@pytest.mark.parametrize(
    ("listen", "redis_url", "host", "words"),
    [
        ("127.0.0.1:0", ELSEWHERE, "", r"such as [0-9.]+:50051, since Redis is on 192\.0\.2\.1|dial, since"),
        ("127.0.0.1:7000", ELSEWHERE, "", "got 127.0.0.1:7000, allowed: an address of this machine"),
        ("[::1]:0", "redis://192.0.2.1", "", "since Redis is on 192.0.2.1"),
        ("localhost:0", "redis+sentinel://127.0.0.1:1,192.0.2.1:2/main", "", "since Redis is on 192.0.2.1"),
        ("127.0.0.1:0", "redis://no.such.name.invalid", "", "since Redis is on no.such.name.invalid"),
        ("0.0.0.0:0", "redis://127.0.0.1", "", "got 0.0.0.0:0, allowed: an address of this machine"),
        ("[::]:0", ELSEWHERE, "", r"got \[::\]:0, allowed: an address of this machine"),
        ("127.0.0.1:0", ELSEWHERE, "10.77.0.3", "since Redis is on 192.0.2.1"),
    ],
)
def test_address_that_others_cannot_dial_is_refused(listen, redis_url, host, words):
    with pytest.raises(InvalidArgumentError, match=f"listen: .*({words})"):
        check_announced(listen, redis_url, host)
