"""A worker's copies of its sessions: committed tokens, spec, epoch and noise, but not the KV cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from gammaray.errors import FailedPreconditionError, GammarayError, InvalidArgumentError
from gammaray.grammar.matcher import GrammarState
from gammaray.types import SamplingParams
from services.engine.core.session_cache import common_prefix
from services.engine.sampling.edits import LogitEdits
from services.engine.sampling.noise import Noise
from services.scheduling.tasks import NeedTokens, SessionSpec, Task

MAX_TOKENS = 8 << 20
"""Token ids kept over all sessions, including those of their masks: about 300 MB of Python integers, and at
most twice that for the data that `LogitEdits` derives from them."""

NOISE_BYTES = 512 << 20
"""Memory for rows of noise, over all sessions; dropped rows are computed again."""

MIN_WITH_NOISE = 16

NOISE_BYTES_PER_ID = 2 * 64 * 8
"""Two streams of at most 64 float64 rows each, see services/engine/sampling/noise.py."""


@dataclass(slots=True, eq=False)
class SessionCopy:
    """A worker's copy of a session.

    Its tokens are those that the orchestrator sent as committed, then those that the worker expects to be
    committed next, by its own verdict. A new owner drops the latter, since it may have got another verdict.
    """

    session_id: str
    epoch: int
    spec: SessionSpec
    grammar: GrammarState | None = None  # of the spec; None without one, or if the worker cannot follow it
    noise: Noise | None = None  # None at temperature 0, and while the session is not among the recent ones
    tokens: list[int] = field(default_factory=list)
    num_counted: int = 0  # token ids of the session that the table has counted towards its bound
    num_confirmed: int = 0  # how many of `tokens` the orchestrator sent as committed
    changed_from: int = 0  # first position at which the last block changed or extended `tokens`
    edits: LogitEdits | None = None  # created by `edits_for` on first use for a spec
    masking: Future[GammarayError | None] | None = None  # of its block, see `services.scheduling.masks`
    has_slow_masks: bool = False  # whether its last masks took so long that no step waits for the next ones

    @property
    def is_masking(self) -> bool:
        """Whether another thread reads the session, so that nothing may change it."""
        return self.masking is not None and not self.masking.done()

    def edits_for(self, params: SamplingParams, vocab_size: int, device: torch.device | str) -> LogitEdits:
        """Return the edits by `params`, which are those of the spec as far as they matter, up to `tokens`.

        Raises:
            InvalidArgumentError: The masks leave no token.
            FailedPreconditionError: There is a grammar, and this worker cannot follow one.
        """
        spec = self.spec
        if self.edits is None:
            grammar = None
            if params.grammar:
                if self.grammar is None:
                    raise FailedPreconditionError("grammar: this worker has no tokenizer")
                grammar = self.grammar
                grammar.truncate(0)
            eos, num_prompt = spec.eos_token_ids, spec.prompt_length
            self.edits = LogitEdits(params, eos, num_prompt, vocab_size, device, grammar)
        self.edits.follow(self.tokens)
        return self.edits

    def grammar_masks(self, paths: Sequence[Sequence[int]]) -> Sequence[bytes | None]:
        """Return the masks of the spec's grammar after the tokens and each path, see `GrammarState.masks`.

        For engines whose logits are edited in another process; `edits_for` uses the same state.

        Raises:
            InvalidArgumentError: The grammar is too complex.
            FailedPreconditionError: This worker cannot follow a grammar.
        """
        if self.grammar is None:
            raise FailedPreconditionError("grammar: this worker has no tokenizer")
        output = self.tokens[self.spec.prompt_length :]
        self.grammar.extend(output[len(self.grammar) :])
        return self.grammar.masks(paths)

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on."""
        del self.tokens[length:]
        if self.edits is not None:
            self.edits.truncate(length)
        elif self.grammar is not None:
            self.grammar.truncate(max(0, length - self.spec.prompt_length))

    def merge(self, start: int, context: list[int], *, is_confirmed: bool = True) -> None:
        """Make `tokens` end with `context` at `start`, keeping tokens that agree and dropping the rest."""
        same = common_prefix(self.tokens[start : start + len(context)], context)
        self.changed_from = start + same
        self.truncate(start + same)
        self.tokens += context[same:]
        if is_confirmed:
            self.num_confirmed = len(self.tokens)


