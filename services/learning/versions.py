"""The versions of a drafter that is trained while it serves: which one drafts for a session, what is kept.

Sessions of a tenant draft with its drafter's stable version, a share of their text with the candidate.
Versions are loaded in another thread while others serve, and take over between two proposals: tokens
stay what they are, whichever version drafts.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from gammaray.demo_pair import DRAFTER_FILE
from gammaray.errors import GammarayError
from gammaray.learning.consents import Confirmation, Consents
from gammaray.learning.folder import DrafterFolder, LearningFolder
from gammaray.security.tenants import tenant_of
from services.engine.core.errors import UnsupportedModelError
from services.learning.canary import Canary, Decision
from services.learning.process import TrainingProcess, trainer_command
from services.learning.records import Buffer, Recorder
from services.scheduling.metrics import ARMS, NO_FIRST_TOKENS, OUTCOMES
from services.scheduling.sessions import SessionCopy

CANARY_SHARE = 1 / 3
"""Share of a tenant's text that a candidate drafts."""

SPAN = 32
"""Tokens after which it is drawn again whether the candidate drafts for a session, so that a machine with one
endless session decides, too, and both versions draft for each text. A change makes a head read the session's
newest 64 positions at most."""

MAX_DRAFTERS = 8
"""Drafters whose versions are loaded: of the tenants that were served last. The sessions of others draft with
the drafter of the start."""

_CALM_S = 60
"""Time for which drafters that are loaded stay so, as many as there may be."""

PERIOD_S = 1.0
"""Between two looks at the folder."""

_LOOKS_PER_TRIM = 60

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _LoadedVersions(Generic[T]):
    """The loaded versions of one drafter, by number: the stable one and the candidate, if any."""

    stable: int
    candidate: int | None
    versions: dict[int, T]
    canary: Canary = field(default_factory=Canary)


@dataclass
class LearningSession(Generic[T]):
    name: str | None  # its tenant's drafter; None: the drafter of the start
    number: int  # of the version that drafts for it
    version: T
    consent: int | None  # number of its tenant's consent when it began; None without one
    is_kept: bool  # whether its stream is recorded when it ends
    buffer: Buffer = field(default_factory=Buffer)  # the target's states that its head reads
    tested: tuple[int, int] | None = None  # number of tokens before the last proposal, and its first token


