"""Texts that are too long are refused before they are tokenised, and tokenising takes bounded memory."""

import json
import random
import subprocess
import sys

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import AutoTokenizer, TokenizersBackend

from gammaray.demo_pair import resolve_model
from gammaray.types import GenerationRequest, SamplingParams
from orchestrator.sessions.lifecycle import ContextLengthError, open_session
from orchestrator.text.tokenizer import Tokenizer, plain_backend, spelling_of

MAX_BYTES_PER_BYTE = 512
"""docs/security.md"""

PATTERNS = (
    *("a", "/x/ ", "\\/", " ", "\n", "a?", "a\n", "1a", "é", "🙂"),
    *("e\u0301", "<|im_end|>", "\x04", "\ud55c"),
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(resolve_model("demo"))


@pytest.fixture
def original():
    """The tokenizer of `transformers`."""
    return AutoTokenizer.from_pretrained(resolve_model("demo"))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_least_number_of_tokens_is_not_above_the_number(tokenizer, pattern):
    dice = random.Random(pattern)
    for _ in range(50):
        text = "".join(dice.choice([pattern, *PATTERNS]) for _ in range(dice.randrange(200)))
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, is_start=False))
    assert tokenizer.min_tokens(pattern * 10_000) >= 10_000 * len(pattern.encode()) // 37


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("is_start", [True, False])
def test_token_ids_are_those_of_transformers(tokenizer, original, pattern, is_start):
    text = f"def f(x):\n{pattern * 50}<|im_end|> {pattern} x"
    expected = original(text, add_special_tokens=is_start)["input_ids"]
    assert tokenizer.encode(text, is_start=is_start) == expected


def test_options_of_a_tokenizer_file_do_not_change_its_token_ids(original):
    original.backend_tokenizer.enable_truncation(3)
    original.backend_tokenizer.enable_padding()
    assert len(plain_backend(original).encode("a b c d e f g h").ids) > 3


class Changed(TokenizersBackend):
    """A tokenizer that adds something of its own to what its backend encodes."""

    def _encode_plus(self, *_, **__):
        return {"input_ids": [7]}


def test_tokenizers_with_code_of_their_own_are_asked_themselves(original):
    assert plain_backend(original) is not None
    assert plain_backend(Changed(tokenizer_object=original.backend_tokenizer)) is None


REMOVING = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
CHANGES = {
    "normaliser": lambda one: setattr(one, "normalizer", normalizers.NFC()),
    "added token": lambda one: one.add_special_tokens([AddedToken("<mask>", lstrip=True)]),
    "other splits": lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
    "removing split": lambda one: setattr(one, "pre_tokenizer", pre_tokenizers.Sequence(REMOVING)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tokenizers_that_may_drop_text_have_no_least_number(original, name):
    assert spelling_of(original.backend_tokenizer) == (37, b"")
    CHANGES[name](original.backend_tokenizer)
    assert spelling_of(original.backend_tokenizer) is None


def test_bytes_that_no_token_spells_do_not_count(original):
    definition = json.loads(original.backend_tokenizer.to_str())
    vocabulary, merges = definition["model"]["vocab"], definition["model"]["merges"]
    for name in [token for token in vocabulary if "q" in token]:
        del vocabulary[name]
    definition["model"]["merges"] = [pair for pair in merges if "q" not in "".join(pair)]
    lacking = type(original.backend_tokenizer).from_str(json.dumps(definition))
    assert len(lacking.encode("qqqq").ids) == 0
    assert spelling_of(lacking) == (37, b"q")


async def test_prompt_that_cannot_fit_is_refused_without_tokenising(tokenizer, monkeypatch):
    def encode(*_, **__):
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    request = GenerationRequest("/x/ " * 2**18, sampling=SamplingParams(seed=1))
    with pytest.raises(ContextLengthError, match="prompt: got at least 28340 tokens, allowed: at most 2047"):
        await open_session(request, tokenizer, 2048)
    request = GenerationRequest("x" * 1000 * 37, sampling=SamplingParams(seed=1))
    with pytest.raises(ContextLengthError, match="at least 2048 tokens"):
        await open_session(request, tokenizer, 2048, before=(5,) * 1048)


PROBE = """
import sys, threading, time
import psutil
from gammaray.demo_pair import resolve_model
from orchestrator.text.tokenizer import Tokenizer
tokenizer = Tokenizer(resolve_model("demo"))
tokenizer.encode("warm up")
process, has_ended = psutil.Process(), threading.Event()
before = peak = process.memory_info().rss
def watch():
    global peak
    while not has_ended.wait(0.002):
        peak = max(peak, process.memory_info().rss)
watcher = threading.Thread(target=watch)
watcher.start()
pattern = sys.argv[1]
tokenizer.encode((pattern * 2**20).encode()[: 2**20].decode(errors="ignore"))
has_ended.set()
watcher.join()
print((peak - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["/x/ ", "🙂"])
def test_tokenising_takes_bounded_memory(pattern):
    run = subprocess.run(
        [sys.executable, "-c", PROBE, pattern], capture_output=True, text=True, timeout=120, check=True
    )
    assert float(run.stdout) < MAX_BYTES_PER_BYTE
