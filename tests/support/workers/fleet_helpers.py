"""Fleets of scripted workers."""

import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

from orchestrator.workers import backoff
from orchestrator.workers.drafter import RemoteDrafter
from orchestrator.workers.fleet import Fleet
from orchestrator.workers.session_client import session_spec
from orchestrator.workers.verifier import RemoteVerifier
from tests.support.workers.scripted_workers import PROMPT, VOCAB, ScriptedWorker


class ListRegistry:
    def __init__(self) -> None:
        self.known: dict[str, set[str]] = {"target": set(), "draft": set()}
        self.error: Exception | None = None

    async def workers(self) -> dict[str, set[str]]:
        if self.error is not None:
            raise self.error
        return {role: set(addresses) for role, addresses in self.known.items()}


@asynccontextmanager
async def fleet_of(*workers: ScriptedWorker, registry=None, sha: str = ""):
    registry = registry or ListRegistry()
    for worker in workers:
        registry.known[worker.role].add(worker.address)
    fleet = Fleet(registry.workers, VOCAB, vocab_sha256=sha)
    await fleet.start(30.0)
    try:
        yield fleet
    finally:
        await fleet.close()


def clients(
    fleet, session, *, propose_timeout_s=30.0, verify_timeout_s=30.0, wait_s=30.0, prefill_timeout_s=30.0
):
    spec = session_spec(session, frozenset(), shares_caches=True)
    given = {"timeout_s": propose_timeout_s, "prefill_timeout_s": prefill_timeout_s, "vocab_size": VOCAB}
    verifier = RemoteVerifier(fleet.targets, spec, timeout_s=verify_timeout_s, wait_s=wait_s)
    return RemoteDrafter(fleet.drafts, spec, **given), verifier


def stop_pauses_ending(monkeypatch) -> None:
    """Have the pauses of failing workers last for ever, however long this machine takes for a few cycles."""
    now = time.monotonic()
    monkeypatch.setattr(backoff, "time", SimpleNamespace(monotonic=lambda: now))


def emitted(session) -> list[int]:
    return session.token_ids[len(PROMPT) :]
