"""Whole proposals in one graph: all draft steps run on the device, and the result is copied back once.

A chain feeds the missing committed tokens, draws a token, feeds it, and so on. A tree grows by levels: the
`width` best nodes of a level by confidence are fed together, and each offers its best continuations for the
next level. Confidence is the product along the path of softmax(sharpness * s), where s is the perturbed score
logits / temperature + gumbel that the target's own Gumbel-max draw maximises (or the plain logit when
greedy), so the tree contains the tokens that the target is likely to draw.

A node offers at most one token of each stripe of ids, as the Gumbel-max draw computes the best of each stripe
anyway. Any choice of nodes is lossless with coupled and greedy verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.core.batch import Batch, GumbelDraw, SequenceInput
from services.engine.core.cache_budget import DEFAULT_CACHE_BUDGET_BYTES
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.kv_cache import CacheShape, CacheStore
from services.engine.core.model import LoadedModel
from services.engine.cuda.pages import PagedStore
from services.engine.cuda.runner import Capture, GraphRunner, run_forward
from services.engine.cuda.tables import NO_TREE, Bucket, Tables, bucket_of, fill, new_tables
from services.engine.cuda.torch_kernels import Stripes, TorchKernels
from services.engine.cuda.weights import GraphModel, build_graph_model, has_graph_path
from services.engine.engine import Engine

__all__ = ["Drafter", "GraphEngine", "TreeShape"]

_MAX_NODES = 64


@dataclass(frozen=True)
class TreeShape:
    """A tree of `depth` levels with `width` nodes each; at most 64 nodes are fed.

    Attributes:
        width: Nodes per level, at least 1.
        depth: Levels, at least 1.
        sharpness: Factor on the scores before the softmax; larger makes deeper, narrower trees.
    """

    width: int
    depth: int
    sharpness: float = 2.0

    def __post_init__(self) -> None:
        if self.width < 1 or self.depth < 1 or self.width * (self.depth - 1) > _MAX_NODES:
            raise ValueError(f"shape: got {self.width} x {self.depth}, allowed: {_MAX_NODES} fed nodes")

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole tree."""
        return self.width * self.depth


@dataclass
class _Proposals:
    """A captured proposal: its inputs and its result."""

    bucket: Bucket
    tables: Tables
    result: Tensor
    capture: Capture


