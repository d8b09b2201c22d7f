"""The versions of a drafter that is trained while it serves: which drafts for whom, and what is kept.

Sessions of a tenant draft with its drafter's stable version, a share of their text with the candidate.
Versions are loaded in another thread beside those that serve, and take over between two proposals: tokens
stay what they are, whichever version drafts.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from gammaray.demo_pair import DRAFTER_FILE
from gammaray.errors import GammarayError
from gammaray.learning.folder import DrafterStore, LearningFolder
from services.engine.core.errors import UnsupportedModelError
from services.learning.canary import Canary, Decision
from services.learning.process import TrainingProcess, trainer_command
from services.learning.records import Buffer, Recorder
from services.scheduling.metrics import ARMS, NO_FIRST_TOKENS, OUTCOMES
from services.scheduling.sessions import SessionCopy

CANARY_SHARE = 1 / 3
"""Share of a tenant's text that a candidate drafts."""

SPAN, HEAD_SPAN = 256, 32
"""Tokens after which it is drawn again whether the candidate drafts for a session, so that a machine with one
endless session decides, too, and both versions draft for each text. Every change makes a draft model read the
session again; a head reads at most its newest 64 positions."""

PERIOD_S = 1.0
"""Between two looks at the folder."""

_LOOKS_PER_TRIM = 60

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Arms(Generic[T]):
    """The loaded versions of one drafter, by number: the stable one and the candidate, if any."""

    stable: int
    candidate: int | None
    versions: dict[int, T]
    canary: Canary = field(default_factory=Canary)


@dataclass
class Drafting(Generic[T]):
    """A session that drafts here.

    Attributes:
        name: Its tenant's drafter; None: the drafter of the start.
        number: Number of the version that drafts for it.
        is_kept: Whether its stream is recorded when it ends.
        buffer: The target's states that its head reads; None: a draft model reads none.
        tested: Length of the tokens before the last proposal, and its first token; None without one.
    """

    name: str | None
    number: int
    version: T
    is_kept: bool
    buffer: Buffer | None
    tested: tuple[int, int] | None = None


