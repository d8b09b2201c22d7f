"""Responses of the Responses API in Redis, each a hash of two JSON texts.

Names are qualified as those of sessions, so that a tenant finds only its own. A response is charged to its
tenant like a session (see `orchestrator.storage.session_scripts`). Bytes for its output (`room`) are charged
when it begins, and given back when it ends or when its session has lost its owner. An end that takes more
than was charged is checked against the bounds; if it does not fit, a short end is stored in its place.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from gammaray.aio import BackgroundTasks
from gammaray.errors import NotFoundError
from gammaray.security.tenants import name_of
from orchestrator.storage import session_scripts as scripts
from orchestrator.storage.client import Redis, answer
from orchestrator.storage.keys import DEFAULT_KEYS, Keys, StoreBounds
from orchestrator.storage.session_scripts import COMMON

Ending = Literal["whole", "cut", "gone"]
"""How a response ended in the store: with its output, with a short end in its place, or it was deleted."""

_ENDINGS: dict[int, Ending] = {0: "gone", 1: "whole", 2: "cut"}

_log = logging.getLogger(__name__)


# The arguments begin as those of a session's scripts. An item of the accounts belongs to the tenant before
# its first ':' or '/'.
def _script(body: str) -> str:
    return COMMON + _ITEM + body


_ITEM = """
local item = tenant .. '/' .. name

local function keep(room)
  local size = 0
  for _, text in ipairs(redis.call('HVALS', KEYS[1])) do size = size + #text end
  redis.call('PEXPIRE', KEYS[1], ttl)
  redis.call('ZADD', KEYS[6], now + ttl, item)
  charge(item, request_overhead + size + room, room)
end

local function more_than_charged(size)
  return request_overhead + size - (redis.call('HGET', KEYS[7], item) or 0)
end
"""

# ARGV: tenant's bound, total bound, input, response, room. Returns 1, or the refusal.
_CREATE = _script("""
local need = more_than_charged(#ARGV[7] + #ARGV[8] + ARGV[9])
local no = refusal(need, tonumber(ARGV[5]), tonumber(ARGV[6]))
if no then return no end
redis.call('HSET', KEYS[1], 'input', ARGV[7], 'response', ARGV[8])
keep(tonumber(ARGV[9]))
return {1}
""")

# ARGV: tenant's bound, total bound, response, short response. Returns a key of _ENDINGS, or -9.
_FINISH = _script("""
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
local need = more_than_charged(redis.call('HSTRLEN', KEYS[1], 'input') + #ARGV[7])
local no = refusal(need, tonumber(ARGV[5]), tonumber(ARGV[6]))
if no and no[1] == -9 then return -9 end
redis.call('HSET', KEYS[1], 'response', no and ARGV[8] or ARGV[7])
keep(0)
return no and 2 or 1
""")

# Returns whether there was such a response. DEL comes first, as in the script that deletes sessions.
_DELETE = _script("""
local existed = redis.call('DEL', KEYS[1])
charge(item, 0, 0)
return existed
""")


@dataclass(frozen=True)
class StoredResponse:
    input: bytes  # JSON list of the items before the response's output, those of earlier responses included
    response: bytes  # JSON of the response object, without log-probabilities


class ResponseStore:
    """Stores responses for a time after their last change; UnavailableError if Redis cannot be reached."""

    def __init__(
        self, redis: Redis, ttl_s: int, bounds: StoreBounds | None = None, keys: Keys = DEFAULT_KEYS
    ) -> None:
        self._redis, self._ttl_ms = redis, ttl_s * 1000
        self._bounds, self._keys = bounds or StoreBounds(redis), keys
        self._create = redis.register_script(_CREATE)
        self._finish = redis.register_script(_FINISH)
        self._delete = redis.register_script(_DELETE)
        self._ending = BackgroundTasks(_log, "the end of a response could not be stored")

    async def create(self, name: str, stored: StoredResponse, room: int) -> None:
        """Store a new response and reserve `room` bytes; errors are those of `StoreBounds.admitted`."""
        args = [*self._common(name), *await self._bounds.of(name), stored.input, stored.response, room]
        keys = self._keys.response(name)
        field = "max_output_tokens" if room > len(stored.input) else "input"
        await self._bounds.admitted(lambda: self._create(keys=keys, args=args), name, self._ttl_ms, field)

    async def finish(self, name: str, response: bytes, short: bytes) -> Ending:
        """Store the end of a response, or `short` in its place if it takes more than was reserved."""
        args = [*self._common(name), *await self._bounds.of(name), response, short]
        result = scripts.AGAIN
        while result == scripts.AGAIN:
            result = int(await answer(self._finish(keys=self._keys.response(name), args=args)))
        return _ENDINGS[result]

    def finish_later(self, name: str, response: bytes, short: bytes) -> None:
        """Store the end of a response in the background, as its request is being cancelled."""
        self._ending.start(self.finish(name, response, short), name)

    async def read(self, name: str) -> StoredResponse:
        """Return a response, or raise NotFoundError."""
        key = self._keys.response(name)[0]
        found: list[Any] = await answer(self._redis.hmget(key, ["input", "response"]))
        if found[0] is None or found[1] is None:
            raise NotFoundError(f"no response {name_of(name)}", "response")
        return StoredResponse(*found)

    async def delete(self, name: str) -> bool:
        return bool(await answer(self._delete(keys=self._keys.response(name), args=self._common(name))))

    async def close(self) -> None:
        """Wait for the writes in the background, which end at the latest when Redis gave them up."""
        await self._ending.settled()

    def _common(self, name: str) -> list[Any]:
        return [name, "", self._ttl_ms, 0]