class Drafter:
    """Drafts with a runner's weights and kernels.

    Args:
        runner: Runner of the draft model.
    """

    def __init__(self, runner: GraphRunner) -> None:
        self._runner = runner
        self._programs: dict[tuple[Bucket, int | TreeShape], _Proposals] = {}

    @torch.inference_mode()
    def chains(self, batch: Batch, gumbel_draws: Sequence[GumbelDraw], gamma: int) -> list[list[int]]:
        """Return `gamma` tokens per segment; the caches need room for all but the last."""
        program = self._program(batch, gamma, gamma)
        result = self._run(program, batch, gumbel_draws)
        return [list(tokens) for tokens in zip(*result.tolist(), strict=True)]

    @torch.inference_mode()
    def trees(
        self, batch: Batch, gumbel_draws: Sequence[GumbelDraw], shape: TreeShape
    ) -> list[tuple[list[int], list[int]]]:
        """Return tokens and parents of each segment's nodes; the caches need room for all fed ones."""
        program = self._program(batch, shape, shape.width * (shape.depth - 1))
        tokens, parents = self._run(program, batch, gumbel_draws).tolist()
        return list(zip(tokens, parents, strict=True))

    def _run(self, program: _Proposals, batch: Batch, gumbel_draws: Sequence[GumbelDraw]) -> Tensor:
        """Return the result [gamma, sessions] of chains or [2, sessions, nodes] of trees."""
        fill(program.tables, program.bucket, batch, gumbel_draws, self._runner.kernels.anchor.data_ptr())
        program.capture.run()
        self._runner.last = program.capture
        return program.result[:, : len(batch.segments)]  # without the spare sessions

    def _program(self, batch: Batch, shape: int | TreeShape, num_more: int) -> _Proposals:
        bucket = bucket_of(batch)
        bucket = replace(bucket, wanted=bucket.sessions, max_slots=max(bucket.max_slots, 2048))
        last = max(segment.slot + segment.count for segment in batch.segments) + num_more
        while bucket.max_slots < last:
            bucket = replace(bucket, max_slots=2 * bucket.max_slots)
        key = (bucket, shape)
        if key not in self._programs:
            tables = new_tables(bucket, self._runner.model.device)
            if isinstance(shape, int):
                self._programs[key] = self._chain_work(bucket, tables, shape)
            else:
                self._programs[key] = self._tree_work(bucket, tables, shape)
        return self._programs[key]

    def _chain_work(self, bucket: Bucket, tables: Tables, gamma: int) -> _Proposals:
        model, kernels = self._runner.model, self._runner.kernels
        later = _level_bucket(bucket, 1)
        # They overlap: what the first step leaves is read before the next one begins.
        first, buffers = self._runner.buffers(bucket), self._runner.buffers(later)
        result = torch.zeros(gamma, bucket.sessions, dtype=torch.int64, device=model.device)
        steps = _Steps(tables, bucket, num_steps=gamma - 1, width=1)

        def work() -> None:
            steps.place()
            run_forward(model, kernels, bucket, tables, first)
            kernels.stripes(first.logits, tables, None, first.stripes)
            kernels.pick(first.stripes, result[0])
            for step in range(gamma - 1):
                now = steps.tables(step, result[step])
                run_forward(model, kernels, later, now, buffers)
                kernels.stripes(buffers.logits, now, None, buffers.stripes)
                kernels.pick(buffers.stripes, result[step + 1])

        return _Proposals(bucket, tables, result, self._capture(work))

    def _tree_work(self, bucket: Bucket, tables: Tables, shape: TreeShape) -> _Proposals:
        model, kernels = self._runner.model, self._runner.kernels
        width, device = shape.width, model.device
        later = _level_bucket(bucket, width)
        # They overlap: what the first step leaves is read before the next one begins.
        first, buffers = self._runner.buffers(bucket), self._runner.buffers(later)
        if width > first.stripes.score.shape[1]:
            raise ValueError(f"width: got {width}, allowed: up to {first.stripes.score.shape[1]}")
        result = torch.zeros(2, bucket.sessions, shape.num_nodes, dtype=torch.int64, device=device)
        sharpness = torch.tensor([shape.sharpness], dtype=torch.float64, device=device)
        steps = _Steps(tables, bucket, num_steps=shape.depth - 1, width=width)

        def work() -> None:
            steps.place()
            run_forward(model, kernels, bucket, tables, first)
            kernels.stripes(first.logits, tables, sharpness, first.stripes)
            frontier = _offers(first.stripes, sharpness, bucket.sessions, width)
            result[0, :, :width] = frontier.token
            result[1, :, :width] = -1
            for step in range(shape.depth - 1):
                steps.see(step, frontier.parent)
                now = steps.tables(step, frontier.token.flatten())
                run_forward(model, kernels, later, now, buffers)
                kernels.stripes(buffers.logits, now, sharpness, buffers.stripes)
                offers = _offers(buffers.stripes, sharpness, bucket.sessions, width)
                frontier = _best(frontier, offers)
                nodes = slice((step + 1) * width, (step + 2) * width)
                result[0, :, nodes] = frontier.token
                result[1, :, nodes] = frontier.parent + step * width

        return _Proposals(bucket, tables, result, self._capture(work))

    def _capture(self, work: Callable[[], None]) -> Capture:
        runner = self._runner
        return Capture(work, capturable=runner.kernels.capturable, pool=runner.pool)


