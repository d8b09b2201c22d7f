"""The Lua scripts of the session store: each is one atomic step in Redis.

KEYS are those of `orchestrator.storage.keys.Keys.of`, then those of `Keys.request`; `COMMIT` and `READ` take
only the first two. The ARGV of every script except `COMMIT`, `READ` and `LIST` begin with the name of the
session, the digest of its request (or ''), the ttl (ms) and the lease (ms).

`epoch` is a fencing token: a caller whose epoch differs from the hash's is not the owner (any more). Epochs
come from one increasing counter for all sessions, which is at least Redis's time in microseconds: they still
increase after Redis lost all data. They stay below 2^53, which Lua's numbers hold exactly, until 2255. Apart
from epochs, clocks only decide when a lease or a key expires. All times are from Redis's clock.

Accounting. A session is charged with a fixed amount, the bytes of its records and the bytes of its tokens.
While it has a lease, it is also charged with the bytes of the tokens that the turn may still emit (`room`),
so a commit never needs more than was admitted. A request is charged once. Expired items are discharged before
anything is refused. An owner that was considered dead and continues is charged with its room again without a
check: the bounds may be exceeded by that much, but no running stream is interrupted.

Memory limit. At its `maxmemory` Redis refuses a script at its first write, if that write needs memory.
Scripts that store data begin with such a write, scripts that only free memory begin with one that needs none.

Results of scripts that did nothing: -1 no session, -2 another owner, -3 wrong offset, -4 cancelled, -5 tokens
are missing, -6 tokens of another model, -7 over the tenant's bound, -8 over the total bound, -9 call again:
expired items are not yet discharged, -10 the session has another request by now.
"""

from __future__ import annotations

GONE, OTHER_OWNER, WRONG_OFFSET, CANCELLED, LOST, OTHER_MODEL = -1, -2, -3, -4, -5, -6
OVER_TENANT, OVER_ALL, AGAIN, MOVED = -7, -8, -9, -10

SESSION_OVERHEAD = 3072
"""Bytes charged per session in addition to its tokens and records: its hash, its entries in other keys."""

REQUEST_OVERHEAD = 512
"""Bytes charged per request in addition to its own."""

