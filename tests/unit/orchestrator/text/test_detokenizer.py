"""Streaming text: whole characters only, stop strings across tokens, special tokens without text."""

import random

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from orchestrator.text.detokenizer import Detokenizer
from orchestrator.text.tokenizer import Tokenizer, served_name
from tests.support.cycle_helpers import EOS, LetterTokenizer

TEXTS = ["def f(x):\n    return 'x'\n", "日本語 ñ", "🎉👩‍👩‍👧 ok", "a\u0301 \u200d\ufeff", "\t\x00\r\n"]


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA_PIECES = ["<unk>", "<s>", "</s>", *BYTES, "▁", "▁the", "cat", "s", "▁日"]


class ByteTokenizer(LetterTokenizer):
    """Token i is byte i; token 256 is special."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == 256


@pytest.fixture(scope="module")
def demo():
    return Tokenizer(resolve_model("demo"))


def save(tmp_path, tokenizer: FastTokenizer, **special) -> Tokenizer:
    """Return our wrapper over a tokenizer, by way of the files a model has."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(tmp_path)
    LlamaConfig(vocab_size=300, max_position_embeddings=64, eos_token_id=[1, 2]).save_pretrained(tmp_path)
    return Tokenizer(str(tmp_path))


@pytest.fixture
def llama_like(tmp_path):
    """Like Llama 2: "▁" for spaces, <0x..> for bytes that no token has."""
    vocab = {piece: i for i, piece in enumerate(LLAMA_PIECES)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return save(tmp_path, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def word_piece(tmp_path):
    """A tokenizer whose tokens read differently by their neighbours."""
    words = ["[UNK]", "un", "##believ", "##able", "cat", "##s", ",", "the"]
    tokenizer = FastTokenizer(models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return save(tmp_path, tokenizer, unk_token="[UNK]")


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
    the, cat, s = map(LLAMA_PIECES.index, ("▁the", "cat", "s"))
    byte = [3 + b for b in "é".encode()]
    assert llama_like.has_exact_bytes
    pieces, _ = stream(Detokenizer(llama_like, [the]), [the, *byte, cat, s])
    assert pieces == [" the", "", "é", "cat", "s", ""]
    assert llama_like.token_bytes(byte[0]) == b"\xc3"


def test_detokenizer_word_piece_reads_tokens_in_context(word_piece):
    assert not word_piece.has_exact_bytes
    token_ids = [1, 2, 3, 4, 5, 7, 4]
    pieces, _ = stream(Detokenizer(word_piece, [7]), token_ids)
    assert "".join(pieces) == " unbelievable cats the cat"
    assert pieces[:3] == [" un", "believ", "able"]


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
    assert demo.encode("<|end|><|end|>a")[:2] == [bos, demo.encode("a")[0]]


def test_tokenizer_has_the_bounds_and_end_tokens_of_its_model(demo, llama_like, tmp_path):
    assert (demo.vocab_size, demo.max_context, demo.eos_token_ids) == (2048, 2048, frozenset({0}))
    assert llama_like.eos_token_ids == frozenset({1, 2})
    assert served_name("demo") == "demo"
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name("org/model") == "org/model"


def test_tokenizer_says_what_is_missing_or_invalid(demo, llama_like):
    with pytest.raises(InvalidArgumentError, match="/nowhere/at-all"):
        Tokenizer("/nowhere/at-all")
    with pytest.raises(InvalidArgumentError, match="invalid Unicode"):
        demo.encode("a\ud800b")
    with pytest.raises(InvalidArgumentError, match="no chat template"):
        llama_like.render_chat([{"role": "user", "content": "hello"}])
