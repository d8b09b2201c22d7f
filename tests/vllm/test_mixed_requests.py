"""Eight requests at once with a head and adapters: each has the tokens that it has alone with gamma 0."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from gammaray.blocks import Shape
from gammaray.types import SamplingParams
from tests.support import vllm_head_helpers as heads
from tests.support.adapter_helpers import make_adapter
from tests.support.processing_helpers import GRAMMAR
from tests.support.vllm_helpers import Session, complete, end, proposer
from tests.vllm.conftest import start_vllm

EOS = (0, 3)
ADAPTERS = ("", "sql", "legal", "words")
NUM_REQUESTS, NUM_TOKENS = 8, 16
BATCHES = (1, 2)
FIELDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "presence_penalty": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "frequency_penalty": 0.5, "min_p": 0.02},
    {"temperature": 1},
    {"temperature": 1, "top_k": 30, "logit_bias": {8: 1.0, 9: -100.0}},
)

Block = Callable[[Session], dict[str, Any]]


@pytest.fixture(scope="module", params=[heads.sharing_eagle3, heads.eagle, heads.itself])
def served(request, tmp_path_factory):
    """vLLM's scheduler with a head or a draft model, and what each request of the batches has alone."""
    folder = tmp_path_factory.mktemp("mixed")
    target = heads.random_target(folder / "target")
    for seed, name in enumerate(ADAPTERS[1:]):
        make_adapter(folder / name, target, seed, has_words=name == "words")
    adapters = {name: str(folder / name) for name in ADAPTERS[1:]}
    head = str(request.param(folder / "head", target))
    scheduler = start_vllm(target, head=head, adapters=adapters, cache_budget_bytes=16 << 20, max_proposal=16)
    plain = {seed: [run(scheduler, [one])[0] for one in requests(seed)] for seed in BATCHES}
    yield scheduler, plain
    scheduler.close()


def run(scheduler: Any, sessions: Sequence[Session], block: Block = lambda session: {}) -> list[list[int]]:
    found = complete(scheduler, sessions, NUM_TOKENS, block)
    end(scheduler, *sessions)
    return found


def requests(seed: int) -> list[Session]:
    """Return eight sessions, among them three choices of one prompt."""
    rng = random.Random(seed)
    made: list[Session] = []
    while len(made) < NUM_REQUESTS:
        prompt = [rng.randrange(4, 97) for _ in range(rng.choice((3, 20, 140)))]
        fields = {**rng.choice(FIELDS), "seed": rng.randrange(1000)}
        if rng.random() < 0.3:
            fields["grammar"] = GRAMMAR
        adapter, salt = rng.choice(ADAPTERS), rng.choice((None, "tenant"))
        for index in range(1 if made else 3):
            params = SamplingParams(**fields, sample_index=index)
            made.append(Session(prompt, params, eos_token_ids=EOS, salt=salt, adapter=adapter))
    return made


def blocks(way: str, expected: Mapping[str, Sequence[int]], rng: random.Random) -> Block:
    """Return blocks that the head proposes for, a draft with one wrong token in four, or one of both."""
    draft = proposer(expected, rng)

    def block(session: Session) -> dict[str, Any]:
        if way == "head" or (way == "either" and rng.random() < 0.5):
            return {"head": Shape(rng.choice((0, 1, 2, 4, 8)))}
        return {"proposal": draft(session)}

    return block


@pytest.mark.parametrize("way", ["head", "draft", "either"])
def test_requests_at_once_have_the_tokens_that_each_has_alone(served, way):
    scheduler, plain = served
    for seed in BATCHES:
        sessions = requests(seed)
        expected = {one.name: tokens for one, tokens in zip(sessions, plain[seed], strict=True)}
        found = run(scheduler, sessions, blocks(way, expected, random.Random(seed)))
        for one, tokens, wanted in zip(sessions, found, plain[seed], strict=True):
            assert tokens == wanted, (seed, one.adapter, one.params)
