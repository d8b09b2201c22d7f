"""The grammars of a worker's sessions: compiled outside the engine's thread, with the target's tokenizer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from transformers import AutoTokenizer

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from gammaray.grammar.matcher import GrammarCompiler, GrammarState

_log = logging.getLogger(__name__)


class Grammars:
    """Compiles the grammars of sessions; the target's tokenizer is read for the first one. Thread-safe.

    The orchestrator has checked each grammar, in a process with limits, so that to compile it once more is
    bounded (`gammaray.grammar.check_pool`). The parts of Lark that may compile without end are refused here
    as well, before anything is compiled. One compiler serves all sets of end tokens.
    """

    def __init__(self, model: str, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def begin(self, grammar: str, eos_token_ids: Sequence[int]) -> GrammarState:
        """Return the state of a grammar before the first token.

        Raises:
            InvalidArgumentError: The grammar is wrong or too complex, or nothing ends the completion.
            FailedPreconditionError: The model has no tokenizer that llguidance can use.
        """
        if not eos_token_ids:
            allowed = "a grammar with end-of-sequence tokens (ignore_eos false)"
            raise InvalidArgumentError("grammar", "a grammar with ignore_eos", allowed)
        with self._lock:
            if self._compiler is None:
                self._compiler = self._make()
        return self._compiler.begin(grammar, eos_token_ids)

    def _make(self) -> GrammarCompiler:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._model)
            eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
            return GrammarCompiler(tokenizer.backend_tokenizer.to_str(), self._vocab_size, eos)
        except Exception as error:  # transformers and llguidance raise different ones
            _log.warning("no grammars with the tokenizer of %s: %s", self._model, error)
            reason = f"the tokenizer of {self._model} cannot be used ({type(error).__name__}: {error})"
            raise FailedPreconditionError(f"grammar: {reason}") from error
