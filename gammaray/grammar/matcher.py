"""Compiles grammars for a tokenizer by llguidance, and follows a completion through one.

The state of a grammar is a function of the tokens of the completion, so that it needs no storage of its own:
rollback, failover and resumed sessions replay tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.syntax import check_syntax

if TYPE_CHECKING:
    from llguidance import LLMatcher

_COMPILABLE = "a grammar that llguidance can compile"

TOO_COMPLEX = b""
"""In place of the mask after a path, if the limits do not allow to compute it."""

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


@cache
def grammar_identity() -> str:
    """Return the grammar library and its version: processes with the same one compute the same masks."""
    return f"llguidance-{version('llguidance')}"


class GrammarCompiler:
    """Checks and compiles grammars for one tokenizer, in the format of `tokenizers`. Thread-safe.

    Each completion has a compiled grammar of its own: copies (`LLMatcher.deep_copy`) share a lexer, with its
    limits and errors. Without `eos_token_ids` llguidance looks for the end-of-sequence tokens.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> None:
        from llguidance import LLTokenizer  # clients do not need it

        self._vocab_size = vocab_size
        eos = sorted(set(eos_token_ids)) or None
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        self._eos = frozenset(self._tokenizer.eos_tokens)

    def check(self, grammar: str) -> None:
        """Check a grammar, which may be wrong: its syntax, its compilation, its first masks and forced text.

        llguidance cannot be interrupted. Grammars of users are checked in a process with limits instead, see
        `gammaray.grammar.check_pool`, which calls this.
        """
        matcher = self._compile(grammar)
        if not matcher.is_error():
            _check_rolls_back(matcher, matcher.compute_bitmask(), self._eos)
            # As far as a forced special token, whose bytes are not its text.
            matcher.try_consume_tokens(self._tokenizer.tokenize_bytes(matcher.compute_ff_bytes()))
            matcher.compute_bitmask()
        _check(matcher, _COMPILABLE)

    def begin(self, grammar: str, end_token_ids: Iterable[int] | None = None) -> GrammarState:
        """Compile a grammar, and return its state before the first token.

        For a grammar that has passed a check this takes no longer than the check, whose limits of time and
        memory are those of `check_pool`: it repeats a part of the same work. `end_token_ids` end this
        completion; None: the end-of-sequence tokens. InvalidArgumentError if the grammar is wrong,
        unsupported or too complex.
        """
        matcher = self._compile(grammar)
        _check(matcher, _COMPILABLE)
        ends = self._eos if end_token_ids is None else frozenset(end_token_ids)
        return GrammarState(matcher, lambda: self._compile(grammar), self._vocab_size, ends, self._eos)

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

    A matcher of llguidance never leaves an error, and what it can do within its limits depends on all that it
    was asked before. Errors of `masks` are therefore a function of the completion's tokens: if the matcher
    fails, a new one reads the tokens as gamma 0 does, a mask before each of them, and only if that one fails
    the state does. Proposals are followed in copies, which leave the matcher as it is: a matcher that was
    rolled back may return the mask of the text before (llguidance keeps the last mask, and finds it by
    the number of rows and the state of the lexer alone).

    The completion ends with one of `eos_token_ids`, possible where the grammar is complete; what follows one
    is not tested. `matcher_eos` are those of the matcher itself.
    """

    def __init__(
        self,
        beginning: LLMatcher,
        compile_matcher: Callable[[], LLMatcher],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        matcher_eos: frozenset[int],
    ) -> None:
        self._compile, self._vocab_size, self._eos = compile_matcher, vocab_size, eos_token_ids
        self._matcher_eos = matcher_eos
        self._ends = _bits(eos_token_ids, vocab_size)
        self._no_ends = _bits(matcher_eos - eos_token_ids, vocab_size)
        self._matcher: LLMatcher | None = beginning  # None: a new one has to read the tokens
        self._read: list[int] = []  # tokens up to the first end of sequence
        self._num_tokens = 0  # these, and those from the end of sequence on
        self._is_careful = False  # whether the matcher follows the tokens as gamma 0 does, and nothing else

    def __len__(self) -> int:
        return self._num_tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the completion; InvalidArgumentError if one does not follow the grammar."""
        if not self.is_ended:
            tokens = token_ids[: self._end_of(token_ids)]
            matcher = self._current()
            taken = self._read_by(matcher, tokens)
            is_end = taken == len(token_ids) or token_ids[taken] in self._eos
            if not is_end and not self._exceeds(matcher):
                self._matcher = None
                got = f"token {token_ids[taken]} at {self._num_tokens + taken} of the completion"
                raise InvalidArgumentError("grammar", got, "a token that follows the grammar")
            self._read += tokens
        self._num_tokens += len(token_ids)

    def truncate(self, length: int) -> None:
        """Drop the tokens from `length` on."""
        if length < len(self._read):
            del self._read[length:]
            self._matcher = None
        self._num_tokens = min(self._num_tokens, length)

    @property
    def is_ended(self) -> bool:
        """Whether the tokens contain an end of sequence."""
        return self._num_tokens > len(self._read)

    def masks(self, paths: Sequence[Sequence[int]]) -> list[bytes | None]:
        """Return the possible tokens after each path, in any order, that follows the tokens so far.

        For each path that is a bit per token id, lowest first. None if the path itself is not possible, or
        contains an end of sequence. Empty if the limits do not allow the mask after this path: no token may
        be taken there, and the mask is possible once the path is part of the completion, unless the
        completion itself exceeds the limits: then InvalidArgumentError.
        """
        masks: list[bytes | None] = [None] * len(paths)
        if self.is_ended:
            return masks
        known = None
        if any(len(path) == 0 for path in paths) or self._current().is_error():
            known = self._mask()
        if self._is_careful:
            ended = None if known is None else self._with_ends(known, self._current())
            return [TOO_COMPLEX if len(path) else ended for path in paths]
        masks = [TOO_COMPLEX] * len(paths)
        # Each entry: a matcher, its mask if known, the number of tokens it read, and the paths that begin so.
        open_nodes = [(self._current(), known, 0, list(range(len(paths))))]
        while open_nodes and not self._is_careful:
            matcher, mask, depth, indexes = open_nodes.pop()
            here = [index for index in indexes if len(paths[index]) == depth]
            if here and mask is None:
                mask = self._mask_of(matcher)
            for index in here:
                masks[index] = self._with_ends(mask, matcher) if mask else mask
            if mask == TOO_COMPLEX:
                continue
            branches: dict[int, list[int]] = {}
            for index in indexes:
                if len(paths[index]) > depth:
                    branches.setdefault(paths[index][depth], []).append(index)
            for number, (token_id, below) in enumerate(branches.items(), 1):
                if not self._can_follow(mask, token_id):
                    branch = None
                else:
                    is_last = number == len(branches) and depth > 0
                    branch = self._after(matcher if is_last else matcher.deep_copy(), token_id, mask)
                if branch is not None:
                    open_nodes.append((branch, None, depth + 1, below))
                else:
                    for index in below:
                        masks[index] = None
        return masks

    def forced(self, limit: int, after: Sequence[int] = ()) -> list[int]:
        """Return the next tokens as far as the grammar leaves no choice, at most `limit`.

        With `after`, those after further tokens; none where these are impossible or end the text. This and
        what follows is for drafting: an error of the matcher, InvalidArgumentError, stays.
        """
        if self.is_ended:
            return []
        matcher, taken = self._renewed(), 0
        if after:
            matcher = matcher.deep_copy()
            taken = _read(matcher, after[: self._end_of(after)])
        found: list[int] = matcher.compute_ff_tokens()[:limit] if taken == len(after) else []
        _check(matcher)
        return found

    def count_possible(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens the grammar allows, one end of sequence included."""
        if self.is_ended:
            return 0
        copy = self._renewed().deep_copy()
        taken = _read(copy, token_ids[: self._end_of(token_ids)])
        _check(copy)
        ends = taken < len(token_ids) and token_ids[taken] in self._eos and copy.is_accepting()
        return taken + ends

    def _mask(self) -> bytes:
        mask: bytes = self._current().compute_bitmask()
        if self._current().is_error() and not self._is_careful:
            self._begin_again()
            mask = self._current().compute_bitmask()
        _check(self._current())
        return mask

    def _mask_of(self, copy: LLMatcher) -> bytes:
        """Return the mask of a copy, empty if it exceeds the limits."""
        mask: bytes = copy.compute_bitmask()
        if not copy.is_error():
            return mask
        if not _is_error_its_own(copy):
            self._begin_again()
        return TOO_COMPLEX

    def _with_ends(self, mask: bytes, matcher: LLMatcher) -> bytes:
        """Return a mask of a matcher with the tokens that end this completion."""
        if self._eos == self._matcher_eos:
            return mask
        bits = int.from_bytes(mask, "little") & ~self._no_ends
        if matcher.is_accepting():
            bits |= self._ends
        return bits.to_bytes(len(mask), "little")

    def _can_follow(self, mask: bytes | None, token_id: int) -> bool:
        """Return whether a token is worth a try: others spend the limits of a lexer.

        A mask is complete but where text is forced: it then has the tokenizer's own split only.
        """
        if self._is_apart(token_id):
            return False
        return mask is None or _allows(mask, token_id) or int.from_bytes(mask, "little").bit_count() == 1

    def _after(self, copy: LLMatcher, token_id: int, mask: bytes | None) -> LLMatcher | None:
        """Return a copy that read a token, or exceeds its limits; None if the token is not possible."""
        if not copy.try_consume_tokens([token_id]):
            is_allowed = mask is not None and _allows(mask, token_id)
            if not self._exceeds(copy) and not is_allowed:
                return None
            if not _is_error_its_own(copy):
                self._begin_again()
        return copy

    def _current(self) -> LLMatcher:
        """Return the matcher after the tokens so far, which may be in error."""
        while self._matcher is None:
            matcher = self._compile()
            taken = self._read_by(matcher, self._read)
            if taken == len(self._read):
                self._matcher = matcher
            elif self._is_careful:
                matcher.consume_token(self._read[taken])  # becomes an error, if it is none yet
                self._matcher = matcher
            else:
                self._begin_again()
        return self._matcher

    def _read_by(self, matcher: LLMatcher, token_ids: Sequence[int]) -> int:
        """Let a matcher read tokens up to an impossible one, with a mask before each if it is careful."""
        if not self._is_careful:
            return _read(matcher, token_ids)
        for count, token_id in enumerate(token_ids):
            matcher.compute_bitmask()
            if not matcher.try_consume_tokens([token_id]):
                return count
        return len(token_ids)

    def _renewed(self) -> LLMatcher:
        """Return the matcher after the tokens so far with the limits of a step, which tokens spend."""
        self._current().compute_bitmask()
        _check(self._current())
        return self._current()

    def _exceeds(self, matcher: LLMatcher) -> bool:
        """Return whether a matcher that refuses a token does so because it exceeds its limits."""
        matcher.compute_bitmask()  # a lexer beyond its limits refuses every token; a mask reports it
        return bool(matcher.is_error())

    def _begin_again(self) -> None:
        self._is_careful, self._matcher = True, None

    def _end_of(self, token_ids: Sequence[int]) -> int:
        """Return the index of the first end of sequence or id that is no token."""
        return next((at for at, token_id in enumerate(token_ids) if self._is_apart(token_id)), len(token_ids))

    def _is_apart(self, token_id: int) -> bool:
        # An id beyond the vocabulary would be an error of the matcher, which stays.
        ends = token_id in self._eos or token_id in self._matcher_eos
        return ends or not 0 <= token_id < self._vocab_size


def _read(matcher: LLMatcher, token_ids: Sequence[int]) -> int:
    """Let a matcher read tokens up to an impossible one; return how many."""
    return int(matcher.try_consume_tokens(list(token_ids)))


def _is_error_its_own(matcher: LLMatcher) -> bool:
    """Return whether an error is the parser's, of which each copy has its own; copies share the lexer."""
    return " items" in matcher.get_error()


def _check(matcher: LLMatcher, allowed: str = "a grammar of less complexity") -> None:
    # An error stays, and the mask would then be the end of sequence alone.
    if matcher.is_error():
        raise InvalidArgumentError("grammar", _reason(matcher), allowed)


def _check_rolls_back(matcher: LLMatcher, mask: bytes, eos_token_ids: frozenset[int]) -> None:
    """Check that a matcher at its beginning can drop a token, as it must with a proposal.

    One token is enough: llguidance refuses by the attributes of all rules that the start needs.
    """
    left = int.from_bytes(mask, "little")
    while left:
        token_id = (left & -left).bit_length() - 1
        left &= left - 1
        copy = matcher.deep_copy()
        if token_id not in eos_token_ids and copy.try_consume_tokens([token_id]):
            copy.rollback(1)
            if copy.is_error():
                allowed = "rules without max_tokens= and stop= (suffix= and lazy are possible)"
                raise InvalidArgumentError("grammar", "a rule with max_tokens= or stop=", allowed)
            return


def _allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id >> 3] >> (token_id & 7) & 1)


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