COMMON = (
    f"local session_overhead, request_overhead = {SESSION_OVERHEAD}, {REQUEST_OVERHEAD}"
    + """
local name, digest, ttl, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local tenant = string.match(name, '^(.-):') or ''
local request = tenant .. '/' .. digest

local function next_epoch()
  local last = tonumber(redis.call('GET', KEYS[9]) or 0)
  local epoch = math.max(last + 1, clock[1] * 1000000 + clock[2])
  redis.call('SET', KEYS[9], epoch)
  return epoch
end

local function add(field, difference)
  if difference == 0 then return end
  if redis.call('HINCRBY', KEYS[8], field, difference) == 0 then redis.call('HDEL', KEYS[8], field) end
end

-- Charges an item with bytes, of which `spare` are set aside and not yet used; 0 takes it off.
local function charge(item, bytes, spare)
  local owner = string.match(item, '^(.-)[:/]') or ''
  local before = redis.call('HMGET', KEYS[7], item, item .. '+')
  local more, more_spare = bytes - (before[1] or 0), spare - (before[2] or 0)
  add(owner, more)
  add(':', more)
  add(owner .. '+', more_spare)
  add(':+', more_spare)
  if bytes > 0 then redis.call('HSET', KEYS[7], item, bytes)
  else
    redis.call('HDEL', KEYS[7], item)
    redis.call('ZREM', KEYS[6], item)
  end
  if spare > 0 then redis.call('HSET', KEYS[7], item .. '+', spare)
  elseif before[2] then redis.call('HDEL', KEYS[7], item .. '+') end
end

local function charge_session(expires)
  local head = redis.call('HMGET', KEYS[1], 'lease', 'room')
  local tokens = redis.call('STRLEN', KEYS[2])
  local spare = head[1] and math.max(head[2] - tokens, 0) or 0
  redis.call('ZADD', KEYS[6], expires, name)
  charge(name, session_overhead + redis.call('STRLEN', KEYS[3]) + tokens + spare, spare)
end

local function prune(limit)
  local items = redis.call('ZRANGEBYSCORE', KEYS[6], '-inf', '(' .. now, 'LIMIT', 0, limit)
  for _, item in ipairs(items) do charge(item, 0, 0) end
  return #items
end

local function latest(key) return redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2] end

-- Gives all that belongs to the session another ttl.
local function renew()
  local expires = now + ttl
  for i = 1, 3 do redis.call('PEXPIREAT', KEYS[i], expires) end
  for _, i in ipairs({5, 11}) do
    redis.call('ZADD', KEYS[i], expires, name)
    redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', '(' .. now)
    redis.call('PEXPIREAT', KEYS[i], latest(KEYS[i]))
  end
  redis.call('PEXPIREAT', KEYS[10], latest(KEYS[11]))
  redis.call('ZADD', KEYS[6], latest(KEYS[11]), request)
  charge(request, request_overhead + redis.call('STRLEN', KEYS[10]), 0)
  charge_session(expires)
end

-- Takes the session off a request, which goes with its last session.
local function leave(key, users, item)
  redis.call('ZREM', users, name)
  redis.call('ZREMRANGEBYSCORE', users, '-inf', '(' .. now)
  if redis.call('ZCARD', users) == 0 then
    redis.call('DEL', key, users)
    charge(item, 0, 0)
  else
    redis.call('PEXPIREAT', key, latest(users))
    redis.call('ZADD', KEYS[6], latest(users), item)
  end
end

-- Answers why `need` more bytes cannot be had: code, bytes in use, bytes needed, ms until enough expires;
-- else nil.
local function refusal(need, tenant_bound, bound)
  prune(100)
  for _, rule in ipairs({{tenant, tenant_bound, KEYS[5], -7}, {':', bound, KEYS[6], -8}}) do
    local used = redis.call('HMGET', KEYS[8], rule[1], rule[1] .. '+')
    local excess = (used[1] or 0) + need - rule[2]
    if need > 0 and excess > 0 then
      if prune(1000) > 0 then return {-9} end
      local wait = 1000
      if excess > tonumber(used[2] or 0) then
        local rows = redis.call('ZRANGEBYSCORE', rule[3], now, '+inf', 'WITHSCORES', 'LIMIT', 0, 64)
        local freed = 0
        for i = 1, #rows, 2 do
          freed = freed + (redis.call('HGET', KEYS[7], rows[i]) or 0)
          wait = math.max(wait, rows[i + 1] - now)
          if freed >= excess then break end
        end
      end
      return {rule[4], tonumber(used[1] or 0), need, wait}
    end
  end
end

local function store_request(data)
  if redis.call('EXISTS', KEYS[10]) == 0 then
    redis.call('SET', KEYS[10], data)
    redis.call('DEL', KEYS[11])
  end
end
"""
)

_HEAD = """
local head = redis.call('HMGET', KEYS[1],
  'epoch', 'finish_reason', 'size', 'model_identity', 'lease', 'digest')
if not head[1] then return -1 end
"""

_FENCE = (
    _HEAD
    + """
if head[2] == 'cancelled' then return -4 end
if tonumber(head[1]) ~= tonumber(epoch) then return -2 end
"""
)


def _script(body: str) -> str:
    return COMMON + body


def _owners(body: str) -> str:
    """Return a script of the owner whose epoch is the first argument after the common ones."""
    return _script("local epoch = ARGV[5]" + _FENCE + "if head[6] ~= digest then return -2 end" + body)


# ARGV: nonce, tenant's bound, total bound, request, room, then alternating fields and values. Returns the
# epoch, 0 if the session exists, or the refusal. The same nonce in the hash: a retry after a lost answer.
CREATE = _script("""
local there = redis.call('HMGET', KEYS[1], 'nonce', 'epoch')
if there[1] then return {there[1] == ARGV[5] and tonumber(there[2]) or 0} end
local need = session_overhead + ARGV[9]
if redis.call('EXISTS', KEYS[10]) == 0 then need = need + request_overhead + #ARGV[8] end
local no = refusal(need, tonumber(ARGV[6]), tonumber(ARGV[7]))
if no then return no end
store_request(ARGV[8])
local epoch = next_epoch()
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 'nonce', ARGV[5], 'epoch', epoch, 'first_epoch', epoch, 'turn', 0, 'size', 0,
  'created', now, 'lease', now + lease_ms, 'digest', digest, 'room', ARGV[9], unpack(ARGV, 10))
redis.call('SADD', KEYS[4], name)
renew()
return {epoch}
""")

