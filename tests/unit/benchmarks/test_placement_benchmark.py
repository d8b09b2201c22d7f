"""Figures of drafters at a distance, and the relay that makes it."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest

from benchmarks.placement import Placed, cycle_figures
from benchmarks.relay import Relay
from gammaray.types import DrafterKind
from gammaray.wire.cycles import CycleRecord, WorkerCall


def call(request_bytes, response_bytes, compute_s):
    return WorkerCall("a:1", 1, 0, request_bytes, response_bytes, 0.0, compute_s, 1, "")


def cycle(tested, accepted, draft, target):
    return CycleRecord(
        start_s=0.0,
        total_s=0.02,
        propose_s=0.0,
        verify_s=0.0,
        turn=0,
        epoch=1,
        base_position=0,
        gamma=tested,
        gamma_reason="",
        drafted=tested,
        tested=tested,
        accepted=accepted,
        emitted=accepted + 1,
        next_origin=None,
        drafter=DrafterKind.MODEL,
        draft_failed=False,
        draft_ahead_hit=False,
        draft=draft,
        target=target,
    )


def test_figures_count_the_cycles_that_tested_a_proposal():
    cycles = [
        cycle(2, 2, call(1000, 100, 0.002), call(50, 50, 0.010)),
        cycle(2, 1, call(10, 20, 0.002), call(30, 40, 0.012)),
        cycle(1, 0, call(10, 20, 0.005), call(30, 40, 0.014)),
        cycle(0, 0, None, call(9999, 0, 0.5)),
    ]
    found = cycle_figures(cycles)
    assert found["alpha"] == pytest.approx([2 / 3, 1 / 2])
    assert found["tokens_per_cycle"] == pytest.approx(2.0)
    assert found["draft_ms"] == pytest.approx(3.0)
    assert found["target_ms"] == pytest.approx(12.0)
    assert found["wire_bytes"] == 100


def test_figures_of_no_proposals_are_empty():
    found = cycle_figures([cycle(0, 0, None, call(1, 1, 0.1))])
    assert found["alpha"] == []
    assert found["draft_ms"] is None


def test_weights_follow_a_colon():
    assert Placed.parse("a/b:int8", is_remote=True) == Placed("a/b", True, "int8")
    assert Placed.parse("a/b", is_remote=False).weights == "auto"


def echo(server):
    connection, _ = server.accept()
    while data := connection.recv(4096):
        connection.sendall(data)
    connection.close()


def test_relay_delays_messages_but_not_the_ones_after_them():
    with socket.create_server(("127.0.0.1", 0)) as server, closing(Relay()) as relay:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        host, _, port = relay.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            # Connections wait for the relay's start.
            relay.start(f"127.0.0.1:{server.getsockname()[1]}")
            relay.delay_s = 0.2
            began = time.monotonic()
            client.sendall(b"one")
            assert client.recv(100) == b"one"
            assert time.monotonic() - began >= 0.2
            relay.delay_s = 0.0
            client.sendall(b"x" * 300_000)
            client.shutdown(socket.SHUT_WR)
            received = b""
            while data := client.recv(65536):
                received += data
            assert received == b"x" * 300_000


def test_closed_relay_ends_its_connections():
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay()
        host, _, port = relay.address.rpartition(":")
        relay.start(f"127.0.0.1:{server.getsockname()[1]}")
        with socket.create_connection((host, int(port)), timeout=30) as client:
            near, _ = server.accept()
            relay.close()
            assert client.recv(1) == b""
            near.close()
