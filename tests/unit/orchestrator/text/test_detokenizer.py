"""Streaming text, stop strings and special tokens; texts that are too long are refused at a bounded cost."""

import json
import random
from unittest.mock import Mock

import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, TokenizersBackend

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.types import GenerationRequest, SamplingParams
from orchestrator.sessions.lifecycle import ContextLengthError, open_session
from orchestrator.text.detokenizer import Detokenizer
from orchestrator.text.tokenizer import Tokenizer, plain_backend, served_name, spelling_of
from tests.support.cycle_helpers import EOS, LetterTokenizer
from tests.support.own_process import run_code
from tests.support.vocabulary_helpers import byte_fallback, word_pieces

LLAMA_LIKE = byte_fallback(["▁the", "cat", "s", "▁日"], bos=False)
TEXTS = ["def f(x):\n    return 'x'\n", "日本語 ñ", "🎉👩‍👩‍👧 ok", "a\u0301 \u200d\ufeff", "\t\x00\r\n"]


class ByteTokenizer(LetterTokenizer):
    """Token i is byte i; token 256 is special."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == 256


@pytest.fixture(scope="module")
def demo():
    return Tokenizer(resolve_model("demo"))


def save(tmp_path, tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return our wrapper over a tokenizer, by way of the files a model has."""
    tokenizer.save_pretrained(tmp_path)
    LlamaConfig(vocab_size=300, max_position_embeddings=64, eos_token_id=[1, 2]).save_pretrained(tmp_path)
    return Tokenizer(str(tmp_path))


@pytest.fixture
def llama_like(tmp_path):
    """Like Llama 2: "▁" for spaces, <0x..> for bytes that no token has."""
    return save(tmp_path, LLAMA_LIKE)


def stream(detokenizer: Detokenizer, token_ids) -> tuple[list[str], bool]:
    """Push tokens until a stop string; return the pieces and whether there was one."""
    pieces, stopped = [], False
    for token_id in token_ids:
        stopped = detokenizer.push(token_id)
        pieces.append(detokenizer.take(final=False))
        if stopped:
            break
    pieces.append(detokenizer.take(final=True))
    return pieces, stopped


@pytest.mark.parametrize("text", TEXTS)
def test_detokenizer_joins_characters_split_over_tokens(text):
    pieces, _ = stream(Detokenizer(ByteTokenizer(), []), text.encode())
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert sum(len(piece) for piece in pieces if piece) == len(text)


def test_detokenizer_cut_and_invalid_characters_are_replaced_and_hold_nothing_back():
    pieces, _ = stream(Detokenizer(ByteTokenizer(), []), "aé".encode()[:-1])
    assert pieces == ["a", "", "\ufffd"]
    pieces, _ = stream(Detokenizer(ByteTokenizer(), []), b"\xff\xc3ab")
    assert ("".join(pieces), pieces[-1]) == (b"\xff\xc3ab".decode(errors="replace"), "")


@pytest.mark.parametrize("text", TEXTS)
def test_detokenizer_demo_pair_equals_decoding_at_once(demo, text):
    token_ids = demo.encode(text)
    pieces, _ = stream(Detokenizer(demo, []), token_ids)
    assert "".join(pieces) == demo.decode(token_ids) == text
    assert b"".join(map(demo.token_bytes, token_ids)).decode() == text
    token_ids = random.Random(text).choices(range(demo.vocab_size), k=300)
    assert "".join(stream(Detokenizer(demo, []), token_ids)[0]) == demo.decode(token_ids)


def test_detokenizer_byte_fallback_keeps_the_leading_space_of_a_completion(llama_like):
    the, cat, s = LLAMA_LIKE.convert_tokens_to_ids(["▁the", "cat", "s"])
    byte = [3 + b for b in "é".encode()]
    assert llama_like.has_exact_bytes
    pieces, _ = stream(Detokenizer(llama_like, [the]), [the, *byte, cat, s])
    assert pieces == [" the", "", "é", "cat", "s", ""]
    assert llama_like.token_bytes(byte[0]) == b"\xc3"


def test_detokenizer_word_piece_reads_tokens_in_context(tmp_path):
    word_piece = save(tmp_path, word_pieces())  # its tokens read differently by their neighbours
    assert not word_piece.has_exact_bytes
    pieces, _ = stream(Detokenizer(word_piece, [1]), [1, 2, 2, 1, 1, 2])
    assert "".join(pieces) == " abb a ab"
    assert pieces[:3] == [" a", "b", "b"]


