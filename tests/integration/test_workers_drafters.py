"""Parallel drafts, drafters that share weights with their target, and early exits on draft workers."""

import json

import pytest
import torch

from gammaray.errors import InvalidArgumentError
from gammaray.types import SamplingParams
from tests.support.drafter_helpers import make_drafter
from tests.support.engine_helpers import plain_model, random_tokens, tiny_model
from tests.support.vocabulary_helpers import CODE, byte_level
from tests.support.workers.workers_helpers import (
    accepted_in_plain_tokens,
    propose_block,
    running,
    spec_message,
)

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "max_position_embeddings": 256}
PROMPT = random_tokens(12, seed=3)
DRAFTERS = {
    "parallel": {"pard_token": 4},
    "parallel-shared": {"pard_token": 10**6, "mask_embedding": True, "shares_embedding": True},
    "parallel-reduced": {"pard_token": 4, "draft_vocab_size": 200, "shares_embedding": True},
    "reduced": {"draft_vocab_size": 200},
    "early-exit:2": None,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    tokenizer = byte_level(CODE, 300)
    path = tmp_path_factory.mktemp("target")
    directory = tiny_model("llama", path, seed=1, vocab_size=len(tokenizer), **SIZES)
    tokenizer.save_pretrained(directory)
    model = plain_model(directory)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)  # the shared noise decides, so that masks' rows are accepted, too
    model.save_pretrained(directory)
    return directory


def draft_ahead_to_the_end(scheduler):
    while scheduler.lookahead.has_work:
        scheduler.step()


async def held_tokens(worker, session_id):
    def held(scheduler):
        engine = scheduler.engine
        return list(engine.tokens(session_id)), engine.num_nodes(session_id)

    return await worker.engine.call(held)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", DRAFTERS)
async def test_tokens_are_those_of_plain_decoding(target, tmp_path, kind, temperature):
    fields = DRAFTERS[kind]
    drafter = kind if fields is None else make_drafter(target, tmp_path / "drafter", **fields)
    async with (
        running("target", target) as (verifier, _),
        running("draft", drafter, target=str(target)) as (draft, _),
    ):
        assert (await draft.info()).vocab_size == (await verifier.info()).vocab_size
        shapes = ((1, 0), (4, 0), (7, 0), (3, 8), (6, 40))
        accepted = await accepted_in_plain_tokens(verifier, draft, PROMPT, temperature, shapes)
    # Of ten texts: the first token of each block, and draws that the noise decides.
    assert accepted > (150 if temperature else 60)


@pytest.mark.parametrize("max_nodes", [0, 12])
@pytest.mark.parametrize("choice", ["auto", "transformers"], ids=["kernel", "transformers"])
async def test_block_takes_one_forward_and_leaves_no_mask_in_the_cache(target, tmp_path, max_nodes, choice):
    drafter = make_drafter(target, tmp_path / "drafter", pard_token=4)
    settings = {"draft_ahead": False, "engine": choice}
    async with running("draft", drafter, **settings) as (draft, worker):
        spec = spec_message(SamplingParams(temperature=1.0, seed=4))
        result = await draft.ask(propose_block(PROMPT, 6, max_nodes=max_nodes, spec=spec))
        assert result.num_forwards == 1
        assert len(result.proposal.token_ids) == (max_nodes or 6)
        assert await held_tokens(worker, "s") == (PROMPT, 0)
        longer = [*PROMPT, *result.proposal.token_ids[:2], 9]
        assert (await draft.ask(propose_block(longer, 6, max_nodes=max_nodes, spec=spec))).num_forwards == 1
        assert await held_tokens(worker, "s") == (longer, 0)


