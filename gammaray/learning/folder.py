"""The folder in which the workers of one machine learn from their traffic.

    FOLDER/tenants.json           tenants that agreed, see `LearningFolder.consent`
    FOLDER/NAME/state.json        the versions of one drafter, see `Drafters`
    FOLDER/NAME/versions/000001/  its weights, as `gammaray train` writes them
    FOLDER/NAME/records/          finished streams that it may learn from

NAME is `tenant-` and the tenant's name, `shared` for the tenants that share one, or `open` for all requests
to a cluster without API keys. Version 0 is the head or draft model that the workers were started with.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gammaray.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gammaray.security.keys import is_tenant, locked, replace_file

OPEN, SHARED, _TENANT = "open", "shared", "tenant-"

Consent = Literal["own", "shared"]
"""Which drafter a tenant's streams train: one of its own, or the shared one."""

_Model = TypeVar("_Model", bound=BaseModel)

Status = Literal["candidate", "stable", "former", "rolled back", "retired"]


class RecordName(NamedTuple):
    """What the name of a stream's file says.

    Args:
        written_at: Unix time in nanoseconds.
        tenant: Whose stream it is.
        session: First 16 hex digits of the SHA-256 of the session's id.
        num_answer: Number of tokens that can be learnt from.
    """

    written_at: int
    tenant: str
    session: str
    num_answer: int

    @classmethod
    def parse(cls, path: Path) -> RecordName:
        written_at, tenant, session, num_answer = path.stem.split("_")
        return cls(int(written_at), tenant, session, int(num_answer))

    def __str__(self) -> str:
        return f"{'_'.join(map(str, self))}.npz"


def stored_streams(records: Path) -> list[Path]:
    """Return the files of all streams in a folder, also of one whose writer was killed."""
    return [*records.glob("*.npz"), *records.glob("*.new")]


class Version(BaseModel):
    """One version of a drafter.

    Args:
        number: From 1 on.
        parent: The version that its training began with; 0 is the drafter of the start.
        created_at: When it was published.
        tenants: Tenants whose streams it, or a version before it, was trained on; "" without API keys.
        tokens: Tokens of completions that its training could draw from.
        expected: Tokens per proposal that held-out streams expect, of five.
        parent_expected: The same of its parent.
        status: candidate: serves a share of the sessions; stable: serves all others; former: was stable;
            rolled back: was worse or could not be loaded; retired: its data were deleted.
        reason: Why it was rolled back or retired.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    parent: int
    created_at: datetime
    tenants: tuple[str, ...]
    tokens: int
    expected: float
    parent_expected: float
    status: Status = "candidate"
    reason: str = ""


class Drafters(BaseModel):
    """The versions of one drafter.

    Args:
        versions: By number, from 1 on.
        stable: Number of the version that serves; 0 is the drafter of the start.
        is_pinned: Whether no further version is published.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: tuple[Version, ...] = ()
    stable: int = 0
    is_pinned: bool = False

    @property
    def candidate(self) -> int | None:
        """Number of the version that serves a share of the sessions."""
        return next((one.number for one in self.versions if one.status == "candidate"), None)

    def version(self, number: int) -> Version:
        """Return a version; NotFoundError if there is none of this number."""
        if not 1 <= number <= len(self.versions):
            raise NotFoundError(f"no version {number} of {len(self.versions)}")
        return self.versions[number - 1]

    def with_status(self, number: int, status: Status, reason: str = "") -> Drafters:
        """Return these with another status of one version."""
        changed = self.version(number).model_copy(update={"status": status, "reason": reason})
        versions = (*self.versions[: number - 1], changed, *self.versions[number:])
        return self.model_copy(update={"versions": versions})

    def with_stable(self, number: int) -> Drafters:
        """Return these with another stable version; the one before becomes a former one."""
        changed = self
        if self.stable and self.version(self.stable).status == "stable":
            changed = changed.with_status(self.stable, "former")
        if number:
            changed = changed.with_status(number, "stable")
        return changed.model_copy(update={"stable": number})

    def ancestor(self, number: int) -> int:
        """Return the nearest version before this one that was stable and may serve; 0 if there is none."""
        while number:
            number = self.version(number).parent
            if number and self.version(number).status in ("former", "stable"):
                return number
        return 0


def _read(kind: type[_Model], path: Path) -> _Model:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return kind()
    except (OSError, ValidationError) as error:
        raise FailedPreconditionError(f"{path} cannot be read ({type(error).__name__})") from None


def _change(kind: type[_Model], path: Path, change: Callable[[_Model], _Model]) -> _Model:
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, "learn"):
        before = _read(kind, path)
        after = change(before)
        if after != before:
            replace_file(path, after.model_dump_json(indent=1) + "\n", "learn")
    return after