def test_detokenizer_special_tokens_have_no_text(demo):
    (eos,) = demo.eos_token_ids
    token_ids = demo.encode("a b")
    with_special = [eos, *token_ids[:1], eos, *token_ids[1:], eos]
    assert "".join(stream(Detokenizer(demo, []), with_special)[0]) == "a b"
    assert demo.token_bytes(eos) == b"<|end|>"


def test_detokenizer_stop_string_inside_one_token_cuts_the_token():
    class Words(LetterTokenizer):
        def token_bytes(self, token_id):
            return [b"foo. Bar", b" baz"][token_id]

    pieces, stopped = stream(Detokenizer(Words(), [], [". "]), [0, 1])
    assert (pieces, stopped) == (["foo", ""], True)


def test_detokenizer_stop_strings_equal_searching_the_whole_text():
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(20))
        stop = ["".join(rng.choice("ab") for _ in range(rng.randint(3, 7))) for _ in range(2)]
        ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
        first_end = min((end for end, _ in ends), default=None)
        wanted = text[: min(start for end, start in ends if end == first_end)] if ends else text
        pieces, stopped = stream(Detokenizer(LetterTokenizer(), [], stop), [ord(c) - 97 for c in text])
        assert ("".join(pieces), stopped) == (wanted, bool(ends))


def test_detokenizer_special_token_inside_a_stop_string_does_not_break_it():
    pieces, stopped = stream(Detokenizer(LetterTokenizer(), [], ["bc"]), [0, 1, EOS, 2])
    assert ("".join(pieces), stopped) == ("a", True)


def test_tokenizer_begin_of_sequence_is_never_doubled(demo):
    (bos,) = demo.eos_token_ids
    assert demo.encode("<|end|><|end|>a")[:2] == (bos, demo.encode("a")[0])


def test_tokenizer_has_the_bounds_and_end_tokens_of_its_model(demo, llama_like, tmp_path):
    assert (demo.vocab_size, demo.max_context, demo.eos_token_ids) == (2048, 2048, frozenset({0}))
    assert llama_like.eos_token_ids == frozenset({1, 2})
    assert served_name("demo") == "demo"
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name("org/model") == "org/model"


def test_tokenizer_says_what_is_missing_or_invalid(demo, llama_like):
    with pytest.raises(InvalidArgumentError, match="/nowhere/at-all"):
        Tokenizer("/nowhere/at-all")
    with pytest.raises(InvalidArgumentError, match="unpaired surrogate"):
        demo.encode("a\ud800b")
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        llama_like.render_chat([{"role": "user", "content": "hello"}])


MAX_BYTES_PER_BYTE = 512
"""docs/security.md"""

PATTERNS = (
    *("a", "/x/ ", "\\/", " ", "\n", "a?", "a\n", "1a", "é", "🙂"),
    *("e\u0301", "<|im_end|>", "\x04", "\ud55c"),
)


@pytest.fixture
def original():
    return AutoTokenizer.from_pretrained(resolve_model("demo"))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_least_number_of_tokens_is_not_above_the_number(demo, pattern):
    dice = random.Random(pattern)
    for _ in range(50):
        text = "".join(dice.choice([pattern, *PATTERNS]) for _ in range(dice.randrange(200)))
        assert demo.min_tokens(text) <= len(demo.encode(text, is_start=False))
    assert demo.min_tokens(pattern * 10_000) >= 10_000 * len(pattern.encode()) // 37


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("is_start", [True, False])
def test_token_ids_are_those_of_transformers(demo, original, pattern, is_start):
    text = f"def f(x):\n{pattern * 50}<|im_end|> {pattern} x"
    expected = original(text, add_special_tokens=is_start)["input_ids"]
    assert list(demo.encode(text, is_start=is_start)) == expected


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


async def test_prompt_that_cannot_fit_is_refused_without_tokenising(demo, monkeypatch):
    monkeypatch.setattr(Tokenizer, "encode", Mock(side_effect=AssertionError("tokenised")))
    request = GenerationRequest("/x/ " * 2**18, sampling=SamplingParams(seed=1))
    with pytest.raises(ContextLengthError, match="prompt: got at least 28340 tokens, allowed: at most 2047"):
        await open_session(request, demo, 2048)
    request = GenerationRequest("x" * 1000 * 37, sampling=SamplingParams(seed=1))
    with pytest.raises(ContextLengthError, match="at least 2048 tokens"):
        await open_session(request, demo, 2048, before=(5,) * 1048)


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
@pytest.mark.nightly
@pytest.mark.parametrize("pattern", ["/x/ ", "🙂"])
def test_tokenising_takes_bounded_memory(pattern):
    assert float(run_code(PROBE, pattern).stdout) < MAX_BYTES_PER_BYTE
