"""Names of the session store's keys in Redis.

Per session, all with one expiry:

* `gammaray:session:{id}` (hash): the fields of the session, see `orchestrator.stored`.
* `gammaray:session:{id}:tokens` (string, append-only): the turn's emitted tokens, see `orchestrator.records`.
* `gammaray:session:{id}:cycles` (string, append-only): records of its cycles, see `orchestrator.trace_store`.
* `gammaray:session:{id}:trace` (string): `traceparent` of the sampled generation that serves it.

Per request, shared by all sessions of the tenant that were begun by an equal one (the choices of `n` are):

* `gammaray:request:<tenant>/<digest>` (string): request and prompt, see `orchestrator.stored`. It expires
  with the last session that uses it, and is deleted with it.
* `gammaray:request:<tenant>/<digest>:users` (sorted set): these sessions by their expiry.

For all:

* `gammaray:running` (set): sessions with an owner, or whose owner died.
* `gammaray:sessions:<tenant>` (sorted set): a tenant's sessions by their expiry.
* `gammaray:stored` (sorted set): what is charged, sessions and requests, by its expiry;
  `gammaray:stored:bytes` (hash): what each is charged with; `gammaray:stored:used` (hash): the sums by tenant
  and over all.
* `gammaray:epoch` (string): the last epoch that was given out. It never expires.

Times are in milliseconds since 1970, by Redis's clock.
"""

from __future__ import annotations

from orchestrator.access.caller import tenant_of

__all__ = ["RUNNING", "index_of", "keys_of", "request_keys"]

RUNNING = "gammaray:running"
_STORED = "gammaray:stored"
_EPOCH = "gammaray:epoch"


def keys_of(session_id: str) -> list[str]:
    """Return the keys that a script about a session gets; the first four are its own."""
    head = f"gammaray:session:{{{session_id}}}"
    return [
        head,
        f"{head}:tokens",
        f"{head}:cycles",
        f"{head}:trace",
        RUNNING,
        index_of(tenant_of(session_id)),
        _STORED,
        f"{_STORED}:bytes",
        f"{_STORED}:used",
        _EPOCH,
    ]


def request_keys(session_id: str, digest: str) -> list[str]:
    """Return the keys of a session's request: the request, and the sessions that use it."""
    key = f"gammaray:request:{tenant_of(session_id)}/{digest}"
    return [key, f"{key}:users"]


def index_of(tenant: str) -> str:
    """Return the key of a tenant's sessions."""
    return f"gammaray:sessions:{tenant}"
