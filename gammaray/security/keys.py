"""API keys: creation, storage and tenants.

A key is `gr_<id>_<secret>`: the id (8 hex digits) may be shown and logged, the secret (256 random bits) is
shown once, at creation. The key file holds the SHA-256 of the whole key. A slow hash such as scrypt protects
secrets chosen by people, by making each guess expensive; 256 random bits cannot be guessed anyway, and a slow
hash on every request would enable denial of service without a key.

A tenant may have several keys: to rotate, create a second key, switch the clients to it, revoke the first.
The tenant keeps its sessions throughout.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gammaray.checks import check_encodable
from gammaray.errors import InvalidArgumentError, NotFoundError

TENANT = r"[a-z0-9][a-z0-9-]{0,31}"
MAX_FILE_BYTES = 16 * 2**20
_KEY = re.compile(r"gr_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")


class ApiKey(BaseModel):
    """One entry of the key file; it cannot be used to authenticate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]  # the public part of the key
    tenant: Annotated[str, Field(pattern=f"^{TENANT}$")]  # tenant that owns the key: 1 to 32 of a-z 0-9 and -
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # SHA-256 of the whole key, in hex
    created_at: datetime
    note: Annotated[str, Field(max_length=256)] = ""

    def matches(self, key: str) -> bool:
        """Whether `key` is this one; compares in constant time."""
        return hmac.compare_digest(self.sha256, hash_key(key))


class _KeyFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    keys: tuple[ApiKey, ...] = ()


def hash_key(key: str) -> str:
    """Return the hash of a key, as stored in the key file."""
    return hashlib.sha256(key.encode()).hexdigest()


def make_secret() -> str:
    """Return a new key; it becomes valid once its hash is in the key file."""
    return f"gr_{secrets.token_hex(4)}_{secrets.token_urlsafe(32)}"


def key_id_of(key: str) -> str | None:
    """Return the id of a key; None if `key` is not in gammaray's format."""
    match = _KEY.fullmatch(key)
    return match[1] if match else None


def is_tenant(name: str) -> bool:
    return re.fullmatch(TENANT, name) is not None


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys of a file; InvalidArgumentError names the wrong place, never the content."""
    allowed = "a key file made by `gammaray keys create`"
    text = read_bounded(path, "api_keys_file", allowed)
    try:
        keys = _KeyFile.model_validate_json(text).keys
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            got = f"{path}, which is not JSON ({first['ctx']['error']})"
        else:
            got = f"{path}, invalid at {'.'.join(map(str, first['loc'])) or 'the top level'}"
        raise InvalidArgumentError("api_keys_file", got, allowed) from None
    if len({key.id for key in keys}) != len(keys):
        raise InvalidArgumentError("api_keys_file", f"{path}, with a duplicate id", allowed)
    return keys


def read_bounded(path: Path, field: str, allowed: str) -> bytes:
    """Return the content of a key file; InvalidArgumentError if it cannot be read, or is too large."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidArgumentError(field, f"{path}, which is too large", allowed)
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(field, f"{path} ({error.strerror})", allowed) from None


def create_key(path: Path, tenant: str, note: str = "") -> tuple[ApiKey, str]:
    """Add a key to a file, which is created if missing; return the entry and the key itself."""
    if not is_tenant(tenant):
        raise InvalidArgumentError("tenant", tenant, "1 to 32 of a-z 0-9 and -, not - first")
    check_encodable("note", note)
    if len(note) > 256:
        raise InvalidArgumentError("note", f"{len(note)} characters", "at most 256")
    with locked(path, "api_keys_file"):
        keys = read_keys(path) if path.exists() else ()
        secret = make_secret()
        while any(key.id == key_id_of(secret) for key in keys):
            secret = make_secret()
        key = ApiKey(
            id=key_id_of(secret) or "",
            tenant=tenant,
            sha256=hash_key(secret),
            created_at=datetime.now(timezone.utc).replace(microsecond=0),
            note=note,
        )
        _write(path, (*keys, key))
    return key, secret


def revoke_key(path: Path, key_id: str) -> ApiKey:
    """Remove a key from a file and return its entry; servers notice within a second."""
    with locked(path, "api_keys_file"):
        keys = read_keys(path)
        found = next((key for key in keys if key.id == key_id), None)
        if found is None:
            raise NotFoundError(f"no key {key_id!r} in {path}")
        _write(path, [key for key in keys if key.id != key_id])
    return found


@contextlib.contextmanager
def locked(path: Path, field: str) -> Iterator[None]:
    """Lock a key file against other writers, so that concurrent commands do not lose keys."""
    import fcntl  # not on Windows, where this module must be importable

    try:
        directory = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise InvalidArgumentError(
            field, f"{path} ({error.strerror})", "a file in an existing directory"
        ) from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    replace_file(path, _KeyFile(keys=tuple(keys)).model_dump_json(indent=2) + "\n", "api_keys_file")


def replace_file(path: Path, text: str, field: str) -> None:
    """Replace a key file atomically: a server never reads a part of one. Only its owner can read it.

    What root writes belongs to the owner of the file before, or of the folder: `sudo` locks no server out.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(handle)
            if os.geteuid() == 0:
                owner = (path if path.exists() else path.parent).stat()
                os.chown(name, owner.st_uid, owner.st_gid)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        raise InvalidArgumentError(field, f"{path} ({error.strerror})", "a writable file") from None
