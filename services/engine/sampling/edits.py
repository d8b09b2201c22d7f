"""Grammar, masks, bias and penalties: edits of the logits by a session's parameters, kept between cycles.

Token ids arrive as Python sequences of up to the size of the vocabulary, and the engine's thread serves all
tenants. `LogitEdits` therefore converts them once per session. Penalties depend on the tokens so far: their
counts are kept for the committed tokens and extended by each row's own path in every cycle. Memory grows with
the token ids of the session, by at most about 70 bytes for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import TOO_COMPLEX, GrammarState
from gammaray.types import Proposal, SamplingParams

_MAX_LOGIT = 1e8
# Above this share of the vocabulary, whole rows are faster and no larger than lists of ids.
_WIDE_SHARE = 0.125


def row_paths(proposal: Proposal) -> list[Sequence[int]]:
    """Return, for each row of a proposal's logits, the proposed tokens before it; len(proposal) + 1 items."""
    token_ids = proposal.token_ids
    if proposal.parents is None:
        return [token_ids[:row] for row in range(len(token_ids) + 1)]
    paths: list[Sequence[int]] = [()]
    for token_id, parent in zip(token_ids, proposal.parents, strict=True):
        paths.append((*paths[parent + 1], token_id))
    return paths


class LogitEdits:
    """Grammar, masks, bias and penalties of one session.

    The order is pinned: grammar, allow and ban masks, `min_tokens`, logit bias, repetition penalty (prompt
    and output), frequency and presence penalties (output only). InvalidArgumentError if the masks leave no
    token, whatever the position: masks that leave none while `min_tokens` applies are always refused.

    Args:
        eos_token_ids: Tokens masked until `params.min_tokens` tokens were produced.
        prompt_length: Number of leading tokens that count as prompt.
        grammar: State of the grammar before the first token after the prompt; None if `params` has none.

    Attributes:
        empty_rows: Rows of the last `apply` for which the grammar and the other masks leave no token.
        unmasked_rows: Rows of the last `apply` without a mask, as the proposal exceeds the limits of the
            grammar there: no token may be taken from them.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        prompt_length: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        grammar: GrammarState | None = None,
    ) -> None:
        self._prompt_length, self._min_tokens = prompt_length, params.min_tokens
        self._grammar = None if grammar is None else _Grammar(grammar, eos_token_ids, vocab_size, device)
        self.empty_rows: frozenset[int] = frozenset()
        self.unmasked_rows: frozenset[int] = frozenset()
        eos = _array(eos_token_ids) if params.min_tokens else None
        self._mask = _Mask(_masked(params, eos, vocab_size), device)
        self._biased = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
        self._eos = None if eos is None else torch.from_numpy(eos).to(device)
        self._penalties: _Penalties | None = None
        if _has_penalties(params):
            self._penalties = _Penalties(params, prompt_length, vocab_size, device)
        self._num_tokens = 0

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Return whether logits depend on masks, bias or preceding tokens."""
        has_lists = params.allowed_token_ids or params.banned_token_ids or params.logit_bias
        return bool(has_lists) or counts_tokens(params)

    def follow(self, tokens: Sequence[int]) -> None:
        """Update to the committed tokens, prompt included; tokens seen before are not read again.

        Tokens that were replaced since the last call must have been dropped with `truncate`.
        """
        self.truncate(len(tokens))
        if len(tokens) > self._num_tokens:
            if self._penalties is not None:
                self._penalties.extend(tokens[self._num_tokens :])
            if self._grammar is not None:
                self._grammar.state.extend(tokens[max(self._num_tokens, self._prompt_length) :])
        self._num_tokens = len(tokens)

    def truncate(self, length: int) -> None:
        """Drop the committed tokens from `length` on."""
        if length < self._num_tokens:
            self._num_tokens = length
            if self._penalties is not None:
                self._num_tokens = self._penalties.truncate(length)
            if self._grammar is not None:
                self._grammar.state.truncate(max(0, self._num_tokens - self._prompt_length))

    def prepare(self, paths: Sequence[Sequence[int]]) -> None:
        """Compute the next `apply`'s masks in any one thread; InvalidArgumentError for a complex grammar."""
        if self._grammar is not None:
            self._grammar.prepare(paths)

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return edited logits: [rows, vocab_size] float32, -inf for masked tokens; `logits` are not changed.

        Each row has a path: the tokens between the committed ones and the row, which count as output.
        """
        logits = logits.to(torch.float32, copy=True)
        ends: frozenset[int] = frozenset()
        if self._grammar is not None:
            ends, self.unmasked_rows = self._grammar.apply(logits, paths)
        self._mask.apply(logits)
        if self._eos is not None:
            num_output = self._num_tokens - self._prompt_length
            for row, path in enumerate(paths):
                if num_output + len(path) < self._min_tokens and row not in ends:
                    logits[row, self._eos] = -torch.inf
        if self._grammar is not None:
            highest = logits.amax(dim=-1).tolist()
            self.empty_rows = frozenset(row for row, best in enumerate(highest) if best == -math.inf)
        if len(self._biased):
            logits.index_copy_(1, self._biased, logits.index_select(1, self._biased) + self._bias)
        return logits if self._penalties is None else self._penalties.apply(logits, paths)


class _Grammar:
    def __init__(
        self, state: GrammarState, eos_token_ids: Sequence[int], vocab_size: int, device: torch.device | str
    ) -> None:
        self.state = state
        self._eos, self._vocab_size, self._device = set(eos_token_ids), vocab_size, device
        self._prepared: tuple[list[Sequence[int]], list[_Mask | bytes | None]] | None = None

    def prepare(self, paths: Sequence[Sequence[int]]) -> None:
        self._prepared = list(paths), self._masks(paths)

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> tuple[frozenset[int], frozenset[int]]:
        """Mask rows in place; return those with the end of sequence alone, and those beyond the limits."""
        prepared, self._prepared = self._prepared, None
        is_for_these = prepared is not None and prepared[0] == list(paths)
        masks = prepared[1] if prepared is not None and is_for_these else self._masks(paths)
        ends, unmasked = set[int](), set[int]()
        for row, mask in enumerate(masks):
            if isinstance(mask, _Mask):
                mask.apply(logits[row : row + 1])
                if mask.is_end:
                    ends.add(row)
            elif mask == TOO_COMPLEX:
                unmasked.add(row)
        return frozenset(ends), frozenset(unmasked)

    def _masks(self, paths: Sequence[Sequence[int]]) -> list[_Mask | bytes | None]:
        """Return the masks after paths; None after an impossible path, which nothing reaches."""
        return [self._mask(bits) if bits else bits for bits in self.state.masks(paths)]

    def _mask(self, bits: bytes) -> _Mask:
        size, eos = self._vocab_size, self._eos
        kept = np.unpackbits(np.frombuffer(bits, np.uint8), count=size, bitorder="little").view(bool)
        is_end = int(np.count_nonzero(kept)) <= len(eos) and set(np.flatnonzero(kept).tolist()) <= eos
        return _Mask(~kept, self._device, is_end=is_end)


class _Mask:
    """Masked tokens, of `vocab_size` booleans: stored as their ids, or those of all others if fewer."""

    def __init__(
        self, masked: NDArray[np.bool_], device: torch.device | str, *, is_end: bool = False
    ) -> None:
        self.is_end = is_end  # whether a grammar allows the end of sequence alone
        self._names_kept = 2 * np.count_nonzero(masked) > len(masked)
        # NOTE: indexes take a fifth of the time of a boolean mask, which needs a branch for each token.
        token_ids = (masked != self._names_kept).nonzero()[0]
        self._token_ids = torch.from_numpy(token_ids).to(device)

    def apply(self, logits: Tensor) -> None:
        if self._names_kept:
            kept = logits.index_select(1, self._token_ids)
            logits.fill_(-torch.inf).index_copy_(1, self._token_ids, kept)
        elif len(self._token_ids):
            logits.index_fill_(1, self._token_ids, -torch.inf)


class _Penalties:
    """Penalties, which tokens the prompt contains, and how often the output contains each."""

    def __init__(
        self, params: SamplingParams, prompt_length: int, vocab_size: int, device: torch.device | str
    ) -> None:
        self._params, self._device = params, device
        self._prompt_length, self._vocab_size = prompt_length, vocab_size
        # A factor rounded to 0 would turn a logit of 0 into 0 / 0.
        self._factor = max(np.float32(params.repetition_penalty), np.finfo(np.float32).smallest_subnormal)
        self._clear()

    def _clear(self) -> None:
        self._num_prompt = 0
        self._output: list[int] = []
        # One column per token that occurred, in order of the ids; None if many did: one per token.
        self._token_ids: NDArray[np.int64] | None = np.empty(0, np.int64)
        self._in_prompt = np.empty(0, np.bool_)
        self._counts = np.empty(0, np.float32)
        self._factors = np.empty(0, np.float32)

    def extend(self, tokens: Sequence[int]) -> None:
        num_prompt = max(0, min(len(tokens), self._prompt_length - self._num_prompt))
        prompt, output = tokens[:num_prompt], tokens[num_prompt:]
        if prompt and self._params.repetition_penalty != 1:  # the other penalties count only the output
            columns, _ = self._columns(prompt)
            self._in_prompt[columns] = True
            self._factors[columns] = self._factor
        if output:
            columns, amounts = self._columns(output)
            self._counts[columns] += amounts
            self._factors[columns] = self._factor
        self._num_prompt += num_prompt
        self._output += output

    def truncate(self, length: int) -> int:
        """Forget tokens from `length` on; return how many are still counted: 0 if the prompt was cut."""
        if length < self._prompt_length:
            self._clear()
            return 0
        removed = self._output[length - self._prompt_length :]
        del self._output[length - self._prompt_length :]
        columns, amounts = self._columns(removed)
        self._counts[columns] -= amounts
        is_unseen = (self._counts[columns] == 0) & ~self._in_prompt[columns]
        self._factors[columns[is_unseen]] = 1
        return length

    def apply(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Return penalised logits; `logits` may be changed, and returned."""
        params = self._params
        columns, *arrays = self._with_paths(paths)
        counts, factors = (torch.from_numpy(array).to(self._device) for array in arrays)
        token_ids = None if columns is None else torch.from_numpy(columns).to(self._device)
        scores = logits if token_ids is None else logits.index_select(1, token_ids)
        counts, spare = counts.expand_as(scores), torch.empty_like(scores)
        if params.repetition_penalty != 1:
            # Positive logits are divided by the factor and others multiplied, which is the smaller of the two
            # for a factor above 1 and the larger one below; 1 changes no bit.
            # NOTE: `torch.where` takes eight times as long, because it branches for each token.
            torch.div(scores, factors, out=spare)
            scores.mul_(factors)
            if self._factor > 1:
                torch.minimum(scores, spare, out=scores)
            else:
                torch.maximum(scores, spare, out=scores)
                torch.minimum(scores, _MAX_LOGIT / (factors != 1), out=scores)
        if params.frequency_penalty:
            scores.sub_(torch.mul(counts, params.frequency_penalty, out=spare))
        if params.presence_penalty:
            scores.sub_(torch.clamp(counts, max=1, out=spare).mul_(params.presence_penalty))
        return scores if token_ids is None else logits.index_copy_(1, token_ids, scores)

    def _with_paths(
        self, paths: Sequence[Sequence[int]]
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.float32], NDArray[np.float32]]:
        """Return the columns' token ids (None for all), and counts and factors [rows or 1, columns]."""
        lengths = [len(path) for path in paths]
        total = sum(lengths)
        token_ids, counts, factors = self._token_ids, self._counts, self._factors
        if not total:
            return token_ids, counts[None], factors[None]
        columns = np.fromiter(chain.from_iterable(paths), np.int64, total)
        rows = np.repeat(np.arange(len(paths)), lengths)
        if token_ids is not None:
            distinct, inverse = np.unique(columns, return_inverse=True)
            places, is_new = _places(token_ids, distinct)
            num_new = int(is_new.sum())
            places[is_new] = len(token_ids) + np.arange(num_new)
            columns = places[inverse]
            token_ids = np.concatenate([token_ids, distinct[is_new]])
            counts = np.concatenate([counts, np.zeros(num_new, np.float32)])
            factors = np.concatenate([factors, np.ones(num_new, np.float32)])
        counts, factors = np.tile(counts, (len(paths), 1)), np.tile(factors, (len(paths), 1))
        # NOTE: with one flat index of the same dtype it takes a twentieth of the time.
        np.add.at(counts.reshape(-1), rows * (counts.size // len(counts)) + columns, np.float32(1))
        factors[rows, columns] = self._factor
        return token_ids, counts, factors

    def _columns(self, tokens: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the columns of the distinct tokens, creating missing ones, and how often each occurs."""
        distinct, amounts = np.unique(_array(tokens), return_counts=True)
        if self._token_ids is None:
            return distinct, amounts
        places, is_new = _places(self._token_ids, distinct)
        if not is_new.any():
            return places, amounts
        at = places[is_new]
        self._token_ids = np.insert(self._token_ids, at, distinct[is_new])
        self._in_prompt = np.insert(self._in_prompt, at, False)
        self._counts = np.insert(self._counts, at, 0)
        self._factors = np.insert(self._factors, at, 1)
        if len(self._token_ids) <= self._vocab_size * _WIDE_SHARE:
            return np.searchsorted(self._token_ids, distinct), amounts
        self._widen(self._token_ids)
        return distinct, amounts

    def _widen(self, token_ids: NDArray[np.int64]) -> None:
        """Switch to a column per token of the vocabulary."""
        narrow = self._in_prompt, self._counts, self._factors
        self._in_prompt = np.zeros(self._vocab_size, np.bool_)
        self._counts = np.zeros(self._vocab_size, np.float32)
        self._factors = np.ones(self._vocab_size, np.float32)
        for wide, values in zip((self._in_prompt, self._counts, self._factors), narrow, strict=True):
            wide[token_ids] = values
        self._token_ids = None


def _places(
    token_ids: NDArray[np.int64], distinct: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where the `distinct` ids are or belong in the sorted `token_ids`, and which are missing."""
    places = np.searchsorted(token_ids, distinct)
    is_new = np.ones(len(distinct), np.bool_)
    inside = places < len(token_ids)
    is_new[inside] = token_ids[places[inside]] != distinct[inside]
    return places, is_new


def counts_tokens(params: SamplingParams) -> bool:
    """Whether the processed distribution depends on the preceding tokens."""
    return bool(params.grammar or params.min_tokens) or _has_penalties(params)


def _has_penalties(params: SamplingParams) -> bool:
    return bool(params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty)


def _masked(params: SamplingParams, eos: NDArray[np.int64] | None, vocab_size: int) -> NDArray[np.bool_]:
    """Return which tokens the lists mask; InvalidArgumentError if they leave none, or none but `eos`."""
    masked = np.full(vocab_size, bool(params.allowed_token_ids))
    masked[_array(params.allowed_token_ids)] = False
    masked[_array(params.banned_token_ids)] = True
    without_end = masked.copy()
    if eos is not None:
        without_end[eos] = True
    if without_end.all():
        raise InvalidArgumentError(
            "allowed_token_ids, banned_token_ids and min_tokens",
            "masks of the whole vocabulary",
            "masks that leave a token (other than end of sequence while min_tokens holds)",
        )
    return masked


def _array(token_ids: Sequence[int] | Mapping[int, float]) -> NDArray[np.int64]:
    return np.fromiter(token_ids, np.int64, len(token_ids))
