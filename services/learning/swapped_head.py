"""The versions of a head in an engine that has room for one: they take turns to draft for all sessions.

A candidate drafts in a share of the time. Sessions that were begun with another version keep what it cached
of them, which costs acceptance only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from gammaray.errors import InvalidArgumentError
from gammaray.learning.consents import OPEN
from services.engine.core.errors import EngineLostError
from services.engine.core.shapes import check_token_map, check_weights
from services.engine.core.tensor_files import read_tensor, tensor_names
from services.learning.learner import Learner, check_head
from services.learning.versions import LearningSession, LoadedDrafters, learn
from services.speculation.fixed_head import FixedHead

SPAN_S = 20.0
"""Seconds after which it is drawn again whether the candidate drafts."""

_PART = 256
"""Tokens of a session whose proposals are compared as one part."""

_log = logging.getLogger(__name__)


class SwappedHead(Learner[str], FixedHead):
    """Follows the sessions of an engine, and says which version drafts: that of `number`.

    It serves clusters without API keys: with them, sessions of one tenant would draft with what was trained
    on another one's. `swap` gives the engine the weights of a version's directory.
    """

    def __init__(self, versions: LoadedDrafters[str], swap: Callable[[str], None]) -> None:
        super().__init__(versions)
        self.first_tokens = versions.first_tokens
        self._swap, self._has_warned = swap, False

    def take_turns(self, now_s: float) -> None:
        number, directory = self.versions.choose(OPEN, ("", int(now_s / SPAN_S)))
        if number == self.number:
            return
        try:
            self._swap(directory)
        except EngineLostError as error:
            self.versions.reject(OPEN, number, error)
            raise
        self.number = number

    def count(self, number: int, session_id: str, position: int, is_accepted: bool) -> None:
        self.versions.count(OPEN, number, (session_id, position // _PART), is_accepted)

    def _session(self, session_id: str, num_tokens: int) -> LearningSession[str]:
        session = super()._session(session_id, num_tokens)
        if session.name not in (OPEN, None):
            session.is_kept = False
            if not self._has_warned:
                self._has_warned = True
                _log.warning("with API keys nothing is learnt: vLLM has one version of a head for all")
        return session


def check_swapped(learn: str, head: str) -> None:
    """Raise InvalidArgumentError if a head cannot learn in an engine that has room for one.

    A head that has all of the target's tokens cannot: the engine may let it use the target's output matrix.
    """
    check_head(learn, head)
    if "d2t" not in tensor_names(Path(head)):
        raise InvalidArgumentError("learn", learn, f"empty with vLLM, as {head} has no reduced vocabulary")


def swapped_head(
    folder: str, target: str, head: str, vocab_size: int, swap: Callable[[str], None]
) -> SwappedHead:
    """Begin to learn with a head that an engine has loaded."""
    shapes = {key: tensor.to("meta") for key, tensor in _read(head).items()}
    ids = shapes.pop("d2t")

    def load(directory: str) -> str:
        weights = _read(directory)
        check_token_map(directory, len(ids), vocab_size, weights.pop("d2t", None))
        check_weights(directory, shapes, weights)
        return directory

    return SwappedHead(learn(folder, target, head, head, load), swap)


def _read(directory: str) -> dict[str, Tensor]:
    folder = Path(directory)
    return {key: read_tensor(directory, folder, key) for key in tensor_names(folder)}
