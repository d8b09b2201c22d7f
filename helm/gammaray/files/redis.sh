# Starts the bundled Redis; reads REDISCLI_AUTH, MEMORY_LIMIT (bytes), MAX_MEMORY_PERCENT, DATA_DIR and PORT.
# A hash supports passwords of any characters, which the configuration file would need quoted.
hash=$(printf %s "$REDISCLI_AUTH" | sha256sum | cut -c 1-64)
umask 077
# Every change is appended to a file within a second, so snapshots are not needed.
exec redis-server - <<END
port $PORT
dir "$DATA_DIR"
user default on #$hash ~* &* +@all
appendonly yes
appendfsync everysec
save ""
maxmemory $((MEMORY_LIMIT / 100 * MAX_MEMORY_PERCENT))
maxmemory-policy noeviction
END
