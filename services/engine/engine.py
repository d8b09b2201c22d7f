"""The engine: one model, many sessions, one forward per step over all their feeds.

A step takes any mix of feeds: prompt chunks, single tokens, chains and trees of proposed tokens. Fed tokens
stay cached per session; rollback, forks and tree paths only change lengths and copy slots. Not thread-safe:
one thread owns an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import replace

import torch
from torch import Tensor

from gammaray.errors import InvalidArgumentError
from services.engine.core.batch import Batch, Runner, SequenceInput, Taps, plan_batch
from services.engine.core.drafter import DraftFormat
from services.engine.core.kv_cache import CacheShape, CacheStore


class Engine(CacheStore):
    """One model and the caches of its sessions; built by `services.engine.loader`.

    Attributes:
        vocab_size: Token ids lie in [0, vocab_size).
        max_context: Positions lie in [0, max_context).
        device: Device of the forwards and of the returned logits.
        dtype: Type of its arithmetic.
        kernel: Implementation of its forwards: the instruction set of the compiled CPU kernel, or "none: "
            and the reason why transformers' layers are used.
        taps: While layers are tapped, the hidden states of the last step: for each feed
            [tokens, tapped layers, hidden_size] on `device`, of the cache's type. Later steps do not change
            them. Empty while none are tapped.
        mask_token: Of a parallel draft model: the id, in [0, vocab_size], after which it predicts the token
            that follows in its place; else None.
    """

    def __init__(
        self,
        runner: Runner,
        shape: CacheShape,
        budget_bytes: int,
        dtype: torch.dtype | None = None,
        *,
        model_name: str,
        vocab_size: int,
        max_context: int,
        kernel: str = "",
    ) -> None:
        super().__init__(shape, budget_bytes)
        self.model_name = model_name
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.kernel = kernel
        self.num_layers = shape.num_layers
        self.device = shape.device
        self.dtype, self._state_dtype = dtype or shape.dtype, shape.dtype
        self.runner = runner
        self.mask_token: int | None = None
        self.taps: list[Tensor] = []
        self._tapped: tuple[int, ...] = ()
        self._draft: DraftFormat | None = None
        self._chain_ids: Tensor | None = None
        self._has_all_tokens = True

    def draft_for(self, draft: DraftFormat) -> None:
        """Return the logits of the target's tokens, and accept the mask token; for a drafter."""
        self.vocab_size, self.mask_token = draft.vocab_size, draft.mask_token
        if draft.target_ids is not None:
            self._draft = replace(draft, target_ids=draft.target_ids.to(self.device))
            self._chain_ids = draft.target_ids.to(self.device, torch.int32)

    def keep_reduced(self) -> DraftFormat | None:
        """From now on return logits [rows, rows of the head]; return their tokens, None: all.

        A head of a tenth of the vocabulary makes a tenth of the work for those who read its logits.
        """
        self._has_all_tokens = False
        return self._draft

    def step(
        self,
        feeds: Sequence[SequenceInput],
        idle_until: c_int32 | None = None,
        until: c_int32 | None = None,
    ) -> list[Tensor]:
        """Run one forward over all feeds; return for each its logits [num_logits, vocab_size] in float32.

        `idle_until` and `until` are as in `Batch`. Raises what `plan_batch` does, and EndedEarlyError;
        nothing was changed then.
        """
        self.taps = []
        if not feeds:
            return []
        batch = self._plan(feeds)
        if self._tapped:
            shape = (len(batch.token_ids), len(self._tapped), self.runner.hidden_size)
            batch.taps = Taps(self._tapped, torch.empty(shape, dtype=self._state_dtype, device=self.device))
        batch.idle_until, batch.until = idle_until, until
        logits = self._run(batch)
        self._commit(feeds, batch)
        if batch.taps is not None:
            self.taps = list(batch.taps.states.split_with_sizes([s.count for s in batch.segments]))
        if len(feeds) == 1:
            return [logits]
        return list(logits.split_with_sizes([feed.num_logits for feed in feeds]))

    def tap(self, layers: Sequence[int]) -> None:
        """From now on record in `taps` the hidden states of all tokens that a step feeds.

        That includes tokens without logits: chunks of a prompt, and nodes of trees. Logits do not change. The
        ids of layers, in [0, num_layers], have any order, also repeated; none stop recording. Below
        num_layers it is the residual stream that enters this decoder layer, so 0 is the embedding as it
        enters the first layer; num_layers is what enters the model's final norm. InvalidArgumentError if
        there is no such layer, or the hidden states of this model cannot be found.
        """
        for layer in layers:
            if not isinstance(layer, int) or not 0 <= layer <= self.num_layers:
                raise InvalidArgumentError("layers", layer, f"integers in [0, {self.num_layers}]")
        if layers and (obstacle := self.runner.tap_obstacle()):
            raise InvalidArgumentError("layers", list(layers), f"none: {obstacle}")
        self.taps, self._tapped = [], tuple(layers)

    @property
    def can_chain(self) -> bool:
        """Whether `chain` is available: only with the compiled kernel."""
        return self.runner.has_kernel

    @property
    def target_taps(self) -> Sequence[int]:
        """Of a head: the hidden states of its target that it reads, by the ids of `tap`; else empty."""
        return self.runner.target_taps

    def fuse(self, states: Tensor) -> Tensor:
        """Return a head's features [positions, width] from [positions, taps, hidden_size] of the target."""
        with torch.inference_mode():
            return self.runner.fuse(states)

    def chain(
        self,
        feed: SequenceInput,
        noise: Tensor | None = None,
        *,
        scale: float = 1.0,
        stop: c_int32 | None = None,
        is_idle: bool = False,
    ) -> tuple[list[int], Tensor]:
        """Draft in one call: feed a chain, then repeatedly the token with the largest score after the last.

        It is for drafters: hidden states are not recorded, and `taps` is left as it is. Errors are those of
        `step`.

        Args:
            feed: A chain; one forward feeds its tokens up to the first one with logits, and each further
                forward one more token. Those tokens are not used, as the scores choose them.
            noise: [num_logits, vocab_size] float64, added to the logits times `scale`; None for the logits
                alone.
            scale: One over the temperature.
            stop: If another thread sets it to a nonzero value, the chain ends after the current forward.
            is_idle: Whether to run at idle CPU priority until `stop` is set.

        Returns:
            The tokens that were fed, at least those of the first forward, and the logits of each forward,
            [forwards, vocab_size].
        """
        batch = self._plan([feed])
        stop = c_int32() if stop is None else stop
        batch.idle_until = stop if is_idle else None
        token_ids, logits = self.runner.chain(batch, noise, scale, stop, self._chain_ids)
        self._commit([replace(feed, token_ids=token_ids)], batch)
        return token_ids, self._spread(logits)

    def skip(self, session_id: str, token_ids: Sequence[int]) -> None:
        """Begin a session after tokens that are not fed: no later token attends to them.

        Only heads take this, whose features of these positions are missing. CacheFullError if they do not fit
        the cache budget; nothing was changed.
        """
        (cache,) = self.reserve_all({session_id: len(token_ids)})
        cache.truncate(0)
        cache.tokens.extend(token_ids)
        cache.first = len(token_ids)

    def _run(self, batch: Batch) -> Tensor:
        with torch.inference_mode():
            logits = self._spread(self.runner.forward(batch))
        # Tensors created in inference mode cannot be modified outside of it, which callers may need.
        return logits.clone() if logits.is_inference() else logits

    def _spread(self, logits: Tensor) -> Tensor:
        if self._draft is None or not self._has_all_tokens:
            return logits
        return self._draft.with_all_tokens(logits)

    def _commit(self, feeds: Sequence[SequenceInput], batch: Batch) -> None:
        for feed, segment in zip(feeds, batch.segments, strict=True):
            cache, num_nodes = segment.cache, len(feed.parents or ())
            cache.tokens.extend(feed.token_ids[: segment.count - num_nodes])
            if feed.parents is not None:
                cache.tree_tokens.extend(feed.token_ids[segment.count - num_nodes :])
                cache.tree_parents.extend(feed.parents)

    def _plan(self, feeds: Sequence[SequenceInput]) -> Batch:
        num_ids = max(self.vocab_size, -1 if self.mask_token is None else self.mask_token + 1)
        return plan_batch(feeds, self, num_ids, self.max_context)
