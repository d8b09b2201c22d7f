"""The grammars of a worker's sessions: compiled outside the engine's thread, with the target's tokenizer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

from transformers import AutoTokenizer

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from gammaray.gguf import pretrained_arguments
from gammaray.grammar.matcher import GrammarCompiler, GrammarState

__all__ = ["Grammars"]

_log = logging.getLogger(__name__)


class Grammars:
    """Compiles the grammars of sessions; the tokenizer is read for the first one. Thread-safe.

    Args:
        model: Directory, hub name or GGUF file of the target, whose tokenizer is used.
        vocab_size: Number of the target's token ids.
    """

    def __init__(self, model: str, vocab_size: int) -> None:
        self._model, self._vocab_size = model, vocab_size
        self._compiler: GrammarCompiler | None = None
        self._eos: frozenset[int] = frozenset()
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
        return self._compiler_for(eos_token_ids).begin(grammar)

    def _compiler_for(self, eos_token_ids: Iterable[int]) -> GrammarCompiler:
        with self._lock:
            eos = frozenset(eos_token_ids)
            if self._compiler is None or eos != self._eos:
                self._compiler, self._eos = self._make(eos), eos
            return self._compiler

    def _make(self, eos_token_ids: Iterable[int]) -> GrammarCompiler:
        try:
            with pretrained_arguments(self._model) as (source, arguments):
                tokenizer = AutoTokenizer.from_pretrained(source, **arguments)
            return GrammarCompiler(tokenizer.backend_tokenizer.to_str(), self._vocab_size, eos_token_ids)
        except Exception as error:  # transformers and llguidance raise different ones
            _log.warning("no grammars with the tokenizer of %s: %s", self._model, error)
            raise FailedPreconditionError(
                f"grammar: the tokenizer of {self._model} cannot be used ({type(error).__name__}: {error})"
            ) from error