class Versions(Generic[T]):
    """The versions of one worker's drafter.

    Args:
        base: The drafter of the start, version 0.
        load: Loads the version in a directory.
        command: Starts the process that trains; None: another one does.
        span: Tokens after which it is drawn again which version drafts for a session.

    Attributes:
        first_tokens: Number of proposals by arm (stable, candidate) and outcome of their first token
            (accepted, rejected).
    """

    def __init__(
        self,
        base: T,
        load: Callable[[str], T],
        folder: LearningFolder,
        command: Sequence[str] | None = None,
        span: int = SPAN,
    ) -> None:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._base, self._load, self._folder, self._span = base, load, folder, span
        self.first_tokens = dict(NO_FIRST_TOKENS)
        self._recorder = Recorder()
        # Replaced as a whole by the watching thread.
        self._arms: dict[str, _Arms[T]] = {}
        self._consents = folder.consents()
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

    def name_of(self, session_id: str) -> str | None:
        """Return the drafter that serves a session and learns from it, see `LearningFolder.drafter_of`."""
        return self._folder.drafter_of(_tenant_of(session_id), self._consents)

    def choose(self, name: str | None, session_id: str, num_tokens: int) -> tuple[int, T]:
        """Return number and version of what drafts for a session of so many tokens."""
        arms = None if name is None else self._arms.get(name)
        if arms is None:
            return 0, self._base
        number = arms.stable
        if arms.candidate is not None:
            place = f"{arms.candidate}/{session_id}/{num_tokens // self._span}"
            if zlib.crc32(place.encode()) / 2**32 < CANARY_SHARE:
                number = arms.candidate
        return number, arms.versions[number]

    def follow(self, drafting: Drafting[T], session: SessionCopy) -> bool:
        """Count the outcome of a session's last proposal; return whether another version drafts from here."""
        tested, drafting.tested = drafting.tested, None
        if tested is not None and len(session.tokens) > tested[0]:
            is_accepted = session.tokens[tested[0]] == tested[1]
            self.count(drafting.name, drafting.number, session.session_id, tested[0], is_accepted)
        number, version = self.choose(drafting.name, session.session_id, len(session.tokens))
        is_other = version is not drafting.version
        drafting.number, drafting.version = number, version
        return is_other

    def record(self, session: SessionCopy, buffer: Buffer | None = None) -> None:
        """Keep an ended session's stream if its tenant agreed, with the target's states of a head."""
        name, spec = self.name_of(session.session_id), session.spec
        if name is None or spec.no_learning or spec.adapter:  # an adapter makes another model of the target
            return
        if buffer is not None and not buffer.parts:
            return
        records, tenant = self._folder.store(name).path / "records", _tenant_of(session.session_id)
        self._recorder.record(records, tenant, session, buffer)

    def forget(self, session_id: str) -> None:
        """Delete what was recorded of a session."""
        if (name := self.name_of(session_id)) is not None:
            self._recorder.forget(self._folder.store(name).path / "records", session_id)

    def count(self, name: str | None, number: int, session_id: str, position: int, is_accepted: bool) -> None:
        """Count a version's proposal of a session's token at a position, and whether it was accepted."""
        arms = None if name is None else self._arms.get(name)
        is_candidate = arms is not None and number == arms.candidate
        self.first_tokens[ARMS[is_candidate], OUTCOMES[not is_accepted]] += 1
        if arms is not None and arms.candidate is not None and number in arms.versions:
            part = session_id, position // self._span
            arms.canary.add(part, is_accepted, is_candidate=is_candidate)

    def reject(self, name: str, number: int, error: Exception) -> None:
        """Roll back a version that cannot be loaded, if the folder can be written."""
        _log.error("version %d of %s cannot be loaded: %s", number, name, error)
        with suppress(GammarayError, OSError):
            self._folder.store(name).roll_back(number, f"it cannot be loaded: {error}")

    def _watch(self) -> None:
        """Follow the folder: load versions, and decide on candidates."""
        for look in itertools.count():
            if self._stop.wait(PERIOD_S):
                return
            try:
                before, self._consents = self._consents, self._folder.consents()
                for store in self._folder.stores():
                    self._follow(store)
                    if look % _LOOKS_PER_TRIM == 0 or before != self._consents:
                        self._recorder.trim(store.path / "records", {"", *self._consents})
            except Exception:  # serving goes on with the versions that are loaded
                _log.exception("the versions in %s cannot be followed", self._folder.path)

    def _follow(self, store: DrafterStore) -> None:
        found = store.read()
        arms = self._arms.get(store.path.name)
        if arms is not None and found.candidate is not None and found.candidate == arms.candidate:
            decision, evidence = arms.canary.decide(), str(arms.canary)
            if decision is Decision.PROMOTE:
                _log.info("version %s of %s is promoted; %s", found.candidate, store.path.name, evidence)
                store.promote(found.candidate)
            elif decision is Decision.ROLL_BACK:
                _log.warning(
                    "version %s of %s is rolled back; %s", found.candidate, store.path.name, evidence
                )
                store.roll_back(found.candidate, evidence)
            found = store.read()
        if arms is not None and (arms.stable, arms.candidate) == (found.stable, found.candidate):
            return
        loaded = {0: self._base} if arms is None else {0: self._base, **arms.versions}
        numbers = [number for number in (found.stable, found.candidate) if number is not None]
        for number in numbers:
            if number in loaded:
                continue
            try:
                loaded[number] = self._load(str(store.directory(number)))
            except (GammarayError, OSError, ValueError, KeyError, RuntimeError) as error:
                self.reject(store.path.name, number, error)
                return  # the next look finds it rolled back
        versions = {number: loaded[number] for number in numbers}
        self._arms = {**self._arms, store.path.name: _Arms(found.stable, found.candidate, versions)}


def is_own(drafter: str) -> bool:
    """Whether a drafter is a directory of `gammaray train`."""
    return (Path(drafter) / DRAFTER_FILE).is_file()


def learn(
    folder: str, target: str, drafter: str, base: T, load: Callable[[str], T], span: int = SPAN
) -> Versions[T]:
    """Begin to learn with a drafter of `gammaray train`; versions are for the same target and tokenizer."""

    def load_checked(directory: str) -> T:
        if _described(directory) != _described(drafter):
            raise UnsupportedModelError(directory, f"its {DRAFTER_FILE} names another target")
        return load(directory)

    path = Path(folder)
    command = trainer_command(path, target, drafter)
    return Versions(base, load_checked, LearningFolder(path), command, span)


def _described(directory: str) -> tuple[Any, Any]:
    stored = json.loads((Path(directory) / DRAFTER_FILE).read_text())
    return stored["target"]["fingerprint"], stored["tokenizer"]["fingerprint"]


def _tenant_of(session_id: str) -> str:
    """Return the tenant of a qualified session id, empty without API keys."""
    tenant, separator, _ = session_id.partition(":")
    return tenant if separator else ""
