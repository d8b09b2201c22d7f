"""Tokens that the engine draws itself: the verdicts are those of the verification by logits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gammaray.blocks import Verdict
from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.core.model import load_model
from services.engine.graph_engine import GraphEngine
from services.engine.native.library import Kernel
from services.engine.sampling import noise
from services.scheduling.planning import Limits
from services.scheduling.tasks import SessionSpec, VerifyTask
from services.target.scheduler import TargetScheduler
from tests.support.engine_helpers import random_tokens, tiny_model

COUPLED, REJECTION = VerificationMethod.COUPLED, VerificationMethod.REJECTION
CHAIN = Proposal((5, 6, 7))
TREE = Proposal((5, 6, 7, 8, 9), (-1, -1, 0, 1, 3))
DRAWN = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1e-300})
NOT_DRAWN = (
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "banned_token_ids": (3, 4)},
)
_names = map(str, itertools.count())


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> GraphEngine:
    directory = tiny_model("llama", tmp_path_factory.mktemp("target"), head_dim=16)
    return GraphEngine.build(load_model(str(directory), device="cpu"))


@pytest.fixture
def by_logits(tmp_path: Path) -> GraphEngine:
    """The same weights; its tokens are never drawn by the engine."""
    directory = tiny_model("llama", tmp_path, head_dim=16)
    engine = GraphEngine.build(load_model(str(directory), device="cpu"))
    engine.runner.draws_on_device = False
    return engine


def block(
    text: list[int], proposal: Proposal = CHAIN, method: VerificationMethod = COUPLED, **params: Any
) -> VerifyTask:
    top = params.pop("num_top_logprobs", None)
    return VerifyTask(
        request_id=0,
        session_id=next(_names),
        epoch=1,
        base_position=len(text),
        context_start=0,
        context=text,
        spec=SessionSpec(SamplingParams(**{"seed": 2**63 + 5, **params}), method, len(text), ()),
        deadline=math.inf,
        deliver=lambda task, reply: None,
        proposal=proposal,
        num_top_logprobs=top,
    )


def answers(engine: GraphEngine, *tasks: VerifyTask) -> list[Any]:
    """Verify blocks in one batch, and free what they cached."""
    scheduler = TargetScheduler(engine, Limits(1024, 256))
    scheduler.submit(tasks)
    replies = {}
    while scheduler.has_work:
        replies |= {task.session_id: reply.outcome for task, reply in scheduler.step()}
    for task in tasks:
        engine.release(task.session_id)
    return [replies[task.session_id] for task in tasks]


@contextmanager
def drawing(engine: GraphEngine) -> Iterator[list[list[Any]]]:
    """Record the draws of each step."""
    steps: list[list[Any]] = []
    step = engine.step

    def recorded(feeds: Any, within: Any = None, draws: Any = ()) -> Any:
        steps.append(list(draws))
        return step(feeds, within, draws)

    engine.step = recorded  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del engine.step


def cases() -> list[VerifyTask]:
    """Blocks of which the engine draws the tokens, and of which it does not."""
    found = []
    for index, params in enumerate((*DRAWN, *NOT_DRAWN)):
        text = random_tokens(6 + index, seed=index)
        found += [block(text, proposal, seed=index, **params) for proposal in (CHAIN, TREE, Proposal())]
    return found


def test_verdicts_of_one_batch_are_those_by_logits(engine: GraphEngine, by_logits: GraphEngine) -> None:
    tasks = cases()
    with drawing(engine) as steps:
        got = answers(engine, *tasks)
    expected = answers(by_logits, *cases())
    assert all(isinstance(one, Verdict) for one in expected)
    assert got == expected
    (draws,) = steps
    is_drawn = [draw is not None for draw in draws]
    assert is_drawn == [True] * 3 * len(DRAWN) + [False] * 3 * len(NOT_DRAWN)


def test_good_proposals_are_accepted(engine: GraphEngine) -> None:
    """Chains and trees of the target's own tokens, among wrong ones."""
    for params in DRAWN:
        text, own = random_tokens(9, seed=2), []
        for _ in range(5):
            (verdict,) = answers(engine, block([*text, *own], Proposal(), **params))
            own.append(verdict.next_token_id)
        wrong = [(token + 1) % 97 for token in own]
        chain = Proposal((own[0], own[1], wrong[2], own[3]))
        tree = Proposal((wrong[0], own[0], own[1], wrong[1], own[2]), (-1, -1, 1, 1, 2))
        first, second = answers(engine, block(text, chain, **params), block(text, tree, **params))
        assert (first.accepted_path, first.next_token_id) == ((0, 1), own[2])
        assert (second.accepted_path, second.next_token_id) == ((1, 2, 4), own[3])