# KEYS: the common ones, then those of the previous turn's request. ARGV: as CREATE, with the previous turn's
# epoch and digest before the fields. Returns the new epoch, 0 if the session has another epoch or digest or
# is not finished, -1 if there is no session, or the refusal.
NEXT_TURN = _script("""
local head = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason', 'nonce', 'digest')
if not head[1] then return {-1} end
if head[3] == ARGV[5] then return {tonumber(head[1])} end
if tonumber(head[1]) ~= tonumber(ARGV[10]) or head[4] ~= ARGV[11] or not head[2] then return {0} end
local need, before = ARGV[9] - redis.call('STRLEN', KEYS[2]), tenant .. '/' .. ARGV[11]
if redis.call('EXISTS', KEYS[10]) == 0 then need = need + request_overhead + #ARGV[8] end
if redis.call('ZCOUNT', KEYS[13], now, '+inf') == 1 then
  need = need - (redis.call('HGET', KEYS[7], before) or 0)
end
local no = refusal(need, tonumber(ARGV[6]), tonumber(ARGV[7]))
if no then return no end
store_request(ARGV[8])
local epoch = next_epoch()
redis.call('DEL', KEYS[2])
if ARGV[11] ~= digest then leave(KEYS[12], KEYS[13], before) end
redis.call('HDEL', KEYS[1], 'finish_reason')
redis.call('HINCRBY', KEYS[1], 'turn', 1)
redis.call('HSET', KEYS[1], 'nonce', ARGV[5], 'epoch', epoch, 'size', 0, 'lease', now + lease_ms,
  'digest', digest, 'room', ARGV[9], unpack(ARGV, 12))
redis.call('SADD', KEYS[4], name)
renew()
return {epoch}
""")

_APPEND = """
local length = redis.call('STRLEN', KEYS[2])
if length ~= tonumber(head[3]) then return -5 end
if length ~= tonumber(offset) then
  local replayed = length == offset + #data and redis.call('GETRANGE', KEYS[2], offset, -1) == data
  return replayed and length or -3
end
if head[2] then return -3 end
if head[4] and head[4] ~= identity then return -6 end
length = redis.call('APPEND', KEYS[2], data)
local fields = {'size', length}
if state ~= '' then fields[3], fields[4] = 'state', state end
if not head[4] and identity ~= '' then
  fields[#fields + 1], fields[#fields + 2] = 'model_identity', identity
end
"""

# KEYS: hash and tokens only. ARGV: epoch, offset (bytes), data, state or '', identity of the target or '',
# ms below which the ttl must be renewed. Returns the bytes stored, and whether a RENEW is due. A commit that
# is already stored succeeds: it is a retry after a lost answer. The first identity is kept for the session,
# in later turns too.
COMMIT = (
    "local epoch, offset, data, state, identity, low = unpack(ARGV)"
    + _FENCE
    + _APPEND
    + """
redis.call('HSET', KEYS[1], unpack(fields))
local left = redis.call('PTTL', KEYS[1])
if length == #data then redis.call('PEXPIRE', KEYS[2], math.max(left, 1)) end
return {length, (left < tonumber(low) or not head[5]) and 1 or 0}
"""
)

# The commit that ends the turn. ARGV: epoch, offset, data, state, identity, finish reason.
END = (
    COMMON
    + "local epoch, offset, data, state, identity, reason = unpack(ARGV, 5)"
    + _FENCE
    + "if head[6] ~= digest then return -2 end\n"
    + _APPEND
    + """
fields[#fields + 1], fields[#fields + 2] = 'finish_reason', reason
redis.call('HSET', KEYS[1], unpack(fields))
redis.call('HDEL', KEYS[1], 'lease')
redis.call('SREM', KEYS[4], name)
renew()
return length
"""
)

# ARGV: '', tenant's bound, total bound. Returns the new epoch (a finished session keeps its), or the refusal.
TAKE_OVER = _script("""
local head = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason', 'digest', 'lease', 'room')
if not head[3] then return {-1} end
if head[3] ~= digest then return {-10} end
if head[2] then return {tonumber(head[1])} end
local need = head[4] and 0 or math.max(head[5] - redis.call('STRLEN', KEYS[2]), 0)
local no = refusal(need, tonumber(ARGV[6]), tonumber(ARGV[7]))
if no then return no end
local epoch = next_epoch()
redis.call('HSET', KEYS[1], 'lease', now + lease_ms, 'epoch', epoch)
redis.call('SADD', KEYS[4], name)
renew()
return {epoch}
""")

# Renews the lease of an owner, which may have nothing to commit for a while. ARGV: epoch.
RENEW = _owners("""
if head[2] then return 0 end
redis.call('HSET', KEYS[1], 'lease', now + lease_ms)
redis.call('SADD', KEYS[4], name)
renew()
return 1
""")

