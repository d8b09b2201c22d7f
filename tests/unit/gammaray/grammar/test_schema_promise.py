"""Every completion that ends matches its schema: random schemas, and random walks."""

import json
import random
import re
from decimal import Context, Decimal, InvalidOperation, localcontext
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenizers.pre_tokenizers import ByteLevel

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import GrammarCompiler
from gammaray.grammar.texts import json_schema_grammar
from tests.support.processing_helpers import small_compiler
from tests.support.schema_helpers import HARD_SCHEMAS

# Every byte, and tokens that go over the ends of keys or are parts of escapes.
LONGER = (
    *('",Ġ"', '":Ġ', '"a', 'a"', '{"a":Ġ', '{"', ',Ġ"a":Ġ', '"b"'),
    *("\\u", "\\u00", "\\u0061", "61", "0061", '\\"', '"}', '1,Ġ"a"'),
)
TOKENS = ("<eos>", *sorted(ByteLevel.alphabet()), *LONGER)
KEY_SIGNS = ('"', "\\", "a", "b", "u", "0", "6", "1", ",", "}", "]", "Ġ", *LONGER)


@cache
def compiler() -> GrammarCompiler:
    return small_compiler(TOKENS, len(TOKENS), (0,))


@cache
def pieces() -> list[bytes]:
    signs = [byte for byte in range(256) if chr(byte) in ByteLevel.alphabet()]
    others = [byte for byte in range(256) if byte not in signs]
    bytes_of = {chr(byte): byte for byte in signs} | {chr(256 + at): byte for at, byte in enumerate(others)}
    return [b"", *(bytes(bytes_of[sign] for sign in token) for token in TOKENS[1:])]


def exact(text: str) -> Any:
    """Return a JSON text with exact numbers, and the last of equal keys, as parsers do."""

    def number(text: str) -> Decimal | float:
        try:
            return Decimal(text)
        except InvalidOperation:  # an exponent beyond those of decimals
            return float(text)

    return json.loads(text, parse_float=number)


def completion(grammar: str, rng: random.Random) -> str | None:
    """Return a text that a grammar lets end, None if it is longer than eighty tokens."""
    state, token_ids = compiler().begin(grammar), []
    liked = [TOKENS.index(sign) for sign in KEY_SIGNS]
    for _ in range(80):
        mask = int.from_bytes(state.masks([()])[0] or b"", "little")
        assert mask, f"nothing can follow {b''.join(pieces()[one] for one in token_ids)!r}"
        possible = [token_id for token_id in range(len(TOKENS)) if mask >> token_id & 1]
        preferred = [token_id for token_id in liked if mask >> token_id & 1]
        token_id = 0 if possible[0] == 0 and rng.random() < 0.7 else rng.choice(preferred or possible)
        if rng.random() < 0.1:
            token_id = rng.choice(possible)
        if token_id == 0:
            return b"".join(pieces()[one] for one in token_ids).decode()
        state.extend([token_id])
        token_ids.append(token_id)
    return None


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(HARD_SCHEMAS, st.integers(0, 2**32))
def test_every_completion_of_a_hard_schema_matches_it(schema, seed):
    try:
        grammar = json_schema_grammar(schema)
        compiler().check(grammar)
    except InvalidArgumentError:
        return
    validator = Draft202012Validator(exact(json.dumps(schema)))
    texts = [completion(grammar, random.Random(seed + number)) for number in range(4)]
    with localcontext(Context(prec=200)):  # longer than any number of a text
        for text in texts:
            # llguidance takes a listed key for another one if it is spelt with an escape.
            if text is not None and not re.search(r"\\u00[2-7]", text):
                validator.validate(exact(text))
