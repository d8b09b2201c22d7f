"""Tenants of a cluster that learns: they agree, delete sessions and withdraw while others are served."""

from __future__ import annotations

import asyncio
import hashlib
import random
import stat
import time
import uuid
from pathlib import Path

from gammaray import AsyncClient
from gammaray.learning.folder import LearningFolder, stored_streams
from gammaray.security.keys import create_key
from tests.fuzz.campaign import Campaign
from tests.support.cli_helpers import invoke

SERVED = "soak"
"""Tenant of all other load; it agrees throughout."""

NAMES = {"acme": "own", "zeta": "shared", "eta": "shared"}
DELETED_S = 10.0
"""Within which the stream of a deleted session leaves a busy worker's disk."""


class Tenants:
    """Each of them is served, deletes a session, withdraws and agrees again."""

    def __init__(self, directory: Path) -> None:
        self.keys_file, self._folder = directory / "keys.json", directory / "learn"
        self._keys = {name: create_key(self.keys_file, name)[1] for name in (SERVED, *NAMES)}
        self.key = self._keys[SERVED]
        self._drafters("allow", SERVED)
        for name in NAMES:
            self._allow(name)

    @property
    def options(self) -> tuple[str, ...]:
        return "--api-keys-file", str(self.keys_file), "--learn", str(self._folder)

    async def change(self, grpc: str, campaign: Campaign, rng: random.Random, until: float) -> None:
        """Serve, delete and withdraw until a time; finish what has begun."""
        while time.monotonic() < until:
            name = rng.choice(list(NAMES))
            try:
                await self._serve(grpc, name)
                if rng.random() < 0.5:
                    await asyncio.to_thread(self._forget, name)
                    await asyncio.to_thread(self._allow, name)
            except Exception as error:
                campaign.count("tenants", type(error).__name__, wrong=f"{name}: {error!r}")
            else:
                campaign.count("tenants", "right")

    def left(self) -> list[str]:
        """Let all withdraw, and return descriptions of what is left of them, or open to others."""
        wrong = []
        for name in NAMES:
            try:
                self._forget(name)
            except AssertionError as error:
                wrong.append(str(error))
        for path in (self._folder, *self._folder.rglob("*")):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode != (0o700 if path.is_dir() else 0o600):
                wrong.append(f"{path} has the mode {mode:o}")
        return wrong

    async def _serve(self, grpc: str, name: str) -> None:
        async with AsyncClient(grpc, api_key=self._keys[name]) as client:
            sessions = [uuid.uuid4().hex for _ in range(2)]
            for session in sessions:
                await client.complete("x = ", session_id=session, max_tokens=40, ignore_eos=True)
            await client.delete_session(sessions[0])
        digest = hashlib.sha256(f"{name}:{sessions[0]}".encode()).hexdigest()[:16]
        ends = time.monotonic() + DELETED_S
        while await asyncio.to_thread(lambda: list(self._folder.rglob(f"*_{digest}_*"))):
            assert time.monotonic() < ends, "the stream of a deleted session is kept"
            await asyncio.sleep(0.1)

    def _allow(self, name: str) -> None:
        self._drafters("allow", name, *(["--shared"] if NAMES[name] == "shared" else []))

    def _forget(self, name: str) -> None:
        self._drafters("forget", name)
        folder = LearningFolder(self._folder)
        for store in folder.stores():
            kept = [one for one in stored_streams(store.path / "records") if f"_{name}_" in one.path.name]
            assert not kept, f"{name} withdrew: {store.path.name} has {kept}"
            for version in store.read().versions:
                is_over = name not in version.tenants or version.status == "retired"
                assert is_over, f"{name} withdrew: {version}"
        own = folder.path / f"tenant-{name}"
        left = [path for path in own.rglob("*") if path.is_file() and path.name != "state.json"]
        assert not left, f"{name} withdrew: {left}"

    def _drafters(self, *arguments: str) -> None:
        found = invoke("drafters", "--folder", self._folder, *arguments)
        assert found.exit_code == 0, f"{arguments}: {found.stderr} {found.exception!r}"
