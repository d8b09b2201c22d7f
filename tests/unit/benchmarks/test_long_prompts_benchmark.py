"""Long prompts: their lengths, and which results fail."""

import pytest
from transformers import AutoConfig

from benchmarks.long_prompts import (
    MAX_ASKED,
    SPARE_SLOTS,
    cache_mb,
    is_good,
    long_prompt,
    measure_length,
)
from gammaray.demo_pair import DEMO_PAIR, resolve_model
from gammaray.errors import DeadlineExceededError
from gammaray.types import Chunk, EmittedToken, SpeculationSummary, TokenOrigin, Usage
from orchestrator.text.tokenizer import Tokenizer

OPTIONS = {"max_tokens": 4, "temperature": 0.0, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model(DEMO_PAIR, "target"))


class Scripted:
    """A client whose target fails so often first, and whose draft proposes from the third request on.

    A completion has four tokens, which differ at the gammas `wrong`.
    """

    def __init__(self, failures=0, wrong=()):
        self.failures, self.wrong, self.num_asked = failures, wrong, 0

    async def generate(self, prompt, *, timeout_s, **options):
        gamma = "adaptive" if options["gamma"].fixed is None else str(options["gamma"].fixed)
        if self.failures:
            self.failures -= 1
            raise DeadlineExceededError("the prompt is long")
        self.num_asked += 1
        first = 9 if gamma in self.wrong else 5
        drafts = int(gamma != "0" and self.num_asked > 2)
        yield Chunk("", "")
        yield Chunk("", "ab", (EmittedToken(first, TokenOrigin.BONUS),))
        figures = {"cycles": 4, "tokens_per_cycle": 1.0, "alpha": None, "acceptance_rate": None}
        times = dict.fromkeys(("gamma_mean", "draft_ms", "verify_ms", "other_ms", "total_ms"), 0.0)
        summary = SpeculationSummary(
            **figures, **times, accepted_lengths=(), speedup_estimate=None, model_cycles=drafts
        )
        tokens = tuple(EmittedToken(token, TokenOrigin.BONUS) for token in (6, 7, 8))
        yield Chunk("", "cd", tokens, usage=Usage(len(prompt), 4, 0, 0, 3), summary=summary)


def result_of(point):
    return {"points": [point], "agent": {"rows": []}}


@pytest.mark.parametrize("length", [64, 1500])
def test_prompt_has_exactly_so_many_tokens_and_a_longer_one_has_more_source(tokenizer, length):
    prompt, longer = long_prompt(tokenizer, length), long_prompt(tokenizer, length + 100)
    assert (len(prompt), len(longer)) == (length, length + 100)
    assert longer[: length - 32] == prompt[: length - 32]
    assert tokenizer.decode(longer).endswith("Write the next function.")


async def test_other_tokens_or_a_length_that_failed_are_no_success():
    point = await measure_length(Scripted(wrong=("adaptive",)), (1, 2), ("0", "adaptive"), OPTIONS)
    assert [row["is_equal"] for row in point["rows"]] == [True, True, False]
    assert is_good(result_of(await measure_length(Scripted(failures=1), (1, 2), ("0", "2"), OPTIONS)))
    assert not is_good(result_of(point))
    assert not is_good(result_of({"length": 2, "error": "no room"}))
    with pytest.raises(DeadlineExceededError):
        await measure_length(Scripted(failures=MAX_ASKED), (1, 2), ("0",), OPTIONS)


def test_cache_is_that_of_the_model_that_needs_most():
    config = AutoConfig.from_pretrained(resolve_model(DEMO_PAIR, "target"))
    small = AutoConfig.from_pretrained(resolve_model(DEMO_PAIR, "draft"))
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert cache_mb([config], 2**20 - SPARE_SLOTS) == token_bytes
    assert cache_mb([small, config], 4096) == max(cache_mb([small], 4096), cache_mb([config], 4096))