class _Steps:
    """Tables of the steps after the first, computed on the device from those of the first.

    Args:
        first: Tables of the first step, which returns one row per session.
        bucket: Bucket of the first step.
        num_steps: Number of steps after it.
        width: Rows per session in each of them; above 1 they are nodes of a tree.
    """

    def __init__(self, first: Tables, bucket: Bucket, *, num_steps: int, width: int) -> None:
        device, sessions = first.flat.device, bucket.sessions
        shape = (num_steps, sessions, width)
        self._first, self._is_tree = first, width > 1
        self._position = torch.zeros(shape, dtype=torch.int64, device=device)
        self._slot, self._prefix = torch.zeros_like(self._position), torch.zeros_like(self._position)
        self._count = torch.zeros(sessions, dtype=torch.int64, device=device)
        self._tree_base = torch.full_like(self._count, NO_TREE)
        self._bits = torch.zeros(num_steps + 1, sessions, width, dtype=torch.int64, device=device)
        index = torch.arange(num_steps * width, device=device).view(num_steps, 1, width)
        self._node, self._step = index, torch.arange(num_steps, device=device).view(num_steps, 1, 1)
        self._own_bit = torch.ones_like(index) << index
        rows = torch.arange(sessions * width, device=device)
        self._rows = rows
        self._session, self._first_row = rows // width, rows[::width].contiguous()

    def place(self) -> None:
        """Compute the positions and slots of all steps' rows."""
        first = self._first
        base = (first.position[first.wanted] + 1)[None, :, None]
        live = (first.count > 0)[None, :, None]
        self._position.copy_(base + self._step)
        self._slot.copy_(torch.where(live, base + self._node, -1))
        self._count.copy_(live[0, :, 0] * self._bits.shape[2])
        if self._is_tree:
            self._prefix.copy_(base.expand_as(self._prefix))
            self._tree_base.copy_(base[0, :, 0])
        else:
            self._prefix.copy_(self._position + 1)

    def see(self, step: int, parent: Tensor) -> None:
        """Compute which nodes a level's rows see, from `parent`: [sessions, width] in the level before."""
        own = self._own_bit[step].expand(parent.shape)
        self._bits[step].copy_(self._bits[step - 1].gather(1, parent) | own if step else own)

    def tables(self, step: int, token: Tensor) -> Tables:
        """The tables of a step that feeds `token` [sessions * width]."""
        return replace(
            self._first,
            token=token,
            position=self._position[step].flatten(),
            slot=self._slot[step].flatten(),
            prefix=self._prefix[step].flatten(),
            session=self._session,
            bits=self._bits[step].view(-1, 1),
            wanted=self._rows,
            first_row=self._first_row,
            count=self._count,
            tree_base=self._tree_base,
        )


@dataclass
class _Frontier:
    """The nodes of a level, or the candidates for the next: [sessions, any number].

    Attributes:
        token: Token of each node.
        parent: Index of its parent in the level before.
        log_confidence: Log of the confidence that the path to it is accepted.
    """

    token: Tensor
    parent: Tensor
    log_confidence: Tensor


def _offers(stripes: Stripes, sharpness: Tensor, sessions: int, width: int) -> _Frontier:
    """The `width` best continuations of each row, [sessions, rows of a session * width]."""
    weight = stripes.score * sharpness
    total = torch.logsumexp(weight + stripes.mass.log(), -1, keepdim=True)
    best = torch.topk(weight, width, -1)
    token = stripes.token.gather(1, best.indices)
    rows = token.shape[0] // sessions
    parent = torch.arange(rows * width, device=token.device) // width
    return _Frontier(
        token.view(sessions, -1),
        parent.expand(sessions, -1),
        (best.values - total).view(sessions, -1),
    )


def _best(level: _Frontier, offers: _Frontier) -> _Frontier:
    """The continuations of a level with the highest confidence, as many as it has nodes."""
    confidence = offers.log_confidence + level.log_confidence.gather(1, offers.parent)
    best = torch.topk(confidence, level.token.shape[1], -1)
    return _Frontier(offers.token.gather(1, best.indices), offers.parent.gather(1, best.indices), best.values)


def _level_bucket(bucket: Bucket, width: int) -> Bucket:
    rows = bucket.sessions * width
    return replace(bucket, rows=rows, wanted=rows, words=1, max_rows=1 << (width - 1).bit_length())