@pytest.mark.parametrize(
    "params",
    [{"method": REJECTION, "temperature": 1.0}, {"num_top_logprobs": 3, "temperature": 0.0}],
    ids=["rejection", "log-probabilities"],
)
def test_what_needs_more_than_the_best_token_gets_logits(
    engine: GraphEngine, by_logits: GraphEngine, params: dict[str, Any]
) -> None:
    text = random_tokens(8, seed=1)
    with drawing(engine) as steps:
        got = answers(engine, block(text, **params))
    assert steps == [[None]]
    assert got == answers(by_logits, block(text, **params))


def test_tree_with_a_method_for_chains_is_refused_as_by_logits(engine: GraphEngine) -> None:
    (error,) = answers(engine, block(random_tokens(5, seed=1), TREE, REJECTION, temperature=0.0))
    assert isinstance(error, InvalidArgumentError)
    assert "a chain with rejection verification" in str(error)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(tmp_path: Path, temperature: float, bad: float) -> None:
    loaded = load_model(
        str(tiny_model("llama", tmp_path, head_dim=16, tie_word_embeddings=False)), device="cpu"
    )
    engine = GraphEngine.build(loaded)
    engine.runner.model.head[11, 0] = bad
    (error,) = answers(engine, block(random_tokens(5, seed=1), temperature=temperature))
    assert isinstance(error, InternalError)
    assert "not finite numbers" in str(error)


def test_wrong_noise_is_caught(
    engine: GraphEngine, by_logits: GraphEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above detects a draw at another position."""
    kernels = type(engine.runner.kernels)
    right = kernels.stripes

    def late(self: Any, logits: Any, tables: Any, sharpness: Any, out: Any) -> None:
        tables.position.add_(1)
        right(self, logits, tables, sharpness, out)

    monkeypatch.setattr(kernels, "stripes", late)
    got, expected = answers(engine, *cases()), answers(by_logits, *cases())
    assert [a == b for a, b in zip(got, expected, strict=True)].count(False) >= 4


class Launches(TorchFunctionMode):
    """Counts the calls of torch outside of the model's own forward: on a device each is a launch or more."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.is_forward = 0, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.is_forward
        return func(*args, **(kwargs or {}))


def num_launches(engine: GraphEngine, sessions: int) -> int:
    tasks = [block(random_tokens(8, seed=seed), seed=seed, temperature=1.0) for seed in range(sessions)]
    launches, forward = Launches(), engine.runner.forward

    def quiet(batch: Any) -> torch.Tensor:
        launches.is_forward = True
        try:
            return forward(batch)
        finally:
            launches.is_forward = False

    engine.runner.forward = quiet  # type: ignore[method-assign]
    try:
        with launches:
            assert all(isinstance(one, Verdict) for one in answers(engine, *tasks))
    finally:
        del engine.runner.forward
    return launches.count


def test_launches_do_not_grow_with_the_sessions(
    engine: GraphEngine, by_logits: GraphEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verification by logits takes launches for each session, above all for its noise, as on a GPU."""
    monkeypatch.setattr(noise, "load_kernel", lambda: Kernel(None, "", ""))
    drawn, plain = ((num_launches(one, 9) - num_launches(one, 1)) / 8 for one in (engine, by_logits))
    assert drawn <= 7  # on the host: a new session's pages, and its row of their table
    assert plain > 100