class LoadedDrafters(Generic[T]):
    """The drafters that a worker has loaded, each in the versions that draft now; `base` is version 0.

    `load` loads the version in a directory, `command` starts the process that trains, unless another one
    does. `first_tokens` counts proposals by arm (stable, candidate) and outcome of their first token
    (accepted, rejected). InvalidArgumentError if the folder cannot be left to its owner alone.
    """

    def __init__(
        self, base: T, load: Callable[[str], T], folder: LearningFolder, command: Sequence[str] | None = None
    ) -> None:
        folder.secure()
        self._base, self._load, self._folder = base, load, folder
        self.first_tokens = dict(NO_FIRST_TOKENS)
        self._recorder, self._confirmation = Recorder(), Confirmation(folder.path)
        # Replaced as a whole by the watching thread.
        self._arms: dict[str, _LoadedVersions[T]] = {}
        self._served: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        self._consents = self._read()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="drafter versions", daemon=True)
        self._watcher.start()
        self._training = None if command is None else TrainingProcess(command)

    def close(self) -> None:
        """End the threads and the process; what waits for the disk is written."""
        self._stop.set()
        if self._training is not None:
            self._training.close()
        self._watcher.join(timeout=10)
        self._recorder.close()
        self._confirmation.close()

    def begin(self, session_id: str, num_tokens: int) -> LearningSession[T]:
        """Return what drafts for a session that begins here with so many tokens."""
        tenant, consents = tenant_of(session_id), self._consents
        name = None if consents is None else consents.drafter_of(tenant)
        consent = None if consents is None else consents.number_of(tenant)
        if name is not None:
            self._served[name] = time.monotonic() // _CALM_S
        number, version = self.choose(name, (session_id, num_tokens // SPAN))
        return LearningSession(name, number, version, consent, name is not None)

    def choose(self, name: str | None, part: tuple[str, int]) -> tuple[int, T]:
        """Return number and version of what drafts for a part of a session, or a stretch of time."""
        arms = None if name is None else self._arms.get(name)
        if arms is None:
            return 0, self._base
        number = arms.stable
        if arms.candidate is not None:
            place = f"{arms.candidate}/{part[0]}/{part[1]}"
            if zlib.crc32(place.encode()) / 2**32 < CANARY_SHARE:
                number = arms.candidate
        return number, arms.versions[number]

    def record(self, session: SessionCopy, drafting: LearningSession[T]) -> None:
        """Keep an ended session's stream if its tenant agreed throughout."""
        spec, tenant, name = session.spec, tenant_of(session.session_id), drafting.name
        # An adapter makes another target.
        if name is not None and drafting.buffer.parts and not (spec.no_learning or spec.adapter):
            records = self._folder.store(name).path / "records"
            is_allowed = partial(self._folder.covers, tenant, drafting.consent)
            self._recorder.record(records, tenant, session, drafting.buffer, is_allowed)

    def forget(self, session_id: str) -> None:
        for store in self._folder.stores_of(tenant_of(session_id)):
            self._recorder.forget(store.path / "records", session_id)

    def count(self, name: str | None, number: int, part: tuple[str, int], is_accepted: bool) -> None:
        """Count a version's proposal of a part of a session, and whether its first token was accepted."""
        arms = None if name is None else self._arms.get(name)
        is_candidate = arms is not None and number == arms.candidate
        self.first_tokens[ARMS[is_candidate], OUTCOMES[not is_accepted]] += 1
        if arms is not None and arms.candidate is not None and number in arms.versions:
            arms.canary.add(part, is_accepted, is_candidate=is_candidate)

    def reject(self, name: str, number: int, error: Exception) -> None:
        """Roll back a version that cannot be loaded, if the folder can be written."""
        _log.error("version %d of %s cannot be loaded: %s", number, name, error)
        with suppress(GammarayError, OSError):
            self._folder.store(name).roll_back(number, f"it cannot be loaded: {error}")

    def _read(self) -> Consents | None:
        """Return the consents; those that cannot be read are none."""
        with self._reported("consents"):
            return self._folder.read()
        return None

    @contextmanager
    def _reported(self, part: str) -> Iterator[None]:
        """Log an error in a part of the folder, once for all looks that meet it: other parts are followed."""
        try:
            yield
        except Exception as error:  # serving goes on with the versions that are loaded
            if self._failures.get(part) != str(error):
                is_known = isinstance(error, GammarayError)
                _log.error("%s of %s: %s", part, self._folder.path, error, exc_info=not is_known)
            self._failures[part] = str(error)
        else:
            self._failures.pop(part, None)

    def _watch(self) -> None:
        for look in itertools.count():
            with self._reported("the folder"):
                self._look(look)
            if self._stop.wait(PERIOD_S):
                return

    def _look(self, look: int) -> None:
        consents = self._read()
        is_new, self._consents = look == 0 or consents != self._consents, consents
        stores = {store.path.name: store for store in self._folder.stores()}
        if is_new or look % _LOOKS_PER_TRIM == 0:
            self._clean(stores, consents)
        # Nothing that rests on consents that cannot be read drafts.
        recent = sorted(stores, key=lambda name: (-self._served.get(name, 0), name not in self._arms))
        followed = [] if consents is None else recent[:MAX_DRAFTERS]
        self._arms = {name: arms for name, arms in self._arms.items() if name in followed}
        for name in followed:
            with self._reported(f"drafter {name}"):
                self._follow(stores[name])
        if is_new and consents is not None and not consents.pending:
            self._recorder.then(partial(self._confirmation.confirm, consents.generation))

    def _clean(self, stores: Mapping[str, DrafterFolder], consents: Consents | None) -> None:
        """Complete deletions, and delete what is too old or too much; without consents nothing else."""
        with self._reported("deletions"):
            self._folder.complete()
        for name, store in stores.items():
            tenants: Collection[str] | None = None
            if consents is not None:
                tenants = consents.drafters().get(name, ())
                with self._reported(f"versions of {name}"):
                    store.clean(consents)
            self._recorder.trim(store.path / "records", tenants)

    def _follow(self, store: DrafterFolder) -> None:
        name, state = store.path.name, store.read()
        arms = self._arms.get(name)
        if arms is not None and state.candidate is not None and state.candidate == arms.candidate:
            decision, evidence = arms.canary.decide(), str(arms.canary)
            if decision is Decision.PROMOTE:
                store.promote(state.candidate)
            elif decision is Decision.ROLL_BACK:
                store.roll_back(state.candidate, evidence)
            if decision is not Decision.WAIT:
                _log.info("version %d of %s: %s; %s", state.candidate, name, decision.value, evidence)
            state = store.read()
        if arms is not None and (arms.stable, arms.candidate) == (state.stable, state.candidate):
            return
        loaded = {0: self._base} if arms is None else {0: self._base, **arms.versions}
        numbers = [number for number in (state.stable, state.candidate) if number is not None]
        for number in numbers:
            if number not in loaded:
                try:
                    loaded[number] = self._load(str(store.directory(number)))
                except Exception as error:
                    self.reject(name, number, error)
                    return  # the next look finds it rolled back
        versions = {number: loaded[number] for number in numbers}
        self._arms = {**self._arms, name: _LoadedVersions(state.stable, state.candidate, versions)}


def is_own(drafter: str) -> bool:
    """Whether a drafter is a directory of `gammaray train`."""
    return (Path(drafter) / DRAFTER_FILE).is_file()


def learn(folder: str, target: str, drafter: str, base: T, load: Callable[[str], T]) -> LoadedDrafters[T]:
    """Begin to learn with a drafter of `gammaray train`; versions are for the same target and tokenizer."""

    def load_checked(directory: str) -> T:
        if _described(directory) != _described(drafter):
            raise UnsupportedModelError(directory, f"its {DRAFTER_FILE} names another target")
        return load(directory)

    path = Path(folder)
    command = trainer_command(path, target, drafter)
    return LoadedDrafters(base, load_checked, LearningFolder(path), command)


def _described(directory: str) -> tuple[Any, Any]:
    stored = json.loads((Path(directory) / DRAFTER_FILE).read_text())
    return stored["target"]["fingerprint"], stored["tokenizer"]["fingerprint"]
