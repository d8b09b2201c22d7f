"""The address that a worker announces: orchestrators on other hosts must be able to dial it."""

from __future__ import annotations

import socket

from gammaray.checks import is_loopback, is_wildcard, join_address, split_address
from gammaray.deploy.redis_connection import hosts_of
from gammaray.errors import InvalidArgumentError


def check_announced(listen: str, redis_url: str, host: str = "") -> None:
    """Refuse to announce an address in a Redis if its other clients cannot dial it.

    `host` is announced in place of a wildcard; a loopback address: all orchestrators are on this machine.
    """
    listening, port = split_address("listen", listen)
    if is_wildcard(listening) and host:
        listening = host
    elsewhere = [] if host and is_loopback(host) else list(filter(_is_elsewhere, hosts_of(redis_url)))
    if not is_wildcard(listening) and not (is_loopback(listening) and elsewhere):
        return
    own = next(filter(None, map(_address_towards, elsewhere)), "")
    example = f", such as {join_address(own, port or 50051)}" if own else ""
    reason = f", since Redis is on {elsewhere[0]}" if elsewhere else ""
    raise InvalidArgumentError(
        "listen", listen, f"an address of this machine that orchestrators can dial{example}{reason}"
    )


def _is_elsewhere(host: str) -> bool:
    """Whether a host is not named by a loopback address; a name that is unknown now is taken for another."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return True
    return not all(is_loopback(str(address[0])) for *_, address in found)


def _address_towards(host: str) -> str:
    """Return this machine's address on the way to a host; empty if there is no way. Sends nothing."""
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        pass
    return ""
