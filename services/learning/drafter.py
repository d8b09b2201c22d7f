"""Drafts with the versions of a head that are learnt while it serves.

Sessions of a tenant draft with its drafter's stable version, a share of them with the candidate. Versions are
loaded in another thread beside those that serve, and take over between two blocks: a session that changes its
version gives it the newest hidden states, and its tokens stay what they are, whichever version drafts.
"""

from __future__ import annotations

import itertools
import logging
import threading
import zlib
from collections.abc import Callable, Sequence
from ctypes import c_int32
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from gammaray.blocks import Shape
from gammaray.errors import GammarayError
from gammaray.learning.folder import DrafterStore, LearningFolder
from gammaray.types import Proposal
from services.learning.canary import Canary, Decision
from services.learning.process import TrainingProcess
from services.learning.records import Buffer, Recorder
from services.scheduling.metrics import ARMS, NO_FIRST_TOKENS, OUTCOMES
from services.scheduling.sessions import SessionCopy
from services.speculation.head_drafter import HeadDrafter

CANARY_SHARE = 1 / 3
"""Share of a tenant's sessions that draft with a candidate."""

MAX_KEPT = 32
"""Sessions at a time whose states are buffered: for SmolLM2 3 MB each, for a target of 8B 20 MB."""

PERIOD_S = 1.0
"""Between two looks at the folder."""

_LOOKS_PER_TRIM = 60

_log = logging.getLogger(__name__)

Request = tuple[SessionCopy, Shape, int]


@dataclass
class _Arms:
    """The loaded versions of one drafter.

    Attributes:
        numbers: Of the stable version and of the candidate; None without one.
    """

    numbers: tuple[int, int | None]
    stable: HeadDrafter
    candidate: HeadDrafter | None = None
    canary: Canary = field(default_factory=Canary)

    def of(self, session_id: str) -> HeadDrafter:
        """Return what drafts for a session."""
        if self.candidate is None:
            return self.stable
        drawn = zlib.crc32(f"{self.numbers[1]}/{session_id}".encode()) / 2**32
        return self.candidate if drawn < CANARY_SHARE else self.stable


@dataclass
class _Session:
    """A session that drafts here.

    Attributes:
        name: Its tenant's drafter; None: the head of the start, and nothing is kept.
        drafter: The version that has its states.
        is_kept: Whether its newest states are buffered.
        tested: Length of the tokens before the last proposal, and its first token; None without one.
    """

    name: str | None
    drafter: HeadDrafter
    is_kept: bool
    buffer: Buffer = field(default_factory=Buffer)
    copy: SessionCopy | None = None
    tested: tuple[int, int] | None = None