# Ends the lease of the owner. ARGV: epoch, state or ''.
DETACH = _owners("""
redis.call('HDEL', KEYS[1], 'lease')
if ARGV[6] ~= '' then redis.call('HSET', KEYS[1], 'state', ARGV[6]) end
redis.call('SREM', KEYS[4], name)
renew()
return 1
""")

# Ends the turn if it has not ended. Returns the epoch of the ended turn: later commits are refused.
CANCEL = _script(
    _HEAD
    + """
if head[2] then return tonumber(head[1]) end
redis.call('HDEL', KEYS[1], 'lease')
redis.call('SREM', KEYS[4], name)
local epoch = next_epoch()
redis.call('HSET', KEYS[1], 'finish_reason', 'cancelled', 'epoch', epoch)
charge_session(now + redis.call('PTTL', KEYS[1]))
return epoch
"""
)

# Returns the state of a session that was running: -1 it does not exist, 0 it has an owner, else the epoch of
# the owner that detached it, finished it, or died. The epoch is kept: an owner that was only slow may
# continue. A lease longer than `lease_ms` was written before the clock was set back, and is shortened. What
# is reserved for the session's response (see `orchestrator.storage.response_store`) is given back.
REAP = _script("""
local head = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason', 'lease')
if head[1] and head[3] and not head[2] then
  local left = head[3] - now
  if left > lease_ms then redis.call('HSET', KEYS[1], 'lease', now + lease_ms) end
  if left > 0 then return 0 end
  redis.call('HDEL', KEYS[1], 'lease')
  charge_session(now + redis.call('PTTL', KEYS[1]))
  local item = tenant .. '/' .. name
  local charged = redis.call('HMGET', KEYS[7], item, item .. '+')
  if charged[2] then charge(item, charged[1] - charged[2], 0) end
end
redis.call('SREM', KEYS[4], name)
return tonumber(head[1] or -1)
""")

# Returns whether the session existed; -10 if it has another request. DEL comes first: at its memory limit
# Redis accepts it, and then the rest of the script.
DELETE = _script("""
local there = redis.call('HGET', KEYS[1], 'digest')
if there and there ~= digest then return -10 end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('SREM', KEYS[4], name)
redis.call('ZREM', KEYS[5], name)
charge(name, 0, 0)
if there then leave(KEYS[10], KEYS[11], request) end
return there and 1 or 0
""")

# ARGV: epoch of the writing owner, records, tenant's bound, total bound. Returns the bytes stored; -1 if the
# session is gone, also if another one has its name now; -7 and -8 if a bound is exceeded.
RECORD = _script("""
local first = redis.call('HGET', KEYS[1], 'first_epoch')
if not first or tonumber(ARGV[5]) < tonumber(first) then return -1 end
-- Sent again after its answer was lost: records carry times, so that two are never the same.
if redis.call('GETRANGE', KEYS[3], -#ARGV[6], -1) == ARGV[6] then return redis.call('STRLEN', KEYS[3]) end
local no = refusal(#ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]))
if no then return no[1] end
local left, length = redis.call('PTTL', KEYS[1]), redis.call('APPEND', KEYS[3], ARGV[6])
redis.call('PEXPIRE', KEYS[3], math.max(left, 1))
charge_session(now + left)
return length
""")

# KEYS: hash and tokens. Returns the time (ms), the fields of the hash, the tokens, and the ms until they
# expire. Not a transaction: at its memory limit Redis refuses even read-only ones.
READ = """
local clock = redis.call('TIME')
return {clock[1] * 1000 + math.floor(clock[2] / 1000), redis.call('HGETALL', KEYS[1]),
  redis.call('GET', KEYS[2]) or '', redis.call('PTTL', KEYS[1])}
"""

# KEYS: hashes of sessions. Returns the time (ms), and a line for each: the fields of
# `orchestrator.storage.session_store.SUMMARY_FIELDS`, '-' for absent ones, then the ms until it expires;
# '' if there is no session. Tokens are not read.
LIST = """
local fields, lines = ARGV, {}
for i, key in ipairs(KEYS) do
  local values = redis.call('HMGET', key, unpack(fields))
  lines[i] = ''
  if values[1] then
    for j = 1, #fields do values[j] = values[j] or '-' end
    values[#fields + 1] = redis.call('PTTL', key)
    lines[i] = table.concat(values, ' ')
  end
end
local clock = redis.call('TIME')
return {clock[1] * 1000 + math.floor(clock[2] / 1000), lines}
"""
