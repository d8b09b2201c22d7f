"""Workers that break their contract, with a real orchestrator: drafters can only cost speed, targets only
their own requests."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gammaray.errors import GammarayError, InternalError
from gammaray.types import GammaPolicy, GenerationRequest, SamplingParams, VerificationMethod
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from tests.fuzz.campaign import Campaign
from tests.support.workers.scripted_workers import ScriptedWorker, scripted
from tests.support.workers.service_helpers import complete, running, tokens_of

REQUEST_TIMEOUT_S = 60.0
NUM_TOKENS = 12
VOCAB = 2048
DEMO = {"vocab_size": VOCAB, "max_context": 1024}
PROMPTS = ["def read_lines(path):\n", "import os\n\nclass Stack:\n    def ", "for i in range("]
METHODS = [VerificationMethod.COUPLED, VerificationMethod.NAIVE]
REJECTING = [VerificationMethod.REJECTION, VerificationMethod.BLOCK]
NUMBERS = [0, 1, 2, VOCAB - 1, VOCAB, 2**31, 2**32 - 1]
PARENTS = [-1, 0, 1, 2, 7, -5, 2**31 - 1, -(2**31)]
Answer = Callable[[ScriptedWorker, Any, random.Random], Any]


def _garbage_ids(worker: ScriptedWorker, block: Any, rng: random.Random) -> Any:
    ids = [rng.choice([*NUMBERS, rng.randrange(2**32)]) for _ in range(block.gamma or 3)]
    return worker.result(block, proposal=pb.Proposal(token_ids=ids))


def _wrong_parents(worker: ScriptedWorker, block: Any, rng: random.Random) -> Any:
    ids = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 8]))]
    parents = [rng.choice(PARENTS) for _ in range(rng.choice([len(ids), 1, 20]))]
    return worker.result(block, proposal=pb.Proposal(token_ids=ids, parents=parents))


def _wrong_distributions(worker: ScriptedWorker, block: Any, rng: random.Random) -> Any:
    proposal = pb.Proposal(token_ids=[1, 2, 3])
    for _ in range(rng.choice([1, 3, 5])):
        ids = [rng.choice(NUMBERS) for _ in range(rng.choice([0, 1, 5, 64]))]
        weights = [rng.choice([0, 1, 2**12, 2**32 - 1]) for _ in range(rng.choice([len(ids), 0, 3]))]
        bits = rng.choice([0, 1, 12, 24, 25, 2**32 - 1])
        proposal.draft_distributions.add(token_ids=ids, weights=weights, weight_bits=bits)
    return worker.result(block, proposal=proposal)


def _another_id(worker: ScriptedWorker, block: Any, rng: random.Random) -> Any:
    result = worker.work(block)
    result.request_id = rng.choice([0, block.request_id + 1, 2**64 - 1])
    return [result, worker.work(block)] if rng.random() < 0.5 else worker.work(block)


def _twice(worker: ScriptedWorker, block: Any, rng: random.Random) -> Any:
    first, second = worker.work(block), worker.work(block)
    second.session_id = rng.choice([block.session_id, "another", ""])
    return [first, second]


def _bad_verdict(worker: ScriptedWorker, block: Any, rng: random.Random) -> Any:
    verdict = target_pb.Verdict(
        accepted_path=[rng.choice([0, 1, 2, 5, 2**32 - 1]) for _ in range(rng.choice([0, 1, 3, 500]))],
        next_token_id=rng.choice(NUMBERS),
        next_origin=rng.choice([0, 1, 2, 3, 99]),
        num_tested=rng.choice(NUMBERS),
    )
    for _ in range(rng.choice([0, 0, 1, 5])):
        verdict.logprobs.add(
            logprob=rng.choice([float("nan"), float("inf"), -1.0]),
            top_token_ids=[rng.choice(NUMBERS)] * rng.choice([0, 1, 3]),
            top_logprobs=[float("nan")] * rng.choice([0, 1, 3]),
        )
    result = worker.result(block, verdict=verdict)
    result.timing.queue_us = result.timing.compute_us = 2**32 - 1
    result.timing.batch_size = result.timing.batch_tokens = rng.choice(NUMBERS)
    return result


POSITIONS, CODES = [0, 1, 5, 10**6, 2**32 - 1], [0, 1, 3, 4, 8, 9, 13, 14, 16, 17, 2**32 - 1]
EITHER: dict[str, Answer] = {
    "any need": lambda worker, block, rng: worker.result(
        block, need=pb.NeedTokens(position=rng.choice(POSITIONS))
    ),
    "any error": lambda worker, block, rng: worker.result(
        block, error=pb.BlockError(code=rng.choice(CODES), message=rng.choice(["", "x" * 100_000]))
    ),
    "nothing": lambda worker, block, rng: worker.result(block),
    "another id": _another_id,
    "twice": _twice,
}
DRAFTERS: dict[str, Answer] = {
    "garbage ids": _garbage_ids,
    "wrong parents": _wrong_parents,
    "wrong distributions": _wrong_distributions,
    "far too many": lambda worker, block, rng: worker.result(
        block, proposal=pb.Proposal(token_ids=[1] * 1_000_000)
    ),
    **EITHER,
}
TARGETS: dict[str, Answer] = {"bad verdict": _bad_verdict, **EITHER}


async def fuzz_with_hostile_drafter(redis: Any, target: str, campaign: Campaign) -> None:
    """Complete with a real target and a drafter that sends anything: tokens equal those without a drafter."""
    rng = campaign.dice("drafter")
    settings = {"propose_timeout_s": 0.3, "redis_prefix": "hostile-drafter"}
    async with (
        scripted("draft", **DEMO) as drafter,
        running(redis, target, drafter.address, **settings) as orchestrator,
    ):
        plain: dict[str, list[int]] = {}
        for _ in campaign.rounds():
            name = rng.choice(list(DRAFTERS))
            drafter.on_block = lambda block, name=name: DRAFTERS[name](drafter, block, rng)
            base = _request(rng, GammaPolicy(0))
            if repr(base) not in plain:
                plain[repr(base)] = await _tokens(orchestrator, base)
            rejecting = rng.random() < 0.2
            method = rng.choice(REJECTING) if rejecting else base.verification
            policy = GammaPolicy(rng.choice([1, 4, 8]), max_nodes=8)
            request = replace(base, gamma=policy, verification=method)
            got = await _tokens(orchestrator, request)
            # These depend on the drafter's distribution, which is wrong here: only counts match.
            is_fine = len(got) == NUM_TOKENS if rejecting else got == plain[repr(base)]
            wrong = None if is_fine else f"{name} changed the tokens of {request}: {got}"
            campaign.count("hostile drafter", name, wrong=wrong)


async def fuzz_with_hostile_target(redis: Any, campaign: Campaign) -> None:
    """Complete with a target that sends anything: each request ends in time, with tokens or a typed error."""
    rng = campaign.dice("target")
    settings = {"verify_timeout_s": 1.0, "worker_wait_s": 1.0, "redis_prefix": "hostile-target"}
    async with (
        scripted("target", **DEMO) as target,
        running(redis, target.address, "", **settings) as orchestrator,
    ):
        for _ in campaign.rounds():
            name = rng.choice(["bad verdict", *TARGETS])
            target.on_block = lambda block, name=name: TARGETS[name](target, block, rng)
            try:
                await _tokens(orchestrator, _request(rng, GammaPolicy(0), rng.choice([None, 0, 3])))
            except asyncio.TimeoutError:
                campaign.count("hostile target", "hang", wrong=f"{name}: no end")
            except GammarayError as error:
                # One that is ours by accident would be a bug in our own code.
                is_bug = type(error) is InternalError and "Error)" in str(error)
                wrong = f"{name}: {error}" if is_bug else None
                campaign.count("hostile target", type(error).__name__, wrong=wrong)
            else:
                campaign.count("hostile target", "completed")


def _request(rng: random.Random, gamma: GammaPolicy, num_top: int | None = None) -> GenerationRequest:
    sampling = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(4))
    fields = {"sampling": sampling, "max_tokens": NUM_TOKENS, "ignore_eos": True, "gamma": gamma}
    prompt, method = rng.choice(PROMPTS), rng.choice(METHODS)
    return GenerationRequest(prompt, verification=method, num_top_logprobs=num_top, **fields)


async def _tokens(orchestrator: Any, request: GenerationRequest) -> list[int]:
    return tokens_of(await asyncio.wait_for(complete(orchestrator, request), REQUEST_TIMEOUT_S))
