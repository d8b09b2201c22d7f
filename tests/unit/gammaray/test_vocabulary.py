"""Vocabularies by bytes: what each token stands for, tokens of any bytes, and tokens of a continuation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray.vocabulary import Vocabulary
from tests.support.vocabulary_helpers import CODE, byte_fallback, byte_level, word_pieces

BYTE_LEVEL = Vocabulary(byte_level(CODE, 300))
BYTE_FALLBACK = Vocabulary(byte_fallback(["▁the", "▁def", "return", "é", "aé"]))
BOTH = pytest.mark.parametrize("vocabulary", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])

PIECES = st.one_of(
    st.binary(max_size=4),
    st.sampled_from(["é", "日本", "🙂", "  ", "<|end|>", "</s>", "return"]).map(str.encode),
)
BYTES = st.lists(PIECES, max_size=8).map(b"".join)


@BOTH
@given(data=BYTES)
def test_tokens_of_any_bytes_have_these_bytes(vocabulary, data):
    token_ids = vocabulary.encode(data)
    assert vocabulary.bytes_of(token_ids) == data
    assert not set(token_ids) & set(vocabulary.specials.values())


def test_text_is_tokenised_as_the_tokenizer_does():
    tokenizer = byte_level(CODE, 300)
    assert Vocabulary(tokenizer).encode(CODE.encode()) == tokenizer(CODE)["input_ids"]
    pieces = byte_fallback(["▁the", "▁def"], bos=False)
    # The tokenizer puts a space before a text; a continuation must not begin with one.
    assert Vocabulary(pieces).encode(b" the def") == pieces("the def")["input_ids"]
    assert Vocabulary(pieces).encode(b"the")[0] != pieces("the")["input_ids"][0]


def test_a_character_has_its_own_token_before_a_byte():
    assert BYTE_FALLBACK.id_of(b"t") not in range(3, 3 + 256)
    assert BYTE_FALLBACK.spellings[3 + ord("t")] == b"t"
    assert BYTE_FALLBACK.id_of(b"\xff") == 3 + 255


def test_special_tokens_have_no_bytes_and_begin_a_text_where_the_tokenizer_adds_them():
    assert BYTE_LEVEL.specials == {"<|end|>": 0}
    assert BYTE_LEVEL.spellings[0] == b""
    assert (BYTE_LEVEL.eos_token_id, BYTE_LEVEL.prefix) == (0, [])
    assert (BYTE_FALLBACK.eos_token_id, BYTE_FALLBACK.prefix) == (2, [1])
    assert BYTE_LEVEL.bytes_of([0, 10**6]) == b""


def test_bytes_that_no_token_has_are_left_out():
    lacking = Vocabulary(byte_fallback(["▁a"], num_bytes=0x80))
    assert lacking.bytes_of(lacking.encode("a\xe9a é\n".encode() + b"\xff")) == b"aa \n"


def test_tokens_that_are_no_bytes_are_refused():
    with pytest.raises(ValueError, match="neither byte-level nor SentencePiece"):
        Vocabulary(word_pieces())
