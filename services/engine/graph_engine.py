"""An engine on captured steps: it draws tokens on the device, and drafts chains without waiting for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from services.engine.core.batch import GumbelDraw, SequenceInput
from services.engine.core.cache_budget import DEFAULT_CACHE_BUDGET_BYTES
from services.engine.core.device import on_device
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.kv_cache import CacheShape
from services.engine.core.model import LoadedModel
from services.engine.cuda.pages import PagedStore
from services.engine.cuda.runner import GraphRunner
from services.engine.cuda.torch_kernels import TorchKernels
from services.engine.cuda.weights import GraphModel, build_graph_model, has_graph_path
from services.engine.engine import Engine

__all__ = ["GraphEngine"]


class GraphEngine(Engine):
    """An engine (steps, rollback, forks, tree paths) whose runner captures its steps.

    Args:
        runner: Its weights and kernels.
        model_name: Name used in messages.
        vocab_size: Token ids lie in [0, vocab_size).
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

    @property
    def can_chain(self) -> bool:
        """Whether `chains` can be used: not for a drafter that lacks tokens of the target."""
        return self.can_draw

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

    def chains(
        self,
        feeds: Sequence[SequenceInput],
        gumbel_draws: Sequence[GumbelDraw],
        count: int,
        within: AbstractContextManager[object] | None = None,
    ) -> list[tuple[list[int], Tensor]]:
        """Draft for many sessions: feed a token each, then `count` - 1 times the tokens drawn after the last.

        The tokens pass from step to step on the device. Hidden states are not recorded, and `taps` is left
        as it is.

        Args:
            feeds: One token each, at the end of its session's chain, with `num_logits` 1.
            gumbel_draws: Parameters of the Gumbel-max draw, one per feed.
            count: Steps, at least 1.
            within: As for `step`.

        Returns:
            For each feed the tokens that were drawn, of which all but the last were fed, and the logits that
            they were drawn from, [count, vocab_size]. Where those hold no finite number, the token is 0.

        Raises:
            ValueError: A feed is malformed or leaves the context; nothing was changed.
            CacheGapError, CacheFullError: As `step`.
        """
        for feed in feeds:
            if len(feed.token_ids) != 1 or feed.num_logits != 1 or feed.parents is not None:
                raise ValueError("feeds: a chain begins with one token and its logits")
            if feed.start + count > self.max_context:
                raise ValueError(
                    f"count: drafting would reach position {feed.start + count - 1}, "
                    f"allowed: [0, {self.max_context})"
                )
        self._store.reserve_all(
            {feed.session_id: feed.start + count for feed in feeds},
            first={feed.session_id: feed.start for feed in feeds},
        )
        batch = self._plan(feeds)
        batch.draws = gumbel_draws
        with within or nullcontext(), on_device(self.device):
            drawn, logits = self.runner.chains(batch, count)
        self._commit(feeds, batch)
        for segment, tokens in zip(batch.segments, drawn, strict=True):
            segment.cache.tokens.extend(tokens[:-1])
        return list(zip(drawn, logits.unbind(1), strict=True))
