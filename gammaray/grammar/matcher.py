"""Compiles grammars for a tokenizer by llguidance, and follows a completion through one.

The state of a grammar is a function of the tokens of the completion, so that it needs no storage of its own:
rollback, failover and resumed sessions replay tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gammaray.checks import check_encodable
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.keys import KeyGuard, KeyTokens, without
from gammaray.grammar.texts import check_multiples

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["GrammarCompiler", "GrammarState"]

MAX_CHECKED = 4096
"""Grammars whose check is remembered, least recently used first out."""

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

# By number; llguidance restores a wrong state when it rolls back over such a token (llguidance issue 364).
_NUMBERED_TOKEN = re.compile(r"<\[[^\]\n]*\]>")

# Where an operator of Lark stands for itself: strings, expressions, comments. JSON has it in strings only.
_QUOTED = re.compile(r'"(?:\\.|[^"\\\x00-\x1f])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*', re.DOTALL)
# Not `~` before a number, which repeats. Intersections and complements of expressions are compiled without
# limits: that of /([ab]{10007})*c/ and /([ab]{10009})*c/ does not end (llguidance 1.9.1).
_SET_OPERATOR = re.compile(r"&|~(?!\s*[0-9])")


class GrammarCompiler:
    """Checks and compiles grammars for one tokenizer. Thread-safe.

    Each completion has a compiled grammar of its own: copies of one share a lexer, whose limits they spend
    together, and whose error is everybody's (`LLMatcher.deep_copy` of llguidance 1.9.1).

    Args:
        tokenizer_json: The tokenizer in the format of `tokenizers`, as `to_str` of its backend gives it.
        vocab_size: Number of token ids of the model.
        eos_token_ids: Its end-of-sequence tokens, all of them.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        from llguidance import LLTokenizer  # clients do not need it

        self._eos = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(self._eos) or None)
        self._checked: OrderedDict[bytes, InvalidArgumentError | None] = OrderedDict()
        self._lock = threading.Lock()

    def is_checked(self, grammar: str) -> bool:
        """Return whether the result of `check` is remembered, so that it takes no time."""
        return _digest(grammar) in self._checked

    def check(self, grammar: str) -> None:
        """Check a grammar once, which takes at most some 100 ms and releases the GIL most of the time.

        Raises:
            InvalidArgumentError: The grammar is wrong, unsupported or too complex.
        """
        key = _digest(grammar)
        with self._lock:
            is_new = key not in self._checked
            if not is_new:
                self._checked.move_to_end(key)
                found = self._checked[key]
        if is_new:
            found = self._find_error(grammar)
            with self._lock:
                self._checked[key] = found
                if len(self._checked) > MAX_CHECKED:
                    self._checked.popitem(last=False)
        if found is not None:
            raise InvalidArgumentError(found.field, found.got, found.allowed)

    def begin(self, grammar: str) -> GrammarState:
        """Return the state of a grammar before the first token; takes about half as long as its check.

        Raises:
            InvalidArgumentError: The grammar is wrong, unsupported or too complex.
        """
        self.check(grammar)
        keys = KeyGuard.of(grammar, lambda: self._key_tokens)
        return GrammarState(self._compile(grammar), self._vocab_size, self._eos, keys)

    @cached_property
    def _key_tokens(self) -> KeyTokens:
        return KeyTokens([self._tokenizer.decode_bytes([token_id]) for token_id in range(self._vocab_size)])

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**_LIMITS, verbose_errors=False)
        return LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)

    def _find_error(self, grammar: str) -> InvalidArgumentError | None:
        try:
            self._try(grammar)
        except InvalidArgumentError as error:
            return error
        return None

    def _try(self, grammar: str) -> None:
        check_encodable("grammar", grammar)
        numbered = _NUMBERED_TOKEN.search(grammar)
        if numbered is not None:
            raise InvalidArgumentError("grammar", numbered.group(), "no tokens by number")
        operator = _SET_OPERATOR.search(_QUOTED.sub(_without_quotes, grammar))
        if operator is not None:
            allowed = "strings, expressions, alternatives and repetition"
            raise InvalidArgumentError("grammar", f"the operator {operator.group()}", allowed)
        for schema in _schemas(grammar):
            check_multiples(schema, "grammar")
        matcher = self._compile(grammar)
        # The first masks may find that the grammar is too complex, or empty.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            # As far as a forced special token, whose bytes are not its text.
            matcher.try_consume_tokens(self._tokenizer.tokenize_bytes(matcher.compute_ff_bytes()))
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidArgumentError("grammar", _reason(matcher), "a grammar that llguidance can compile")


class GrammarState:
    """Where a completion is in its grammar. Not thread-safe.

    Args:
        matcher: At its beginning.
        vocab_size: Number of token ids of the model; no other one is possible.
        eos_token_ids: End-of-sequence tokens. They are possible where the grammar is complete, and whatever
            follows one is not tested.
        keys: Keeps keys apart, at its beginning; None if the grammar does so.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int], keys: KeyGuard | None = None
    ) -> None:
        self._matcher, self._vocab_size, self._eos = matcher, vocab_size, eos_token_ids
        self._keys = keys
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
            return mask
        mask, full = self._keys.restrict(mask), set[bytes]()
        ends = [token_id for token_id in self._keys.doubtful(mask) if not self._leads_on(token_id, full)]
        return without(mask, ends) if ends else mask

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
        return token_id in self._eos or not 0 <= token_id < self._vocab_size

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


def _digest(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


def _without_quotes(found: re.Match[str]) -> str:
    # A comment stays, so that nothing depends on where one ends.
    return found.group() if found.group()[0] == "#" or found.group()[:2] == "//" else '""'


def _schemas(grammar: str) -> Iterator[Any]:
    """Yield the JSON schemas in a grammar, and what looks like one in a comment or string."""
    for found in re.finditer(r"%json\s*", grammar):
        try:
            yield json.JSONDecoder().raw_decode(grammar, found.end())[0]
        except (ValueError, RecursionError):  # llguidance, which is stricter, refuses it
            continue


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