async def test_block_is_drawn_from_the_rows_of_its_masks_with_the_noise_of_their_positions(target, tmp_path):
    """A chain of a parallel draft, computed here by transformers."""
    from services.engine.sampling.noise import Noise

    drafter = make_drafter(target, tmp_path / "drafter", pard_token=4)
    with torch.no_grad():
        logits = plain_model(target)(torch.tensor([[*PROMPT, 4, 4, 4, 4]])).logits[0, len(PROMPT) - 1 :]
    noise = Noise(4, 0, logits.shape[1]).gumbel(len(PROMPT), 5)
    async with running("draft", drafter) as (draft, _):
        for temperature in (0.0, 0.8):
            spec = spec_message(SamplingParams(temperature=temperature, seed=4))
            block = propose_block(PROMPT, 5, session_id=str(temperature), spec=spec)
            scores = logits if temperature == 0 else logits / temperature + noise
            assert list((await draft.ask(block)).proposal.token_ids) == scores.argmax(-1).tolist()


@pytest.mark.parametrize("max_nodes", [0, 9])
async def test_prepared_block_needs_no_forward(target, tmp_path, max_nodes):
    sure = plain_model(target)
    with torch.no_grad():
        sure.lm_head.weight.mul_(40.0)
    sure.save_pretrained(tmp_path / "sure")
    drafter = make_drafter(tmp_path / "sure", tmp_path / "drafter", pard_token=4)
    async with running("draft", drafter) as (draft, worker):
        for index, params in enumerate((SamplingParams(temperature=0.0, seed=1), SamplingParams(seed=2))):
            spec, name = spec_message(params), f"s{index}"
            longer = await draft.ask(propose_block(PROMPT, 5, session_id=f"long{index}", spec=spec))
            await draft.ask(propose_block(PROMPT, 4, max_nodes=max_nodes, session_id=name, spec=spec))
            await worker.engine.call(draft_ahead_to_the_end)
            tokens = [*PROMPT, *longer.proposal.token_ids]  # all accepted, and the draft's own bonus
            hit = await draft.ask(propose_block(tokens, 4, max_nodes=max_nodes, session_id=name, spec=spec))
            new = propose_block(tokens, 4, max_nodes=max_nodes, session_id=f"new{index}", spec=spec)
            miss = await draft.ask(new)
            assert (hit.num_forwards, miss.num_forwards) == (0, 1)
            # A new session's tree may be of another size: its confidences are calibrated by other sessions.
            assert hit.proposal == miss.proposal or max_nodes
            held, _ = await held_tokens(worker, name)
            assert held == tokens


async def test_drafter_of_another_target_is_refused(tmp_path):
    tokenizer = byte_level(CODE, 300)
    targets = [
        tiny_model("llama", tmp_path, seed=seed, vocab_size=len(tokenizer), max_position_embeddings=256)
        for seed in (1, 2)
    ]
    for directory in targets:
        tokenizer.save_pretrained(directory)
    drafter = make_drafter(
        targets[0],
        tmp_path / "d",
        pard_token=4,
        shares_embedding=True,
        mask_embedding=True,
        target=targets[0],
    )
    async with running("draft", drafter, target=str(targets[0])) as (draft, _):
        info = await draft.info()
        assert info.vocab_size == len(tokenizer)
        assert info.vocab_sha256  # the target's: the drafter has no tokenizer
    with pytest.raises(InvalidArgumentError, match="was trained for llama-1") as caught:
        async with running("draft", drafter, target=str(targets[1])):
            pass
    assert caught.value.field == "model"
    byte_level(CODE[:1000], 280).save_pretrained(targets[0])
    with pytest.raises(InvalidArgumentError, match="trained for another one"):
        async with running("draft", drafter, target=str(targets[0])):
            pass
    for text in ("{", "[]", "{}", json.dumps({"format": 2, "target": {"name": "", "fingerprint": ""}})):
        (drafter / "gammaray.json").write_text(text)
        with pytest.raises(InvalidArgumentError, match=r"gammaray\.json"):
            async with running("draft", drafter, target=str(targets[0])):
                pass


async def test_parallel_draft_of_another_vocabulary_is_refused(target, tmp_path):
    tokenizer = byte_level(CODE, 300)
    other = tiny_model("llama", tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(other)
    drafter = make_drafter(other, tmp_path / "d", pard_token=4)
    byte_level(CODE[:1000], 280).save_pretrained(drafter)
    with pytest.raises(InvalidArgumentError, match="tokens are not mapped"):
        async with running("draft", drafter, target=str(other)):
            pass