class LearningDrafter:
    """Has the methods of `LocalDrafter`, over several versions of a head.

    Args:
        base: The head of the start, version 0.
        load: Loads the version in a directory.
        folder: What this machine learns.
        command: Starts the process that trains; None: another one does.

    Attributes:
        taps: As of `LocalDrafter`.
        first_tokens: Number of proposals by arm (stable, candidate) and outcome of their first token
            (accepted, rejected).
    """

    def __init__(
        self,
        base: HeadDrafter,
        load: Callable[[str], HeadDrafter],
        folder: LearningFolder,
        command: Sequence[str] | None = None,
    ) -> None:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.taps = base.taps
        self._base, self._load, self._folder = base, load, folder
        self.first_tokens = dict(NO_FIRST_TOKENS)
        self._sessions: dict[str, _Session] = {}
        self._num_kept = 0
        self._recorder = Recorder()
        self._dtype = torch.float32  # of the target's states; buffers keep fewer bits
        # Replaced as a whole by the watching thread.
        self._arms: dict[str, _Arms] = {}
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

    def take(self, session_id: str, start: int, states: Tensor) -> None:
        """Keep the hidden states of committed positions, see `LocalDrafter.take`."""
        session, self._dtype = self._session(session_id), states.dtype
        if session.is_kept:
            session.buffer.take(start, states)
        session.drafter.take(session_id, start, states)

    def drop(self, session_id: str) -> None:
        """Forget a session; its stream is recorded if its tenant agreed."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        session.drafter.drop(session_id)
        self._num_kept -= session.is_kept
        copy = session.copy
        if (
            copy is not None
            and not copy.spec.no_learning
            and session.name is not None
            and session.buffer.parts
        ):
            records, tenant = self._records(session.name), _tenant_of(session_id)
            self._recorder.record(records, tenant, copy, session.buffer)

    def forget(self, session_id: str) -> None:
        """Delete what was recorded of a session, and record nothing when it ends."""
        if (session := self._sessions.get(session_id)) is not None:
            session.copy = None
        if (name := self._name(session_id)) is not None:
            self._recorder.forget(self._records(name), session_id)

    def draft(self, requests: Sequence[Request]) -> list[Proposal]:
        """Return a proposal for each session, see `LocalDrafter.draft`; each version drafts for its own."""
        found: dict[int, Proposal] = {}
        for drafter, places in self._by_drafter(requests):
            proposals = drafter.draft([requests[place] for place in places])
            found |= dict(zip(places, proposals, strict=True))
        for place, (copy, _, _) in enumerate(requests):
            token_ids = found[place].token_ids
            tested = (len(copy.tokens), token_ids[0]) if token_ids else None
            self._sessions[copy.session_id].tested = tested
        return [found[place] for place in range(len(requests))]

    def prepare(self, requests: Sequence[Request], stop: c_int32) -> None:
        """Draft ahead, see `LocalDrafter.prepare`."""
        for drafter, places in self._by_drafter(requests):
            drafter.prepare([requests[place] for place in places], stop)

    def _by_drafter(self, requests: Sequence[Request]) -> list[tuple[HeadDrafter, list[int]]]:
        places: dict[HeadDrafter, list[int]] = {}
        for place, (copy, _, _) in enumerate(requests):
            session = self._session(copy.session_id)
            session.copy = copy
            self._note_outcome(session)
            self._move(session)
            places.setdefault(session.drafter, []).append(place)
        return list(places.items())

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            name = self._name(session_id)
            is_kept = name is not None and self._num_kept < MAX_KEPT
            self._num_kept += is_kept
            session = _Session(name, self._drafter(name, session_id), is_kept)
            self._sessions[session_id] = session
        return session

    def _name(self, session_id: str) -> str | None:
        return self._folder.drafter_of(_tenant_of(session_id), self._consents)

    def _drafter(self, name: str | None, session_id: str) -> HeadDrafter:
        arms = None if name is None else self._arms.get(name)
        return self._base if arms is None else arms.of(session_id)

    def _move(self, session: _Session) -> None:
        """Let the version that is the session's now draft for it, from the newest states on."""
        assert session.copy is not None
        session_id = session.copy.session_id
        drafter = self._drafter(session.name, session_id)
        if drafter is session.drafter:
            return
        session.drafter.drop(session_id)
        session.drafter = drafter
        if session.buffer.parts:
            start, states = session.buffer.states()
            drafter.take(session_id, start, states.to(self._dtype))

    def _note_outcome(self, session: _Session) -> None:
        """Count whether the first token of the session's last proposal was accepted."""
        tested, session.tested = session.tested, None
        arms = None if session.name is None else self._arms.get(session.name)
        assert session.copy is not None
        if tested is None or len(session.copy.tokens) <= tested[0]:
            return
        is_accepted = session.copy.tokens[tested[0]] == tested[1]
        is_candidate = arms is not None and session.drafter is arms.candidate
        self.first_tokens[ARMS[is_candidate], OUTCOMES[not is_accepted]] += 1
        if (
            arms is not None
            and arms.candidate is not None
            and (is_candidate or session.drafter is arms.stable)
        ):
            arms.canary.add(is_accepted, is_candidate=is_candidate)

    def _records(self, name: str) -> Path:
        return self._folder.store(name).path / "records"

    def _watch(self) -> None:
        """Follow the folder: load versions, and decide on candidates."""
        for look in itertools.count():
            if self._stop.wait(PERIOD_S):
                return
            try:
                self._consents = self._folder.consents()
                for store in self._folder.stores():
                    self._follow(store)
                    if look % _LOOKS_PER_TRIM == 0:
                        self._recorder.trim(store.path / "records")
            except Exception:  # serving goes on with the versions that are loaded
                _log.exception("the versions in %s cannot be followed", self._folder.path)

    def _follow(self, store: DrafterStore) -> None:
        found = store.read()
        arms = self._arms.get(store.path.name)
        if arms is not None and found.candidate is not None and found.candidate == arms.numbers[1]:
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
        numbers = found.stable, found.candidate
        if arms is not None and arms.numbers == numbers:
            return
        loaded = {0: self._base}
        if arms is not None:
            loaded[arms.numbers[0]] = arms.stable
            if arms.numbers[1] is not None and arms.candidate is not None:
                loaded[arms.numbers[1]] = arms.candidate
        for number in numbers:
            if number is not None and number not in loaded:
                version = self._loaded(store, number)
                if version is None:
                    return  # the next look finds it rolled back
                loaded[number] = version
        candidate = None if numbers[1] is None else loaded[numbers[1]]
        self._arms = {**self._arms, store.path.name: _Arms(numbers, loaded[numbers[0]], candidate)}

    def _loaded(self, store: DrafterStore, number: int) -> HeadDrafter | None:
        """Load a version, beside those that serve; one that cannot be loaded is rolled back."""
        try:
            return self._load(str(store.directory(number)))
        except (GammarayError, OSError, ValueError, KeyError, RuntimeError) as error:
            _log.error("version %d of %s cannot be loaded: %s", number, store.path.name, error)
            store.roll_back(number, f"it cannot be loaded: {error}")
            return None


def _tenant_of(session_id: str) -> str:
    """Return the tenant of a qualified session id, empty without API keys."""
    tenant, separator, _ = session_id.partition(":")
    return tenant if separator else ""