class GraphEngine(Engine):
    """An engine (steps, rollback, forks, tree paths) that also draws tokens on the device.

    Args:
        runner: Its weights and kernels.
        store: The caches.
        model_name: Name used in messages.
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
        """Return an engine for weights in the graph layout; see `build`."""
        shape = model.shape
        cache = CacheShape(
            len(model.layers), 2 * shape.num_kv_heads, shape.head_dim, model.dtype, model.device
        )
        store = PagedStore(cache, cache_budget_bytes)
        return cls(GraphRunner(model, kernels), store, model_name=name, max_context=model.rotation.shape[1])

    @classmethod
    def build(cls, loaded: LoadedModel, *, kernels: TorchKernels | None = None) -> GraphEngine:
        """Return an engine for a loaded model, whose module stays usable and shares the weights.

        Raises:
            UnsupportedModelError: The architecture is not covered by CUDA graphs.
        """
        if not has_graph_path(loaded):
            raise UnsupportedModelError(loaded.name, f"{loaded.config.model_type} has no captured path")
        return cls.of(build_graph_model(loaded, loaded.config.vocab_size), name=loaded.name, kernels=kernels)

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

    def draft_chains(
        self, feeds: Sequence[SequenceInput], gumbel_draws: Sequence[GumbelDraw], gamma: int
    ) -> list[list[int]]:
        """Feed the missing tokens and draft `gamma` tokens after them, all in one graph.

        Drafted tokens except the last stay cached: a rollback drops those that are not accepted.

        Args:
            feeds: Committed tokens that are not cached, with `num_logits` 1; at least one per session.
            gumbel_draws: Parameters of the Gumbel-max draw, one per feed.
            gamma: At least 1.

        Returns:
            For each feed its drafted tokens.

        Raises:
            ValueError: A feed is malformed, or drafting would leave the context.
        """
        self._make_room(feeds, gamma - 1)
        batch = self._plan(feeds)
        chains = self._drafter.chains(batch, gumbel_draws, gamma)
        self._commit(feeds, batch)
        for segment, tokens in zip(batch.segments, chains, strict=True):
            segment.cache.tokens.extend(tokens[:-1])
        return chains

    def draft_trees(
        self, feeds: Sequence[SequenceInput], gumbel_draws: Sequence[GumbelDraw], shape: TreeShape
    ) -> list[tuple[list[int], list[int]]]:
        """Feed the missing tokens and grow a tree after them, all in one graph.

        The nodes of all levels but the last stay cached until `keep_path`.

        Args:
            feeds: As for `draft_chains`.
            gumbel_draws: Parameters of the Gumbel-max draw, one per feed.
            shape: Shape of the trees.

        Returns:
            For each feed the nodes' tokens and parents, level by level.

        Raises:
            ValueError: A feed is malformed, or drafting would leave the context.
        """
        num_cached = shape.width * (shape.depth - 1)
        self._make_room(feeds, num_cached)
        batch = self._plan(feeds)
        trees = self._drafter.trees(batch, gumbel_draws, shape)
        self._commit(feeds, batch)
        for segment, (tokens, parents) in zip(batch.segments, trees, strict=True):
            segment.cache.tree_tokens.extend(tokens[:num_cached])
            segment.cache.tree_parents.extend(parents[:num_cached])
        return trees

    def _make_room(self, feeds: Sequence[SequenceInput], num_more: int) -> None:
        """Reserve the slots of the tokens to be drafted, since the graph cannot."""
        wanted, first = dict[str, int](), dict[str, int]()
        for feed in feeds:
            if feed.num_logits != 1 or feed.parents is not None:
                raise ValueError("feeds: drafting starts from a chain and the logits of its last token")
            end = feed.start + len(feed.token_ids) + num_more
            if end > self.max_context:
                raise ValueError(f"gamma: drafting would reach position {end}, allowed: {self.max_context}")
            wanted[feed.session_id], first[feed.session_id] = end, feed.start + feed.num_kept
        self._store.reserve_all(wanted, first=first)
