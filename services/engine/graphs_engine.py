"""An engine that draws on the device: tokens come back instead of logits, whole proposals in one graph."""

from __future__ import annotations

from collections.abc import Sequence

from services.engine.batch import Feed
from services.engine.cache_budget import DEFAULT_CACHE_BUDGET_BYTES
from services.engine.engine import Engine
from services.engine.errors import UnsupportedModelError
from services.engine.graphs import GraphRunner
from services.engine.graphs_draft import Drafter, TreeShape
from services.engine.graphs_tables import Race
from services.engine.graphs_torch import TorchKernels
from services.engine.graphs_weights import GraphModel, build_graph_model, has_graph_path
from services.engine.kv_cache import CacheShape, CacheStore
from services.engine.model import LoadedModel

__all__ = ["GraphEngine"]


class GraphEngine(Engine):
    """The engine's contract (steps, rollback, forks, tree paths) and drawing on the device beside it.

    Args:
        runner: Its weights and kernels.
        store: The caches.
        model_name: For messages.
        max_context: Positions lie below it.
    """

    runner: GraphRunner

    def __init__(self, runner: GraphRunner, store: CacheStore, *, model_name: str, max_context: int) -> None:
        vocab_size = runner.model.shape.vocab_size
        super().__init__(runner, store, model_name=model_name, vocab_size=vocab_size, max_context=max_context)
        self._drafter = Drafter(runner)

    @classmethod
    def of(
        cls,
        model: GraphModel,
        *,
        name: str,
        kernels: TorchKernels | None = None,
        cache_budget_bytes: int = DEFAULT_CACHE_BUDGET_BYTES,
    ) -> GraphEngine:
        """Serve weights that are laid out already; see `build`."""
        shape = model.shape
        cache = CacheShape(
            len(model.layers), 2 * shape.num_kv_heads, shape.head_dim, model.dtype, model.device
        )
        store = CacheStore(cache, cache_budget_bytes)
        return cls(GraphRunner(model, kernels), store, model_name=name, max_context=model.rotation.shape[1])

    @classmethod
    def build(cls, loaded: LoadedModel, *, kernels: TorchKernels | None = None) -> GraphEngine:
        """Lay out a loaded model's weights and serve them; its module stays usable and shares them.

        Raises:
            UnsupportedModelError: The architecture has no such path.
        """
        if not has_graph_path(loaded):
            raise UnsupportedModelError(loaded.name, f"{loaded.config.model_type} has no captured path")
        return cls.of(build_graph_model(loaded, loaded.config.vocab_size), name=loaded.name, kernels=kernels)

    def choose(self, feeds: Sequence[Feed], races: Sequence[Race]) -> list[list[int]]:
        """Like `step`, but draw a token in each wanted row.

        Args:
            feeds: As for `step`.
            races: One per feed.

        Returns:
            For each feed its `num_logits` tokens.
        """
        batch = self._plan(feeds)
        tokens = iter(self.runner.choose(batch, races))
        self._commit(feeds, batch)
        return [[next(tokens) for _ in range(feed.num_logits)] for feed in feeds]

    def draft_chains(self, feeds: Sequence[Feed], races: Sequence[Race], gamma: int) -> list[list[int]]:
        """Feed what lacks and draft `gamma` tokens behind it, all in one graph.

        What was drafted stays cached, but for the last token: a rollback drops what is not accepted.

        Args:
            feeds: Committed tokens that are not cached, with `num_logits` 1; at least one per session.
            races: One per feed.
            gamma: At least 1.

        Returns:
            For each feed its drafted tokens.

        Raises:
            ValueError: A feed is malformed, or drafting would leave the context.
        """
        self._make_room(feeds, gamma - 1)
        batch = self._plan(feeds)
        chains = self._drafter.chains(batch, races, gamma)
        self._commit(feeds, batch)
        for segment, tokens in zip(batch.segments, chains, strict=True):
            segment.cache.tokens.extend(tokens[:-1])
        return chains

    def draft_trees(
        self, feeds: Sequence[Feed], races: Sequence[Race], shape: TreeShape
    ) -> list[tuple[list[int], list[int]]]:
        """Feed what lacks and grow a tree behind it, all in one graph.

        The nodes of all levels but the last stay cached until `keep_path`.

        Args:
            feeds: As for `draft_chains`.
            races: One per feed.
            shape: Of the trees.

        Returns:
            For each feed the nodes' tokens and parents, level by level.

        Raises:
            ValueError: A feed is malformed, or drafting would leave the context.
        """
        num_cached = shape.width * (shape.depth - 1)
        self._make_room(feeds, num_cached)
        batch = self._plan(feeds)
        trees = self._drafter.trees(batch, races, shape)
        self._commit(feeds, batch)
        for segment, (tokens, parents) in zip(batch.segments, trees, strict=True):
            segment.cache.tree_tokens.extend(tokens[:num_cached])
            segment.cache.tree_parents.extend(parents[:num_cached])
        return trees

    def _make_room(self, feeds: Sequence[Feed], num_more: int) -> None:
        """Reserve the slots of what will be drafted: the graph cannot."""
        wanted = {}
        for feed in feeds:
            if feed.num_logits != 1 or feed.parents is not None:
                raise ValueError("feeds: drafting starts from a chain and the logits of its last token")
            end = feed.start + len(feed.token_ids) + num_more
            if end > self.max_context:
                raise ValueError(f"gamma: drafting would reach position {end}, allowed: {self.max_context}")
            wanted[feed.session_id] = end
        self._store.reserve_all(wanted)
