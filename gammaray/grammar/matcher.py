"""Compiles grammars for a tokenizer by llguidance, and follows a completion through one.

The state of a grammar is a function of the tokens of the completion, so that it needs no storage of its own:
rollback, failover and resumed sessions replay tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.keys import KeyGuard, KeyTokens, without
from gammaray.grammar.syntax import check_syntax

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarCompiler", "GrammarState"]

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 5_000,
    "max_items_in_row": 500,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""Bounds of the time of one compilation, of one step, and of memory (1 to 2 kB per state).

The time of a step grows with the third power of the items in a row: the ambiguous `a: "x" | a a | ""` reaches
24 ms at 500 items and 165 ms at 1,000. An object has four items per optional property.
"""


class GrammarCompiler:
    """Checks and compiles grammars for one tokenizer. Thread-safe.

    Each completion has a compiled grammar of its own: copies of one share a lexer, whose limits they spend
    together, and whose error is everybody's (`LLMatcher.deep_copy` of llguidance 1.9.1).

    Args:
        tokenizer_json: The tokenizer in the format of `tokenizers`, as `to_str` of its backend gives it.
        vocab_size: Number of token ids of the model.
        eos_token_ids: Its end-of-sequence tokens; without any, those that llguidance finds.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        from llguidance import LLTokenizer  # clients do not need it

        self._vocab_size = vocab_size
        eos = sorted(set(eos_token_ids)) or None
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        self._eos = frozenset(self._tokenizer.eos_tokens)

    def check(self, grammar: str) -> None:
        """Check a grammar: its syntax, its compilation, its first masks and forced text.

        llguidance cannot be interrupted. Grammars of users are checked in a process with limits instead, see
        `gammaray.grammar.check_pool`, which calls this.

        Raises:
            InvalidArgumentError: The grammar is wrong, unsupported or too complex.
        """
        matcher = self._compile(grammar)
        if not matcher.is_error():
            # As far as a forced special token, whose bytes are not its text.
            matcher.try_consume_tokens(self._tokenizer.tokenize_bytes(matcher.compute_ff_bytes()))
            matcher.compute_bitmask()
        _check(matcher)

    def begin(self, grammar: str, end_token_ids: Iterable[int] | None = None) -> GrammarState:
        """Compile a grammar, and return its state before the first token.

        For a grammar that has passed a check this takes no longer than the check, whose limits of time and
        memory are those of `check_pool`: it repeats a part of the same work.

        Args:
            grammar: In Lark.
            end_token_ids: Tokens that end this completion, where the grammar is complete; None for the
                end-of-sequence tokens.

        Raises:
            InvalidArgumentError: The grammar is wrong, unsupported or too complex.
        """
        matcher = self._compile(grammar)
        _check(matcher)
        ends = self._eos if end_token_ids is None else frozenset(end_token_ids)
        keys = KeyGuard.of(grammar, lambda: self._key_tokens)
        return GrammarState(matcher, self._vocab_size, ends, self._eos, keys)

    @cached_property
    def _key_tokens(self) -> KeyTokens:
        return KeyTokens([self._tokenizer.decode_bytes([token_id]) for token_id in range(self._vocab_size)])

    def _compile(self, grammar: str) -> LLMatcher:
        """Return the matcher of a grammar after its first mask, which may find an error of its own."""
        from llguidance import LLMatcher, LLParserLimits

        check_syntax(grammar, self._tokenizer)
        limits = LLParserLimits(**_LIMITS, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher


class GrammarState:
    """Where a completion is in its grammar. Not thread-safe.

    Args:
        matcher: At its beginning.
        vocab_size: Number of token ids of the model; no other one is possible.
        eos_token_ids: Tokens that end the completion. They are possible where the grammar is complete, and
            whatever follows one is not tested.
        matcher_eos: End-of-sequence tokens of the matcher itself.
        keys: Keeps keys apart, at its beginning; None if the grammar does so.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        matcher_eos: frozenset[int],
        keys: KeyGuard | None = None,
    ) -> None:
        self._matcher, self._vocab_size, self._eos = matcher, vocab_size, eos_token_ids
        self._matcher_eos = matcher_eos
        self._keys = keys
        self._ends = _bits(eos_token_ids, vocab_size)
        self._no_ends = _bits(matcher_eos - eos_token_ids, vocab_size)
        self._num_consumed = 0  # tokens in the matcher
        self._num_tokens = 0  # these, and those from the first end of sequence on

    def __len__(self) -> int:
        return self._num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the completion.

        Raises:
            InvalidArgumentError: One of them does not follow the grammar.
        """
        if not self.is_ended:
            taken = self._consume(token_ids)
            if taken < len(token_ids) and token_ids[taken] not in self._eos:
                position = self._num_tokens + taken
                self._rollback(taken)
                allowed = "a token that follows the grammar"
                raise InvalidArgumentError(
                    "grammar", f"token {token_ids[taken]} at {position} of the completion", allowed
                )
        self._num_tokens += len(token_ids)

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on."""
        self._rollback(max(0, self._num_consumed - length))
        self._num_tokens = min(self._num_tokens, length)

    @property
    def is_ended(self) -> bool:
        """Whether the tokens contain an end of sequence."""
        return self._num_tokens > self._num_consumed

    @property
    def is_complete(self) -> bool:
        """Whether the tokens so far are a text of the grammar."""
        return self._matcher.is_accepting()

    def masks(self, paths: Sequence[Sequence[int]]) -> list[bytes | None]:
        """Return the possible tokens after each path that follows the tokens so far.

        Args:
            paths: Tokens after the completion; any order.

        Returns:
            For each path a bit per token id, lowest first; None if the path itself is not possible, or
            contains an end of sequence.

        Raises:
            InvalidArgumentError: A step exceeds the limits of complexity.
        """
        masks: list[bytes | None] = [None] * len(paths)
        if self.is_ended:
            return masks
        current: list[int] = []
        try:
            # In lexicographic order, a path shares the most with the one before it.
            for index in sorted(range(len(paths)), key=lambda index: tuple(paths[index])):
                path = paths[index]
                shared = _num_shared(current, path)
                self._rollback(len(current) - shared)
                del current[shared:]
                current += path[shared : shared + self._consume(path[shared:])]
                if len(current) == len(path):
                    masks[index] = self._mask()
        finally:
            self._rollback(len(current))
        return masks

    def forced(self, limit: int) -> list[int]:
        """Return the next tokens as far as the grammar leaves no choice, at most `limit`."""
        if self.is_ended:
            return []
        self._renew_limits()
        return self._forced(limit)

    def count_possible(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens the grammar allows, one end of sequence included."""
        if self.is_ended:
            return 0
        taken = self._consume(token_ids)
        ends = taken < len(token_ids) and token_ids[taken] in self._eos and self._matcher.is_accepting()
        self._rollback(taken)
        return taken + ends

    def forced_after(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Return `forced` after further tokens, which must be possible; none after an end of sequence."""
        if self.is_ended:
            return []
        taken = self._consume(token_ids)
        found = self._forced(limit) if taken == len(token_ids) else []
        self._rollback(taken)
        return found

    def _consume(self, token_ids: Sequence[int]) -> int:
        """Consume tokens up to an end of sequence or an impossible one; return how many."""
        end = next((at for at, token_id in enumerate(token_ids) if self._is_apart(token_id)), len(token_ids))
        taken: int = self._matcher.try_consume_tokens(list(token_ids[:end]))
        if taken < end:
            # A lexer beyond its limits refuses every token, and tells so in a mask only.
            self._renew_limits()
        self._check()
        if self._keys is not None:
            right = self._keys.extend(token_ids[:taken])
            self._matcher.rollback(taken - right)
            taken = right
        self._num_consumed += taken
        return taken

    def _mask(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        if self._keys is None:
            return self._with_ends(mask)
        mask, full = self._keys.restrict(mask), set[bytes]()
        ends = [token_id for token_id in self._keys.doubtful(mask) if not self._leads_on(token_id, full)]
        return self._with_ends(without(mask, ends) if ends else mask)

    def _leads_on(self, token_id: int, full: set[bytes]) -> bool:
        """Return whether a possible token can be followed by a key that its object does not have.

        Args:
            token_id: The token.
            full: Beginnings of keys that have no such end; is added to.
        """
        if not self._consume([token_id]) or self._keys is None:
            return False
        found = self._keys.key not in full
        if found:
            mask = self._keys.restrict(self._matcher.compute_bitmask())
            doubtful = self._keys.doubtful(mask)
            found = int.from_bytes(mask, "little").bit_count() > len(doubtful)
            found = found or any(self._leads_on(one, full) for one in doubtful)
            if not found and self._keys.key is not None:
                full.add(self._keys.key)
        self._rollback(1)
        return found

    def _forced(self, limit: int) -> list[int]:
        found: list[int] = self._matcher.compute_ff_tokens()[:limit]
        if self._keys is not None:
            right = self._keys.extend(found)
            self._keys.drop(right)
            found = found[:right]
        return found

    def _is_apart(self, token_id: int) -> bool:
        # An id beyond the vocabulary would be an error of the matcher, which stays.
        ends = token_id in self._eos or token_id in self._matcher_eos
        return ends or not 0 <= token_id < self._vocab_size

    def _with_ends(self, mask: bytes) -> bytes:
        """Return a mask of the matcher with the tokens that end this completion."""
        if self._eos == self._matcher_eos:
            return mask
        bits = int.from_bytes(mask, "little") & ~self._no_ends
        if self._matcher.is_accepting():
            bits |= self._ends
        return bits.to_bytes(len(mask), "little")

    def _renew_limits(self) -> None:
        # The limits of a step are renewed by a mask only, and consuming tokens spends them.
        self._matcher.compute_bitmask()
        self._check()

    def _rollback(self, count: int) -> None:
        if count > 0:
            self._matcher.rollback(count)
            self._num_consumed -= count
            if self._keys is not None:
                self._keys.drop(count)

    def _check(self) -> None:
        # An error stays, and the mask would then be the end of sequence alone.
        if self._matcher.is_error():
            raise InvalidArgumentError("grammar", _reason(self._matcher), "a grammar of less complexity")


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise InvalidArgumentError("grammar", _reason(matcher), "a grammar that llguidance can compile")


def _bits(token_ids: Iterable[int], vocab_size: int) -> int:
    """Return a mask of tokens as an integer, without ids outside of the vocabulary."""
    mask = bytearray(vocab_size // 8 + 1)
    for token_id in token_ids:
        if token_id < vocab_size:
            mask[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(mask, "little")


def _reason(matcher: LLMatcher) -> str:
    lines = matcher.get_error().strip().splitlines() or [""]
    # Errors in expressions show the place over several lines, and then say what is wrong.
    details = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = (details or lines)[0][:500]
    # No token begins a text of the grammar, or none ends it.
    return "a grammar without a text" if reason == "NoExtensionBias" else reason


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        count += 1
    return count
