"""Log-probabilities of a prompt's tokens, from the logits of its prefill chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gammaray.errors import InternalError
from gammaray.types import PromptLogprobs

_SLICE_ROWS = 16
"""Rows converted to float64 at once: at a vocabulary of 152,000 they take 19 MB."""


class PromptScores:
    """Collects the log-probabilities of one prompt and of the `num_top` most likely tokens per position.

    Chunks may be repeated and come in any order.
    """

    def __init__(self, prompt: Sequence[int], num_top: int, vocab_size: int) -> None:
        self._prompt = tuple(prompt)
        self._targets = torch.tensor(prompt[1:], dtype=torch.int64)
        entries, self._num_top = len(self._targets), min(num_top, vocab_size)
        self._logprobs = torch.full((entries,), torch.nan, dtype=torch.float64)
        self._ranks = torch.zeros(entries, dtype=torch.int64)
        self._top_ids = torch.zeros((entries, self._num_top), dtype=torch.int64)
        self._top = torch.zeros((entries, self._num_top), dtype=torch.float64)
        self._is_known = torch.zeros(entries, dtype=torch.bool)

    def take(self, start: int, logits: Tensor) -> None:
        """Take in the logits [rows, vocab_size] of the tokens from position `start` on.

        Rows from the prompt's last token on are ignored: they predict tokens after the prompt.
        """
        for first in range(start, min(start + len(logits), len(self._targets)), _SLICE_ROWS):
            end = min(first + _SLICE_ROWS, start + len(logits), len(self._targets))
            log_probs = logits[first - start : end - start].double().log_softmax(-1)
            scores = log_probs.gather(1, self._targets[first:end, None].to(log_probs.device))
            top = log_probs.topk(self._num_top)
            self._logprobs[first:end] = scores[:, 0].cpu()
            self._ranks[first:end] = (log_probs > scores).sum(-1).cpu() + 1
            self._top_ids[first:end] = top.indices.cpu()
            self._top[first:end] = top.values.cpu()
            self._is_known[first:end] = True

    def result(self) -> PromptLogprobs:
        """Return the columns, once the logits of all positions were taken in."""
        if not bool(self._is_known.all()):
            raise InternalError(f"{int((~self._is_known).sum())} tokens of the prompt were not scored")
        return PromptLogprobs(
            self._prompt,
            tuple(self._logprobs.tolist()),
            tuple(self._ranks.tolist()),
            self._num_top,
            tuple(self._top_ids.flatten().tolist()),
            tuple(self._top.flatten().tolist()),
        )
