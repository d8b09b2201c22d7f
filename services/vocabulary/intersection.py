"""Tokens that two vocabularies share, by their bytes (token-level intersection, arXiv 2502.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.vocabulary import Vocabulary


class Intersection:
    """The tokens that a draft of `draft_size` logits and a target of `target_size` token ids share.

    Tokens match if their bytes are equal. Special tokens match by their content, never by text; the draft's
    end of sequence stands for the target's.

    Attributes:
        target_ids: Target ids that the draft can propose, ascending.
        draft_ids: For each of them the draft token that is fed for it.
        duplicates: Rounds of (index into `target_ids`, further draft token with the same bytes); an index
            occurs once per round.
        to_draft: Draft token of each shared target token, special tokens included, for the context.
        num_text_tokens: Shared tokens that are not special.
    """

    def __init__(self, draft: Vocabulary, target: Vocabulary, draft_size: int, target_size: int) -> None:
        size, self.target_size = min(draft_size, len(draft)), target_size
        fed: dict[int, int] = {}
        others: list[tuple[int, int]] = []
        for draft_id in range(size):
            spelling = draft.spellings[draft_id]
            target_id = target.id_of(spelling) if spelling else None
            if target_id is None or target_id >= target_size:
                continue
            if draft.id_of(spelling) == draft_id:
                fed[target_id] = draft_id
            else:
                others.append((target_id, draft_id))
        self.to_draft = dict(fed)
        proposed = dict(fed)
        for content, target_id in target.specials.items():
            draft_special = draft.specials.get(content)
            if draft_special is not None and draft_special < size and target_id < target_size:
                self.to_draft[target_id] = draft_special
                if draft_special != draft.eos_token_id:
                    proposed[target_id] = draft_special
        if draft.eos_token_id is not None and target.eos_token_id is not None and draft.eos_token_id < size:
            self.to_draft.setdefault(target.eos_token_id, draft.eos_token_id)
            proposed[target.eos_token_id] = draft.eos_token_id
        self.num_text_tokens = len(fed)
        self.target_ids = sorted(proposed)
        self.draft_ids = [proposed[target_id] for target_id in self.target_ids]
        index_of = {target_id: index for index, target_id in enumerate(self.target_ids)}
        self.duplicates: list[list[tuple[int, int]]] = []
        seen: dict[int, int] = {}
        for target_id, draft_id in others:
            if (index := index_of.get(target_id)) is not None:
                number = seen.get(index, 0)
                seen[index] = number + 1
                if number == len(self.duplicates):
                    self.duplicates.append([])
                self.duplicates[number].append((index, draft_id))


class SharedTokens:
    """The shared tokens as columns of the draft's logits, in order of the target's ids."""

    def __init__(self, common: Intersection, device: torch.device | str) -> None:
        self.target_ids = torch.tensor(common.target_ids, device=device)
        self.draft_id_of = dict(zip(common.target_ids, common.draft_ids, strict=True))
        self.target_size = common.target_size
        self._columns = torch.tensor(common.draft_ids, device=device)
        self._rounds = [torch.tensor(pairs, device=device).T for pairs in common.duplicates]

    def of(self, logits: Tensor) -> Tensor:
        """Return [rows, shared tokens]; probabilities of draft tokens with the same bytes are added."""
        shared = logits[:, self._columns]
        for indexes, draft_ids in self._rounds:
            shared[:, indexes] = torch.logaddexp(shared[:, indexes], logits[:, draft_ids])
        return shared

    def with_all_tokens(self, shared: Tensor) -> Tensor:
        """Return [rows, target_size] float32 from [rows, shared tokens]; -inf for the other tokens."""
        spread = torch.full((len(shared), self.target_size), -torch.inf, device=shared.device)
        spread[:, self.target_ids] = shared.float()
        return spread
