"""An engine on captured steps: it draws tokens on the device, and drafts without waiting for the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from services.engine.cache_budget import DEFAULT_CACHE_BUDGET_BYTES
from services.engine.core.batch import GumbelDraw, SequenceInput
from services.engine.core.device import on_device
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.kv_cache import CacheShape
from services.engine.core.model import LoadedModel
from services.engine.cuda.pages import PagedStore
from services.engine.cuda.runner import GraphRunner
from services.engine.cuda.torch_kernels import TorchKernels
from services.engine.cuda.weights import GraphModel, build_graph_model, has_graph_path
from services.engine.engine import Engine

__all__ = ["Draft", "GraphEngine"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A drawn token and what may come instead.

    Attributes:
        token_id: The token with the largest score logits / temperature + gumbel; 0 without a finite score.
        guesses: Tokens with large scores, best first, and their shares of sum exp(sharpness * score).
    """

    token_id: int
    guesses: list[tuple[int, float]]


class GraphEngine(Engine):
    """An engine (steps, rollback, forks, tree paths) whose runner captures its steps.

    Args:
        runner: Its weights and kernels.
        model_name: Name used in messages.
        vocab_size: Token ids lie in [0, vocab_size).
        max_context: Positions lie in [0, max_context).
        cache_budget_bytes: Upper bound of all sessions' keys and values together.
        kernel: As for `Engine`.
    """

    runner: GraphRunner

    def __init__(
        self,
        runner: GraphRunner,
        *,
        model_name: str,
        vocab_size: int,
        max_context: int,
        cache_budget_bytes: int = DEFAULT_CACHE_BUDGET_BYTES,
        kernel: str = "CUDA graphs",
    ) -> None:
        model = runner.model
        rows, dim = 2 * model.shape.num_kv_heads, model.shape.head_dim  # keys of all heads, then values
        cache = CacheShape(len(model.layers), rows, dim, model.dtype, model.device)
        super().__init__(
            runner,
            PagedStore(cache, cache_budget_bytes),
            model_name=model_name,
            vocab_size=vocab_size,
            max_context=max_context,
            kernel=kernel,
        )

    @classmethod
    def of(
        cls,
        model: GraphModel,
        *,
        name: str,
        kernels: TorchKernels | None = None,
        cache_budget_bytes: int = DEFAULT_CACHE_BUDGET_BYTES,
    ) -> GraphEngine:
        """Return an engine for weights in the graph layout; see `build`."""
        return cls(
            GraphRunner(model, kernels),
            model_name=name,
            vocab_size=model.shape.vocab_size,
            max_context=model.rotation.shape[1],
            cache_budget_bytes=cache_budget_bytes,
        )

    @classmethod
    def build(cls, loaded: LoadedModel, *, kernels: TorchKernels | None = None) -> GraphEngine:
        """Return an engine for a loaded model, whose module stays usable and shares the weights.

        Raises:
            UnsupportedModelError: The architecture is not covered by CUDA graphs.
        """
        if not has_graph_path(loaded):
            raise UnsupportedModelError(loaded.name, f"{loaded.config.model_type} has no captured path")
        return cls.of(build_graph_model(loaded, loaded.config.vocab_size), name=loaded.name, kernels=kernels)

    def warm_up(self) -> None:
        """Compile all kernels and capture all steps, so that no request waits for that."""
        with on_device(self.device):
            self.runner.warm_up(self._tapped)

    def tap(self, layers: Sequence[int]) -> None:
        """See `Engine`; the steps are captured anew."""
        super().tap(layers)
        self.warm_up()

    def choose(self, feeds: Sequence[SequenceInput], gumbel_draws: Sequence[GumbelDraw]) -> list[list[int]]:
        """Like `step`, but return a drawn token for each wanted row instead of logits.

        Args:
            feeds: As for `step`.
            gumbel_draws: Parameters of the Gumbel-max draw, one per feed.

        Returns:
            For each feed its `num_logits` tokens; -1 for rows that hold no finite number.
        """
        self.step(feeds, draws=gumbel_draws)
        return [[-1 if token is None else token for token in drawn or ()] for drawn in self.drawn]

    def draft(
        self,
        feeds: Sequence[SequenceInput],
        gumbel_draws: Sequence[GumbelDraw],
        count: int = 1,
        *,
        num_guesses: int,
        within: AbstractContextManager[object] | None = None,
    ) -> list[list[Draft]]:
        """Feed tokens and draw what follows; then feed what was drawn, `count` - 1 times, and draw again.

        The tokens pass from step to step on the device. Hidden states are not recorded, and `taps` is left
        as it is.

        Args:
            feeds: As for `step`. With `count` above 1 chains with the logits of their last token.
            gumbel_draws: Parameters of the Gumbel-max draw, one per feed.
            count: Steps, at least 1.
            num_guesses: Likely tokens to return with each draw.
            within: As for `step`.

        Returns:
            For each feed what was drawn after each of its `num_logits` tokens, then after each drawn token
            but the last.

        Raises:
            ValueError: A feed is malformed or leaves the context; nothing was changed.
            CacheGapError, CacheFullError: As `step`.
        """
        if count < 1:
            raise ValueError(f"count: got {count}, allowed: at least 1")
        for feed in feeds if count > 1 else ():
            if feed.num_logits != 1 or feed.parents is not None or feed.num_kept:
                raise ValueError("feeds: drafting goes on from a chain and the logits of its last token")
            last = feed.start + len(feed.token_ids) + count - 2
            if last >= self.max_context:
                raise ValueError(
                    f"count: drafting would reach position {last}, allowed: [0, {self.max_context})"
                )
        if count > 1:
            self._store.reserve_all(
                {feed.session_id: feed.start + len(feed.token_ids) + count - 1 for feed in feeds},
                first={feed.session_id: feed.start for feed in feeds},
            )
        batch = self._plan(feeds)
        batch.draws = gumbel_draws
        with within or nullcontext(), on_device(self.device):
            found = self.runner.draft(batch, count, num_guesses)
        self._commit(feeds, batch)
        drafts: list[list[Draft]] = []
        row = 0
        for feed, segment in zip(feeds, batch.segments, strict=True):
            rows = range(row, row + feed.num_logits)
            row = rows.stop
            own = [
                Draft(tokens[index], guesses[index])
                for tokens, guesses in zip(found.tokens, found.guesses, strict=True)
                for index in rows
            ]
            if count > 1:
                segment.cache.tokens.extend(draft.token_id for draft in own[:-1])
            drafts.append(own)
        return drafts
