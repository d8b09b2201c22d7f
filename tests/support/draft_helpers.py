"""A draft worker's scheduler over table-driven logits: exact to the bit, whatever is fed together."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gammaray.blocks import Shape
from gammaray.errors import GammarayError
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.core.batch import SequenceInput
from services.engine.core.session_cache import SessionCache
from services.engine.sampling.noise import Noise
from services.own.draft_scheduler import DraftScheduler
from services.scheduling.planning import Limits
from services.scheduling.tasks import ProposeTask, Reply
from services.speculation.predictions import draw_temperature
from tests.support.engine_helpers import path_tokens
from tests.support.vllm_helpers import Session, answer, draft_task

VOCAB = 40
CAPACITY = 512


class TableEngine:
    """Logits that depend on a node's last two tokens and position; slots keep a mark of their whole path."""

    vocab_size, max_context, device = VOCAB, 400, torch.device("cpu")
    can_chain = False
    mask_token: int | None = None
    target_taps = ()

    def __init__(self, seed: int = 0, spread: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = spread * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
        self.caches: dict[str, SessionCache] = {}
        self.num_steps = 0
        self.has_space = True

    def keep_reduced(self):
        return None

    def step(
        self, feeds: Sequence[SequenceInput], idle_until: object = None, until: object = None
    ) -> list[Tensor]:
        self.num_steps += 1
        return [self.feed_one(feed) for feed in feeds]

    def chain(
        self,
        feed: SequenceInput,
        noise: Tensor | None = None,
        *,
        scale: float = 1.0,
        stop: Any = None,
        is_idle: bool = False,
    ) -> tuple[list[int], Tensor]:
        num_first = len(feed.token_ids) - feed.num_logits + 1
        fed, following, rows = list[int](), list(feed.token_ids[:num_first]), []
        for index in range(feed.num_logits):
            self.num_steps += 1
            start = feed.start + len(fed)
            rows.append(self.feed_one(SequenceInput(feed.session_id, start, following, 1))[0])
            fed += following
            scores = rows[-1] if noise is None else rows[-1] * scale + noise[index]
            following = [int(scores.argmax())]
            if stop is not None and stop.value:
                break
        return fed, torch.stack(rows)

    def feed_one(self, feed: SequenceInput) -> Tensor:
        cache = self.caches.setdefault(
            feed.session_id, SessionCache(torch.zeros(1, 1, CAPACITY, 1, dtype=torch.float64))
        )
        assert feed.start <= len(cache.tokens)
        cache.truncate(feed.start, feed.num_kept)
        assert len(cache.tree_tokens) == feed.num_kept
        num_chain = len(feed.token_ids) - len(feed.parents or ())
        rows = []
        for index, token_id in enumerate(feed.token_ids):
            if index < num_chain:
                cache.tokens.append(token_id)
                slot = len(cache.tokens) - 1
                path = cache.tokens
            else:
                cache.tree_tokens.append(token_id)
                cache.tree_parents.append(feed.parents[index - num_chain])
                slot = cache.num_slots - 1
                last = len(cache.tree_tokens) - 1
                path = path_tokens(cache.tokens, cache.tree_tokens, cache.tree_parents, last)
            # What attention would see: the marks of all the slots on the path must be in place.
            before, expected = self._slots(cache, slot)[:-1], marks(path)
            assert cache.data[0, 0, :, 0][before].tolist() == expected[:-1]
            cache.data[0, 0, slot, 0] = expected[-1]
            rows.append(self.row(path))
        return torch.stack(rows)[len(rows) - feed.num_logits :].clone()

    def row(self, path: Sequence[int]) -> Tensor:
        return self.table[path[-2] if len(path) > 1 else 0, path[-1]]

    def _slots(self, cache: SessionCache, slot: int) -> list[int]:
        node, slots = slot - len(cache.tokens), []
        while node >= 0:
            slots.append(len(cache.tokens) + node)
            node = cache.tree_parents[node]
        return [*range(len(cache.tokens) + node + 1), *slots[::-1]]

    def length(self, session_id: str) -> int:
        return len(self.tokens(session_id))

    def tokens(self, session_id: str) -> Sequence[int]:
        cache = self.caches.get(session_id)
        return () if cache is None else cache.tokens

    def num_nodes(self, session_id: str) -> int:
        cache = self.caches.get(session_id)
        return 0 if cache is None else len(cache.tree_tokens)

    def truncate(self, session_id: str, length: int, num_nodes: int = 0) -> None:
        if session_id in self.caches:
            self.caches[session_id].truncate(length, num_nodes)

    def keep_path(self, session_id: str, base: int, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        self.caches[session_id].keep_path(base, path, keep)

    def has_room(self, session_id: str, num_tokens: int) -> bool:
        return self.has_space

    def share(self, session_id: str, salt: str | None) -> None:
        assert salt is None, "no test here shares caches"

    def stats(self) -> None:
        """No test here asks for them."""

    def forget(self, session_id: str) -> None:
        """Nothing is retained."""

    def release(self, session_id: str) -> None:
        self.caches.pop(session_id, None)


def marks(path: Sequence[int]) -> list[float]:
    """Return a number for each beginning of a path that identifies it."""
    found, last = [], 0
    for token_id in path:
        last = hash((last, token_id)) % 2**50
        found.append(float(last))
    return found


class ChainingEngine(TableEngine):
    """A table engine that feeds several tokens of a chain in one call, as the compiled kernel does."""

    can_chain = True


class ParallelEngine(TableEngine):
    """A table engine with a mask token: logits depend most on the position, which masks do not hide."""

    mask_token = VOCAB

    def row(self, path: Sequence[int]) -> Tensor:
        num_masks = 0
        while path[-1 - num_masks] == VOCAB:
            num_masks += 1
        *_, before, last = [0, *path[: len(path) - num_masks]]
        assert VOCAB not in (before, last), "a mask was kept in the cache"
        return self.table[len(path) % VOCAB, 0] + 0.2 * self.table[(before + num_masks) % VOCAB, last]


class Drafter:
    """A scheduler and its sessions in one thread; `ahead_rows` of 0 is no draft-ahead."""

    def __init__(
        self, engine: TableEngine, ahead_rows: int = 0, max_batch_tokens: int = 64, **ahead: float
    ) -> None:
        self.engine: Any = engine
        self.scheduler = DraftScheduler(engine, Limits(max_batch_tokens, 16), ahead_rows=ahead_rows, **ahead)

    def task(
        self,
        tokens: Sequence[int],
        gamma: int,
        *,
        max_nodes: int = 0,
        drafted_depth: int = 0,
        method: VerificationMethod = VerificationMethod.COUPLED,
        params: SamplingParams | None = None,
        prompt_length: int = 4,
        eos: tuple[int, ...] = (),
        session_id: str = "s",
    ) -> ProposeTask:
        params = params or SamplingParams(seed=5)
        session = Session(tokens[:prompt_length], params, method, eos, name=session_id)
        session.tokens = list(tokens)
        return draft_task(session, gamma, shape=Shape(gamma, max_nodes, drafted_depth))

    def ask(self, tokens: Sequence[int], gamma: int, **fields: Any) -> Reply:
        """Ask for one proposal and step until it is there."""
        task = self.task(tokens, gamma, **fields)
        self.scheduler.submit([task])
        reply = answer(self.scheduler, task)
        if isinstance(reply.outcome, GammarayError):
            raise reply.outcome
        return reply

    def idle(self, num_steps: int = 10**6) -> int:
        """Draft ahead for this many forwards, or until it is done; return their number."""
        done = 0
        while done < num_steps and self.scheduler.has_work:
            assert self.scheduler.step() == []
            done += 1
        return done


def outcome(
    engine: TableEngine,
    context: list[int],
    proposal: Proposal,
    rng: random.Random,
    params: SamplingParams,
    method: VerificationMethod = VerificationMethod.COUPLED,
) -> list[int]:
    """Return a possible outcome of verification: a path of the proposal and one more token."""
    tokens: list[int] = []
    node = -1
    while True:
        children = {
            proposal.token_ids[index]: index
            for index in range(len(proposal))
            if (index - 1 if proposal.parents is None else proposal.parents[index]) == node
        }
        scores = engine.row(context + tokens)
        if params.temperature > 0 and method is VerificationMethod.COUPLED:
            noise = Noise(params.seed or 0, 0, VOCAB).gumbel(len(context) + len(tokens), 1)[0]
            scores = (scores / params.temperature + noise) / draw_temperature(params.temperature)
        (token,) = rng.choices(range(VOCAB), scores.softmax(-1).tolist())
        if children and method is not VerificationMethod.COUPLED and rng.random() < 0.7:
            token = next(iter(children))
        tokens.append(token)
        if token not in children:
            return tokens
        node = children[token]