class SessionTable:
    """The sessions of a worker, up to a bound; the least recently used idle one is dropped first.

    Args:
        vocab_size: Vocabulary size of the noise.
        device: Device on which noise is computed.
        is_busy: Whether a session has a block running and must be kept.
        on_drop: Called with each session that is dropped.
    """

    def __init__(
        self,
        capacity: int,
        vocab_size: int,
        device: str,
        is_busy: Callable[[str], bool],
        on_drop: Callable[[SessionCopy], None],
    ) -> None:
        self._capacity, self._vocab_size, self._device = capacity, vocab_size, device
        self._is_busy, self._on_drop = is_busy, on_drop
        self._sessions: OrderedDict[str, SessionCopy] = OrderedDict()
        self._with_noise: OrderedDict[str, SessionCopy] = OrderedDict()
        self._num_tokens = 0
        self._max_with_noise = max(MIN_WITH_NOISE, NOISE_BYTES // (NOISE_BYTES_PER_ID * vocab_size))

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sessions)

    def admit(self, task: Task) -> SessionCopy | NeedTokens:
        """Bring the session of `task` to its base position, or return which tokens are missing.

        Raises:
            FailedPreconditionError: The epoch is older than the newest seen for the session.
            InvalidArgumentError: The base position lies inside the session's prompt.
        """
        session = self._sessions.get(task.session_id)
        if session is not None and task.epoch < session.epoch:
            raise FailedPreconditionError(
                f"epoch of session {task.session_id}: got {task.epoch}, allowed: {session.epoch} or newer"
            )
        if session is None:
            if task.spec is None or task.context_start > 0:
                return NeedTokens(0)
            session = SessionCopy(task.session_id, task.epoch, task.spec, task.grammar)
            self._sessions[task.session_id] = session
        self._sessions.move_to_end(task.session_id)
        if task.epoch > session.epoch:
            session.epoch = task.epoch
            session.truncate(session.num_confirmed)
        if task.spec is not None and task.spec != session.spec:
            session.spec, session.noise, session.edits = task.spec, None, None
            session.grammar = task.grammar
        if task.context_start > len(session.tokens):
            return NeedTokens(len(session.tokens))
        if task.base_position < session.spec.prompt_length:
            allowed = f"{session.spec.prompt_length} or more (the prompt)"
            raise InvalidArgumentError("base_position", task.base_position, allowed)
        session.merge(task.context_start, list(task.context), is_confirmed=not task.is_conditional)
        size = len(session.tokens) + session.spec.num_ids
        self._num_tokens += size - session.num_counted
        session.num_counted = size
        self._make_room(session)
        self._give_noise(session)
        return session

    def is_at(self, task: Task) -> bool:
        """Whether the session ends with the context of a conditional block, by this worker's own verdict."""
        session = self._sessions.get(task.session_id)
        if session is None or session.epoch != task.epoch or len(session.tokens) != task.base_position:
            return False
        return session.tokens[task.context_start :] == list(task.context)

    def find(self, session_id: str) -> SessionCopy | None:
        """Return a session; None for an unknown one."""
        return self._sessions.get(session_id)

    def drop(self, session_id: str) -> None:
        """Forget a session; an unknown one is ignored."""
        self._with_noise.pop(session_id, None)
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._num_tokens -= session.num_counted
            self._on_drop(session)

    def _make_room(self, newest: SessionCopy) -> None:
        """Drop the least recently used idle sessions while there are too many sessions or tokens."""
        while len(self._sessions) > self._capacity or self._num_tokens > MAX_TOKENS:
            idle = (s for s in self._sessions if s != newest.session_id and not self._is_busy(s))
            oldest = next(idle, None)
            if oldest is None:
                return
            self.drop(oldest)

    def _give_noise(self, session: SessionCopy) -> None:
        """Create the session's noise if needed; past the bound, drop a least recently used idle session's."""
        params = session.spec.params
        if params.temperature == 0 or params.seed is None:
            return
        if session.noise is None:
            session.noise = Noise(params.seed, params.sample_index, self._vocab_size, device=self._device)
        self._with_noise[session.session_id] = session
        self._with_noise.move_to_end(session.session_id)
        if len(self._with_noise) > self._max_with_noise:
            oldest = next((s for s in self._with_noise.values() if not self._is_busy(s.session_id)), session)
            if oldest is not session:
                oldest.noise = None
                del self._with_noise[oldest.session_id]
