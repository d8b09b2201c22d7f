"""Drafts with another vocabulary than their target's: the tokens are those of plain decoding."""

import asyncio
import random

import pytest

from benchmarks.pair_loop import Ask, Pair
from gammaray.config import DraftSettings
from gammaray.errors import InvalidArgumentError
from gammaray.types import SamplingParams, VerificationMethod
from services.draft_worker.worker import DraftWorker
from services.engine.loader import load_engine
from services.process.fingerprints import vocab_sha256
from services.vocabulary.translation import load_translation
from tests.support.engine_helpers import draft_scheduler, target_scheduler, tiny_model
from tests.support.vocabulary_helpers import CODE, byte_fallback, byte_level, renumbered, single_bytes
from tests.support.workers.workers_helpers import propose_block, running, spec_message

pytestmark = pytest.mark.integration

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
CONTEXT = 256
PROMPTS = ["def fib(n):\n    return", "class Stack:\n    def push(self, item):", "é <|end|> 🙂 x"]
GAMMAS = (1, 4)


def saved(tokenizer, path, seed, **changed):
    size = len(tokenizer)
    folder = tiny_model("llama", path, seed=seed, vocab_size=size, max_position_embeddings=CONTEXT, **changed)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    tokenizer = byte_level(CODE, 330, specials=("<|im_end|>", "<|end|>"))
    return saved(tokenizer, tmp_path_factory.mktemp("target"), 0)


@pytest.fixture(scope="module", params=["byte level", "byte fallback"])
def draft(request, tmp_path_factory):
    byte = request.param == "byte level"
    tokenizer = byte_level(CODE, 280) if byte else byte_fallback(["▁def", "▁self", "return"])
    return saved(tokenizer, tmp_path_factory.mktemp("draft"), 1)


def pair_of(target, draft):
    target_engine, draft_engine = load_engine(str(target)), load_engine(str(draft))
    translation = load_translation(str(draft), draft_engine.vocab_size, str(target))
    return Pair(target_scheduler(target_engine), draft_scheduler(draft_engine, translation))


@pytest.mark.parametrize(
    ("method", "temperature"),
    [(COUPLED, 0.0), (COUPLED, 1.0), (NAIVE, 0.0), (NAIVE, 1.0), (REJECTION, 0.0), (BLOCK, 0.0)],
)
def test_tokens_are_those_of_plain_decoding(target, draft, method, temperature):
    (target_folder, tokenizer), (draft_folder, _) = target, draft
    pair = pair_of(target_folder, draft_folder)
    num_drafted = 0
    for seed, prompt in enumerate(PROMPTS):
        ask = Ask(tuple(tokenizer(prompt)["input_ids"]), 40, temperature, seed, (), method)
        plain = pair.complete(ask, 0)
        for gamma in GAMMAS:
            text = pair.complete(ask, gamma)
            assert text.token_ids == plain.token_ids
            num_drafted += sum(cycle.num_drafted for cycle in text.cycles)
    assert num_drafted > 0
    assert pair.draft.engine.stats().num_sessions == 0


@pytest.fixture(scope="module")
def same_model(tmp_path_factory):
    """A target with a token per byte, and itself with other ids as its draft."""
    path = tmp_path_factory.mktemp("same")
    order = [*random.Random(1).sample(range(256), 256), 256]
    folder, tokenizer = saved(single_bytes(range(256)), path / "target", 5)
    copy = renumbered(folder, path / "draft", order)
    single_bytes(order[:256]).save_pretrained(copy)
    return folder, copy, tokenizer


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_that_is_the_target_under_other_ids_is_always_accepted(same_model, temperature):
    """Positions, noise and the rollback of the draft's cache are right in every cycle, or a token fails."""
    target, draft, tokenizer = same_model
    pair = pair_of(target, draft)
    for seed, prompt in enumerate(PROMPTS[:2]):
        ask = Ask(tuple(tokenizer(prompt)["input_ids"]), 64, temperature, seed, ())
        text = pair.complete(ask, 4)
        assert text.token_ids == pair.complete(ask, 0).token_ids
        assert all(cycle.num_accepted == cycle.num_tested for cycle in text.cycles)
        assert sum(cycle.num_accepted for cycle in text.cycles) > 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_context_past_the_drafts_is_not_drafted(target, tmp_path, temperature):
    target_folder, tokenizer = target
    short = byte_level("", 256)
    draft = tiny_model("llama", tmp_path, seed=2, vocab_size=len(short), max_position_embeddings=64)
    short.save_pretrained(draft)
    pair = pair_of(target_folder, draft)
    ask = Ask(tuple(tokenizer(CODE[:60])["input_ids"]), 80, temperature, 0, ())
    text = pair.complete(ask, 4)
    assert text.token_ids == pair.complete(ask, 0).token_ids
    assert text.cycles[0].num_drafted > 0
    assert text.cycles[-2].num_drafted == 0


async def test_worker_serves_the_targets_vocabulary(target, draft):
    (target_folder, tokenizer), (draft_folder, _) = target, draft
    async with running("draft", draft_folder, target=str(target_folder)) as (link, _):
        info = await link.info()
        assert (info.vocab_size, info.vocab_sha256) == (len(tokenizer), vocab_sha256(str(target_folder)))
        prompt = tokenizer(PROMPTS[1])["input_ids"]
        warm = spec_message(SamplingParams(temperature=1.0, seed=4), prompt_length=len(prompt))
        result = await link.ask(propose_block(prompt, 5, spec=warm))
        assert len(result.proposal.token_ids) == 5
        assert max(result.proposal.token_ids) < len(tokenizer)
        (letter,) = tokenizer("z")["input_ids"]
        masks = SamplingParams(temperature=1.0, seed=4, allowed_token_ids=(letter,))
        only = spec_message(masks, prompt_length=len(prompt))
        result = await link.ask(propose_block(prompt, 3, session_id="masked", spec=only))
        assert list(result.proposal.token_ids) == [letter] * 3


def test_worker_refuses_a_target_that_it_cannot_draft_for(target, tmp_path):
    byte_fallback(["αβγ"], num_bytes=0).save_pretrained(tmp_path)
    settings = DraftSettings(model=str(target[0]), target=str(tmp_path))
    with pytest.raises(InvalidArgumentError) as caught:
        asyncio.run(DraftWorker(settings).start())
    assert caught.value.field == "target"
