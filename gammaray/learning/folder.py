"""The folder in which the workers of one machine learn from their traffic.

    FOLDER/tenants.json           tenants that agreed, see `Consents`
    FOLDER/training.json          what the training process says of each drafter
    FOLDER/workers/               what each worker at work has applied, see `Confirmation`
    FOLDER/NAME/state.json        the versions of one drafter, see `DrafterState`
    FOLDER/NAME/versions/000001/  its weights, as `gammaray train` writes them
    FOLDER/NAME/records/          finished streams that it may learn from

NAME is `tenant-` and the tenant's name, `shared` for the tenants that share one, or `open` for all requests
to a cluster without API keys. Version 0 is the head that the workers were started with. All of it is for the
folder's owner alone.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gammaray.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gammaray.learning.consents import OPEN, SHARED, TENANT, Consent, Consents, confirmed
from gammaray.learning.private import make_folder, secure
from gammaray.program.files import try_lock
from gammaray.security.keys import is_tenant, locked, replace_file

ANCESTORS, FORMER, LISTED = 3, 3, 20
"""Versions that `rollback` reaches one after another, other ended ones whose weights are kept, and the newest
that are listed."""

TENANTS_FILE, NOTES_FILE, LOCK_FILE = "tenants.json", "training.json", "trainer.lock"

_Model = TypeVar("_Model", bound=BaseModel)

Status = Literal["candidate", "stable", "former", "rolled back", "deleted", "retired"]


def _is_drafter(name: str) -> bool:
    return name in (OPEN, SHARED) or (name.startswith(TENANT) and is_tenant(name.removeprefix(TENANT)))


class RecordName(NamedTuple):
    """What the name of a stream's file says."""

    written_at: int  # Unix time in nanoseconds
    tenant: str  # whose stream it is
    session: str  # first 16 hex digits of the SHA-256 of the session's id
    num_answer: int  # number of tokens that can be learnt from

    @classmethod
    def parse(cls, path: Path) -> RecordName:
        """Return what a name says; ValueError if it is not one of a stream."""
        written_at, tenant, session, num_answer = path.stem.split("_")
        return cls(int(written_at), tenant, session, int(num_answer))

    def __str__(self) -> str:
        return f"{'_'.join(map(str, self))}.npz"


class Stream(NamedTuple):
    """A file in a folder of streams, also of a writer that was killed."""

    path: Path
    size: int
    at: float  # Unix time, the earlier one of the file's and of its name's: a clock may have been wrong
    name: RecordName | None  # None if it was not written as a stream; it may be a copy of one


def stored_streams(records: Path) -> Iterator[Stream]:
    """Yield the files of a folder in any order; none if there is no such folder."""
    with suppress(FileNotFoundError), os.scandir(records) as entries:
        for entry in entries:
            path, name = Path(entry.path), None
            with suppress(FileNotFoundError):  # deleted meanwhile
                found = entry.stat(follow_symlinks=False)
                with suppress(ValueError):
                    name = RecordName.parse(path)
                at = min(found.st_mtime, name.written_at / 1e9) if name else found.st_mtime
                if not stat.S_ISDIR(found.st_mode):
                    yield Stream(path, found.st_size, at, name)


