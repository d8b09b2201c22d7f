"""The Lua scripts of the session store: each is one atomic step in Redis.

KEYS[1] is the session's hash, KEYS[2] its tokens. `epoch` fences: who names another one than the hash holds
is no owner (any more). Clocks decide nothing but when a lease or a key runs out, and are Redis's own.

What commits, renewals and detaching answer when they do nothing: -1 no session, -2 another owner, -3 wrong
offset, -4 cancelled, -5 tokens are missing, -6 tokens of another model.
"""

from __future__ import annotations

__all__ = [
    "CANCEL",
    "CANCELLED",
    "COMMIT",
    "CREATE",
    "DELETE",
    "DETACH",
    "GONE",
    "LOST",
    "NEXT_TURN",
    "OTHER_MODEL",
    "OTHER_OWNER",
    "REAP",
    "RENEW",
    "TAKE_OVER",
    "TOUCH",
    "WRONG_OFFSET",
]

GONE, OTHER_OWNER, WRONG_OFFSET, CANCELLED, LOST, OTHER_MODEL = -1, -2, -3, -4, -5, -6

_NOW = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""

_FENCE = """
local head = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason', 'size', 'model_identity')
if not head[1] then return -1 end
if head[2] == 'cancelled' then return -4 end
if tonumber(head[1]) ~= tonumber(ARGV[1]) then return -2 end
"""

# ARGV: nonce, ttl (s), lease (ms), then field and value in turn. Answers the epoch, 0 where one is already.
# A nonce that is known: its answer got lost. KEYS[3] holds the epoch of a deleted session of this name, whose
# owner may not have noticed yet.
CREATE = (
    _NOW
    + """
local there = redis.call('HMGET', KEYS[1], 'nonce', 'epoch')
if there[1] then return there[1] == ARGV[1] and tonumber(there[2]) or 0 end
local epoch = tonumber(redis.call('GET', KEYS[3]) or 0) + 1
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'epoch', epoch, 'turn', 0, 'size', 0,
  'created', now, 'lease', now + ARGV[3], unpack(ARGV, 4))
redis.call('DEL', KEYS[2])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return epoch
"""
)

# ARGV: ttl. Answers whether there was such a session.
DELETE = """
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if not epoch then return 0 end
redis.call('SET', KEYS[3], epoch, 'EX', ARGV[1])
redis.call('DEL', KEYS[1], KEYS[2])
return 1
"""

# ARGV: nonce, ttl, lease, epoch of the finished turn, then fields. Answers the new epoch, 0 if it is not so.
NEXT_TURN = (
    _NOW
    + """
local head = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason', 'nonce')
if not head[1] then return -1 end
if head[3] == ARGV[1] then return tonumber(head[1]) end
if tonumber(head[1]) ~= tonumber(ARGV[4]) or not head[2] then return 0 end
redis.call('DEL', KEYS[2])
redis.call('HDEL', KEYS[1], 'finish_reason')
redis.call('HINCRBY', KEYS[1], 'turn', 1)
redis.call('HSET', KEYS[1], 'nonce', ARGV[1], 'size', 0, 'lease', now + ARGV[3], unpack(ARGV, 5))
redis.call('EXPIRE', KEYS[1], ARGV[2])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
"""
)

# ARGV: epoch, offset (bytes), data, ttl (s), finish reason or '', state or '', identity of the target or ''.
# Answers the bytes stored. A commit that is there already is answered as done: its first answer was lost on
# the way. The first identity that is named stays the session's, in later turns too.
COMMIT = (
    _FENCE
    + """
local offset, length = tonumber(ARGV[2]), redis.call('STRLEN', KEYS[2])
if length ~= tonumber(head[3]) then return -5 end
if length ~= offset then
  local replayed = length == offset + #ARGV[3] and redis.call('GETRANGE', KEYS[2], offset, -1) == ARGV[3]
  return replayed and length or -3
end
if head[2] then return -3 end
if head[4] and head[4] ~= ARGV[7] then return -6 end
length = redis.call('APPEND', KEYS[2], ARGV[3])
local fields = {'size', length}
if ARGV[5] ~= '' then
  fields[3], fields[4] = 'finish_reason', ARGV[5]
  redis.call('HDEL', KEYS[1], 'lease')
end
if ARGV[6] ~= '' then fields[#fields + 1], fields[#fields + 2] = 'state', ARGV[6] end
if not head[4] and ARGV[7] ~= '' then
  fields[#fields + 1], fields[#fields + 2] = 'model_identity', ARGV[7]
end
redis.call('HSET', KEYS[1], unpack(fields))
redis.call('EXPIRE', KEYS[1], ARGV[4])
redis.call('EXPIRE', KEYS[2], ARGV[4])
return length
"""
)

# ARGV: ttl, lease. Answers the new epoch; a finished session keeps its own.
TAKE_OVER = (
    _NOW
    + """
local head = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason')
if not head[1] then return -1 end
if head[2] then return tonumber(head[1]) end
redis.call('HSET', KEYS[1], 'lease', now + ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
"""
)

# ARGV: epoch, ttl, lease. The owner still works on it, though it may have nothing to commit for a while.
RENEW = (
    _NOW
    + _FENCE
    + """
if head[2] then return 0 end
redis.call('HSET', KEYS[1], 'lease', now + ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
"""
)

# ARGV: epoch, ttl, state or ''. The owner lets go of it.
DETACH = (
    _FENCE
    + """
redis.call('HDEL', KEYS[1], 'lease')
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'state', ARGV[3]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('EXPIRE', KEYS[2], ARGV[2])
return 1
"""
)

# Answers the epoch from which on nobody may commit any more: the turn has ended, now or before.
CANCEL = """
local head = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason')
if not head[1] then return -1 end
if head[2] then return tonumber(head[1]) end
redis.call('HSET', KEYS[1], 'finish_reason', 'cancelled')
redis.call('HDEL', KEYS[1], 'lease')
return redis.call('HINCRBY', KEYS[1], 'epoch', 1)
"""

# ARGV: lease. Answers what became of a session that was running: -1 gone, 0 somebody works on it, else the
# epoch of the owner who let it go, finished it, or vanished. The epoch stays: an owner that was only slow may
# go on. A lease longer than any that is given was written before the clock was set back.
REAP = (
    _NOW
    + """
local head = redis.call('HMGET', KEYS[1], 'epoch', 'finish_reason', 'lease')
if not head[1] then return -1 end
if head[2] or not head[3] then return tonumber(head[1]) end
local left = tonumber(head[3]) - now
if left > tonumber(ARGV[1]) then redis.call('HSET', KEYS[1], 'lease', now + ARGV[1]) end
if left > 0 then return 0 end
redis.call('HDEL', KEYS[1], 'lease')
return tonumber(head[1])
"""
)

# KEYS[1]: index of sessions by their last sign of life. ARGV: name, ttl. Names of expired sessions go.
TOUCH = (
    _NOW
    + """
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. (now - ARGV[2] * 1000))
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""
)