class DrafterStore:
    """The versions of one drafter on disk, in FOLDER/NAME; processes change them one after another."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Drafters:
        """Return the versions; FailedPreconditionError if the file cannot be read."""
        return _read(Drafters, self.path / "state.json")

    def directory(self, number: int) -> Path:
        return self.path / "versions" / f"{number:06d}"

    def publish(self, written: Path, make: Callable[[int], Version]) -> Version | None:
        """Add a version, which `make` returns for its number, as the candidate.

        Args:
            written: Its directory, which is moved here.

        Returns:
            The version; None if there is a candidate, or the stable version is pinned.
        """
        published: list[Version] = []

        def add(found: Drafters) -> Drafters:
            if found.candidate is not None or found.is_pinned:
                return found
            version = make(len(found.versions) + 1)
            directory = self.directory(version.number)
            directory.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(directory, ignore_errors=True)  # of a publisher that died before the next line
            os.replace(written, directory)
            published.append(version)
            return found.model_copy(update={"versions": (*found.versions, version)})

        self._change(add)
        return published[0] if published else None

    def promote(self, number: int) -> None:
        """Make the candidate the stable version; another version's number changes nothing."""
        self._change(lambda found: found.with_stable(number) if found.candidate == number else found)

    def roll_back(self, number: int, reason: str) -> int:
        """End a version: a candidate, or the stable one, which the nearest version before it replaces.

        Returns the number of the stable version.
        """

        def end(found: Drafters) -> Drafters:
            if found.version(number).status not in ("candidate", "stable"):
                return found
            if found.stable == number:
                found = found.with_stable(found.ancestor(number))
            return found.with_status(number, "rolled back", reason)

        return self._change(end).stable

    def pin(self, number: int) -> None:
        """Make a version stable, and publish no other one until `unpin`; 0 is the drafter of the start.

        Raises FailedPreconditionError if it was retired.
        """

        def pin(found: Drafters) -> Drafters:
            if number and found.version(number).status == "retired":
                raise FailedPreconditionError(f"version {number} was retired: {found.version(number).reason}")
            if (candidate := found.candidate) not in (None, number):
                found = found.with_status(candidate, "rolled back", f"version {number} was pinned")
            return found.with_stable(number).model_copy(update={"is_pinned": True})

        self._change(pin)

    def unpin(self) -> None:
        """Allow further versions."""
        self._change(lambda found: found.model_copy(update={"is_pinned": False}))

    def retire(self, tenant: str) -> list[int]:
        """End and delete the versions that were trained on a tenant's streams; return their numbers."""
        retired: list[int] = []

        def retire(found: Drafters) -> Drafters:
            for one in found.versions:
                if tenant in one.tenants and one.status != "retired":
                    retired.append(one.number)
            for number in retired:
                found = found.with_status(number, "retired", f"data of tenant {tenant} were deleted")
            if found.stable in retired:
                found = found.with_stable(found.ancestor(found.stable))
            return found

        self._change(retire)
        for number in retired:
            shutil.rmtree(self.directory(number), ignore_errors=True)
        return retired

    def _change(self, change: Callable[[Drafters], Drafters]) -> Drafters:
        return _change(Drafters, self.path / "state.json", change)


class _Tenants(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants: dict[str, Consent] = {}


class LearningFolder:
    """What one machine learns from its traffic, in FOLDER."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tenants_file = path / "tenants.json"

    def consents(self) -> dict[str, Consent]:
        """Return which drafter the streams of each tenant train; of others nothing is kept."""
        return _read(_Tenants, self._tenants_file).tenants

    def consent(self, tenant: str, to: Consent) -> None:
        """Note that a tenant's streams may be kept and learnt from."""
        if not is_tenant(tenant):
            raise InvalidArgumentError("tenant", tenant, "1 to 32 of a-z 0-9 and -, not - first")
        self._change_consents(lambda found: {**found, tenant: to})

    def forget(self, tenant: str) -> dict[str, list[int]]:
        """Withdraw a tenant's consent, and delete its streams and the versions that were trained on them.

        Returns the numbers of these versions, by drafter.
        """
        if tenant:
            self._change_consents(lambda found: {name: to for name, to in found.items() if name != tenant})
        for records in self.path.glob("*/records"):
            for path in stored_streams(records):
                if RecordName.parse(path).tenant == tenant:
                    path.unlink(missing_ok=True)
        found = {store.path.name: store.retire(tenant) for store in self.stores()}
        return {name: numbers for name, numbers in found.items() if numbers}

    def drafter_of(self, tenant: str, consents: dict[str, Consent]) -> str | None:
        """Return the drafter that serves a tenant and learns from it; None: that of the start, and nothing.

        Without API keys `tenant` is empty; `consents` are those of the folder.
        """
        if not tenant:
            return OPEN
        to = consents.get(tenant)
        return None if to is None else SHARED if to == "shared" else _TENANT + tenant

    def store(self, name: str) -> DrafterStore:
        """Return the versions of a drafter; InvalidArgumentError if the name is none's."""
        if name not in (OPEN, SHARED) and not (
            name.startswith(_TENANT) and is_tenant(name.removeprefix(_TENANT))
        ):
            raise InvalidArgumentError("drafter", name, f"{OPEN}, {SHARED} or {_TENANT}NAME")
        return DrafterStore(self.path / name)

    def stores(self) -> Iterator[DrafterStore]:
        """Yield the drafters that have a folder."""
        for path in sorted(self.path.glob("*")):
            if path.is_dir() and (path.name in (OPEN, SHARED) or path.name.startswith(_TENANT)):
                yield DrafterStore(path)

    def _change_consents(self, change: Callable[[dict[str, Consent]], dict[str, Consent]]) -> None:
        _change(_Tenants, self._tenants_file, lambda found: _Tenants(tenants=change(found.tenants)))