class Version(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int  # from 1 on
    parent: int  # the version that its training began with; 0 is the drafter of the start
    created_at: datetime  # when it was published
    # Tenants whose streams it, or one before it, was trained on, with the numbers of their consents.
    tenants: dict[str, int]
    tokens: int  # tokens of completions that its training could draw from
    expected: float  # tokens per proposal that held-out streams expect, of five
    parent_expected: float  # the same of its parent
    # candidate: serves a share of the sessions; stable: serves all others; former: was stable; rolled back:
    # was worse or could not be loaded; deleted: one of these without weights; retired: its tenant withdrew.
    status: Status = "candidate"
    reason: str = ""  # why it was rolled back or retired


class DrafterState(BaseModel):
    """Which versions of a drafter there are, and which of them serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    versions: tuple[Version, ...] = ()  # the newest ones, and those whose weights are kept, by number
    stable: int = 0  # number of the version that serves; 0 is the drafter of the start
    is_pinned: bool = False  # whether no further version is published

    @property
    def candidate(self) -> int | None:
        """Number of the version that serves a share of the sessions."""
        return next((one.number for one in self.versions if one.status == "candidate"), None)

    def version(self, number: int) -> Version:
        """Return a version; NotFoundError if there is none of this number."""
        for one in self.versions:
            if one.number == number:
                return one
        raise NotFoundError(f"no version {number} of {self.newest}")

    @property
    def newest(self) -> int:
        return self.versions[-1].number if self.versions else 0

    def with_status(self, number: int, status: Status, reason: str = "") -> DrafterState:
        changed = self.version(number).model_copy(update={"status": status, "reason": reason})
        versions = tuple(changed if one.number == number else one for one in self.versions)
        return self.model_copy(update={"versions": versions})

    def with_stable(self, number: int) -> DrafterState:
        """Return the state with another stable version; the one before becomes a former one."""
        changed = self
        if self.stable and self.version(self.stable).status == "stable":
            changed = changed.with_status(self.stable, "former")
        if number:
            changed = changed.with_status(number, "stable")
        return changed.model_copy(update={"stable": number})

    def ancestor(self, number: int) -> int:
        """Return the nearest version before this one that was stable and may serve; 0 if there is none."""
        by_number = {one.number: one for one in self.versions}
        while number in by_number:
            number = by_number[number].parent
            if number in by_number and by_number[number].status in ("former", "stable"):
                return number
        return 0

    def kept(self) -> set[int]:
        """Return the numbers of the versions whose weights are kept."""
        numbers, number = {self.stable, self.candidate or 0}, self.stable
        for _ in range(ANCESTORS):
            numbers.add(number := self.ancestor(number))
        ended = [one.number for one in self.versions if one.status in ("former", "rolled back")]
        return numbers.union(ended[-FORMER:]) - {0}

    def bounded(self) -> DrafterState:
        """Return the state without the oldest versions whose weights are not kept."""
        kept, found = self.kept(), self
        for one in self.versions:
            if one.number not in kept and one.status in ("former", "rolled back"):
                found = found.with_status(one.number, "deleted", one.reason)
        listed = [one for one in found.versions if one.number in kept or one.number > self.newest - LISTED]
        return found.model_copy(update={"versions": tuple(listed)})


def _read(kind: type[_Model], path: Path) -> _Model:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return kind()
    except (OSError, ValidationError) as error:
        raise FailedPreconditionError(f"{path} cannot be read ({type(error).__name__})") from None


class DrafterFolder:
    """The folder of one drafter, FOLDER/NAME; processes change its state one after another."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> DrafterState:
        """Return the versions; FailedPreconditionError if the file cannot be read."""
        return _read(DrafterState, self.path / "state.json")

    def directory(self, number: int) -> Path:
        return self.path / "versions" / f"{number:06d}"

    def publish(self, written: Path, make: Callable[[int], Version]) -> Version | None:
        """Add a version, which `make` returns for its number, as the candidate, and return it.

        The directory `written` is moved here; or deleted, and None returned, if there is a candidate, the
        stable version is pinned, or a consent on which the version rests was withdrawn.
        """
        published: list[Version] = []

        def add(found: DrafterState) -> DrafterState:
            version = make(found.newest + 1)
            consents = _read(Consents, self.path.parent / TENANTS_FILE)
            if found.candidate is not None or found.is_pinned or not consents.covers(version.tenants):
                return found
            directory = self.directory(version.number)
            make_folder(directory.parent)
            shutil.rmtree(directory, ignore_errors=True)  # of a publisher that died before the next line
            os.replace(written, directory)
            secure(self.path)
            published.append(version)
            return found.model_copy(update={"versions": (*found.versions, version)})

        self._change(add)
        shutil.rmtree(written, ignore_errors=True)
        return published[0] if published else None

    def promote(self, number: int) -> None:
        """Make the candidate the stable version; another version's number changes nothing."""
        self._change(lambda found: found.with_stable(number) if found.candidate == number else found)

    def roll_back(self, number: int, reason: str) -> int:
        """End the candidate, or the stable version for the one before; return the stable one's number."""

        def end(found: DrafterState) -> DrafterState:
            if found.version(number).status not in ("candidate", "stable"):
                return found
            if found.stable == number:
                found = found.with_stable(found.ancestor(number))
            return found.with_status(number, "rolled back", reason)

        return self._change(end).stable

    def pin(self, number: int) -> None:
        """Make a version stable (0: the drafter of the start), and publish no other one until `unpin`."""

        def pin(found: DrafterState) -> DrafterState:
            if number and (one := found.version(number)).status in ("retired", "deleted"):
                raise FailedPreconditionError(f"the weights of version {number} were deleted: {one.reason}")
            if (candidate := found.candidate) not in (None, number):
                found = found.with_status(candidate, "rolled back", f"version {number} was pinned")
            return found.with_stable(number).model_copy(update={"is_pinned": True})

        self._change(pin)

    def unpin(self) -> None:
        """Allow further versions."""
        self._change(lambda found: found.model_copy(update={"is_pinned": False}))

    def clean(self, consents: Consents, *, unpublished: bool = False) -> list[int]:
        """Retire versions whose consents were withdrawn, and return their numbers.

        All weights that no version needs are deleted, with `unpublished` also those that are being written.
        """
        retired: list[int] = []

        def retire(found: DrafterState) -> DrafterState:
            for one in found.versions:
                if one.status != "retired" and not consents.covers(one.tenants):
                    retired.append(one.number)
                    found = found.with_status(one.number, "retired", "its tenant withdrew")
            if found.stable in retired:
                found = found.with_stable(found.ancestor(found.stable))
            if unpublished and (self.path / "new").exists():
                # Renamed first: who writes there gets an error, and publishes no half of it.
                os.replace(self.path / "new", make_folder(self.path / "versions") / f"new-{time.time_ns()}")
            return found

        if self.path.is_dir():
            self._change(retire)
        return retired

    def _change(self, change: Callable[[DrafterState], DrafterState]) -> DrafterState:
        path = self.path / "state.json"
        make_folder(self.path)
        with locked(path, "learn"):
            before = _read(DrafterState, path)
            after = change(before).bounded()
            if after != before:
                replace_file(path, after.model_dump_json(indent=1) + "\n", "learn")
            kept = {f"{number:06d}" for number in after.kept()}
            for weights in (self.path / "versions").glob("*"):
                if weights.name not in kept:
                    shutil.rmtree(weights, ignore_errors=True)
        return after


class LearningFolder:
    """What one machine learns from its traffic, in FOLDER."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def secure(self) -> None:
        """Make the folder, for its owner alone; InvalidArgumentError for other contents or another owner."""
        allowed = "a folder of this user that is new, empty, or for its owner alone (0700)"
        try:
            names = {one.name for one in make_folder(self.path).iterdir()} - {"lost+found"}
            if self.path.stat().st_mode & 0o077:
                if others := [name for name in names if not self._is_own(name)]:
                    raise InvalidArgumentError("learn", f"{self.path}, which holds {min(others)}", allowed)
                os.chmod(self.path, 0o700)
            for path in map(self.path.joinpath, filter(self._is_own, names)):
                secure(path)
        except OSError as error:
            got = f"{error.filename or self.path} ({error.strerror})"
            raise InvalidArgumentError("learn", got, f"{allowed} (uid {os.geteuid()})") from None

    def is_one(self) -> bool:
        """Whether workers learn, or a tenant agreed, in this folder."""
        return self.path.is_dir() and any(self._is_own(one.name) for one in self.path.iterdir())

    @staticmethod
    def _is_own(name: str) -> bool:
        return name in (TENANTS_FILE, NOTES_FILE, LOCK_FILE, "workers") or _is_drafter(name)

    def read(self) -> Consents:
        """Return the consents; FailedPreconditionError if the file cannot be read: there are none then."""
        return _read(Consents, self.path / TENANTS_FILE)

    def covers(self, tenant: str, number: int | None) -> bool:
        """Whether a tenant's consent of a number can be read, and is still the present one."""
        try:
            return number is not None and self.read().covers({tenant: number})
        except FailedPreconditionError:
            return False

    def consent(self, tenant: str, to: Consent) -> None:
        """Note that a tenant's streams may be kept and learnt from."""
        if not is_tenant(tenant):
            raise InvalidArgumentError("tenant", tenant, "1 to 32 of a-z 0-9 and -, not - first")
        self.complete()  # deletions that were interrupted
        self._change_consents(lambda found: found.with_tenant(tenant, to))

    def forget(self, tenant: str) -> dict[str, list[int]]:
        """Withdraw a tenant's consent, and delete its streams and the versions that were trained on them.

        Returns the numbers of these versions, by drafter. Workers complete it if this is interrupted.
        """
        self._change_consents(lambda found: found.without(tenant))
        return self.complete()

    def complete(self) -> dict[str, list[int]]:
        """Carry out the deletions that are pending; return the versions that were retired, by drafter."""
        consents, retired = self.read(), {}
        for tenant in consents.pending:
            for store in self.stores_of(tenant):
                for stream in stored_streams(store.path / "records"):
                    # In the folder of one tenant, and where the name says nothing, all of it may be its text.
                    if store.path.name != SHARED or stream.name is None or stream.name.tenant == tenant:
                        stream.path.unlink(missing_ok=True)
                retired[store.path.name] = store.clean(consents, unpublished=True)
        if consents.pending:
            done = consents.model_copy(update={"pending": ()})
            self._change_consents(lambda found: done if found == consents else found)
        return {name: numbers for name, numbers in retired.items() if numbers}

    def confirmations(self, wait_s: float) -> dict[str, bool]:
        """Wait until each worker at work has applied the consents; return which have."""
        wanted, ends = self.read().generation, time.monotonic() + wait_s
        while True:
            found = {name: applied >= wanted for name, applied in confirmed(self.path).items()}
            if all(found.values()) or time.monotonic() > ends:
                return found
            time.sleep(0.05)

    def write_notes(self, notes: dict[str, str]) -> None:
        """Write what the training process says of each drafter."""
        replace_file(self.path / NOTES_FILE, json.dumps(notes), "learn")

    def progress(self) -> dict[str, dict[str, int | str]]:
        """Return the streams and tokens of each drafter, and what the training process says of it."""
        notes: dict[str, str] = {}
        otherwise = "no process trains: no worker is at work, or its log says why"
        with suppress(FileNotFoundError), (self.path / LOCK_FILE).open("rb") as lock:
            if not try_lock(lock, is_shared=True):
                otherwise = "waits for streams"
                notes = json.loads((self.path / NOTES_FILE).read_bytes())
        found: dict[str, dict[str, int | str]] = {}
        for name in {*self.read().drafters(), *(store.path.name for store in self.stores())}:
            kept = [one.name.num_answer for one in stored_streams(self.path / name / "records") if one.name]
            found[name] = {
                "streams": len(kept),
                "tokens": sum(kept),
                "training": notes.get(name, otherwise),
            }
        return dict(sorted(found.items()))

    def stores_of(self, tenant: str) -> list[DrafterFolder]:
        """Return the drafters that may hold data of a tenant."""
        names = (TENANT + tenant, SHARED) if tenant else (OPEN,)
        return [DrafterFolder(self.path / name) for name in names]

    def store(self, name: str) -> DrafterFolder:
        """Return the versions of a drafter; InvalidArgumentError if the name is none's."""
        if not _is_drafter(name):
            raise InvalidArgumentError("drafter", name, f"{OPEN}, {SHARED} or {TENANT}NAME")
        return DrafterFolder(self.path / name)

    def stores(self) -> Iterator[DrafterFolder]:
        for path in sorted(self.path.glob("*")):
            if path.is_dir() and _is_drafter(path.name):
                yield DrafterFolder(path)

    def _change_consents(self, change: Callable[[Consents], Consents]) -> None:
        path = make_folder(self.path) / TENANTS_FILE
        with locked(path, "learn"):
            before = _read(Consents, path)
            if (after := change(before)) != before:
                replace_file(path, after.model_dump_json(indent=1) + "\n", "learn")
