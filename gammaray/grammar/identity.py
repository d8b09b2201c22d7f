"""Identity of the grammar library of a process: with the same one, processes compute the same masks.

Versions of llguidance compile some grammars to other masks, or not at all, and vLLM needs an older one than
other workers may have. A version says too much, as most change no mask, so the identity has the digest of the
masks along a walk through each of a fixed set of grammars.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import GrammarCompiler, GrammarState
from gammaray.vocabulary import BYTE_OF

# Bytes, and tokens that cross the end of a string or are parts of escapes; ids from 1 on.
_LONGER = ('", "', '": ', '{"', '"}', '"a', 'a"', "\\u", "\\u00", "\\ud83d", "00", "61", "1,", "é", "ab")
_TOKENS = (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in _LONGER))
_SIGNS = frozenset(at for at, token in enumerate(_TOKENS, 1) if set(token) & set(b'"\\{}[],: u0'))

_SPELLING = {byte: character for character, byte in BYTE_OF.items()}

_STYLE = '"x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ", %s}'
_PLAIN = _STYLE % '"lenient": false'
_ESCAPES = _STYLE % '"json_allow_general_unicode_escapes": true'

_SCHEMAS = (
    '"type": "string"',
    '"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]',
    '"type": "object", "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {}',
    '"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": false, "minProperties": 1',
    '"type": "object", "properties": {}, "additionalProperties": {"type": "boolean"}, "maxProperties": 2',
    '"type": "number", "minimum": -1.5, "exclusiveMaximum": 99.9',
    '"type": "integer", "minimum": -12, "maximum": 120, "multipleOf": 3',
    '"type": "string", "pattern": "^(\\\\w|é)+[^a]b*$", "maxLength": 6',
    '"type": "string", "minLength": 2, "maxLength": 3',
    '"type": "string", "format": "date-time"',
    '"type": "string", "format": "email"',
    '"type": "array", "items": {"enum": ["a", "\\u00e9", null, 1.5]}, "minItems": 1, "maxItems": 3',
    '"type": "array", "prefixItems": [{"type": "null"}, true], "items": {"type": "integer"}',
    '"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}], "$defs": {"n": {"items": {"$ref": "#"}}}',
    '"allOf": [{"minimum": 3}, {"type": "integer", "maximum": 33}]',
    '"oneOf": [{"type": "integer", "maximum": 0}, {"type": "string", "maxLength": 2}]',
)
_LARK = (
    'start: "a" start "b" | ""',
    'start: item+ "."\nitem: "x" ~ 2..3 | NUMBER\nNUMBER: /[0-9]{1,3}/',
    'start: item{2,3}\nitem: "x" | "y"',
    "start: /(?i:ab|\\p{Lu}\\d)+[^\\x00-\\x20]/",
    'start: WORD (" " WORD)*\nWORD: /[a-z]+/\n%ignore /[ \\t]+/',
    'start: "a" t "b"\nt[lazy]: /.*\\n/',
    'start: t "b"\nt[suffix="x"]: /[a-z]*/',
    'start: "say " <eos> | "\\u00e9"',
    'start: a\na: "x" | a a | ""',
    'start: "<" "/" /[^<]{0,5}/ ">" (";" | "&" | "~")?',
)

GRAMMARS = (
    *(f"start: %json {{{schema}, {_PLAIN}}}" for schema in _SCHEMAS),
    *(f"start: %json {{{schema}, {_ESCAPES}}}" for schema in _SCHEMAS[:3]),
    *_LARK,
)
"""What is compiled; a change of it changes the identity of each library."""

NUM_STEPS = 24


@cache
def grammar_identity() -> str:
    """Return `digest/llguidance-version`; the digest alone says whether masks are the same."""
    return f"{masks_sha256(byte_compiler())}/llguidance-{version('llguidance')}"


def digest_of(identity: str) -> str:
    """Return the part of an identity that says which masks there are."""
    return identity.partition("/")[0]


def byte_compiler() -> GrammarCompiler:
    """Return a compiler for a vocabulary of an end of sequence, bytes, and a few longer tokens."""
    end, vocabulary = "<eos>", {token: token_id for token_id, token in enumerate(map(_spelt, _TOKENS), 1)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": end, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {end: 0} | vocabulary, "merges": []},
    }
    return GrammarCompiler(json.dumps(tokenizer), len(vocabulary) + 1, [0])


def walk(compiler: GrammarCompiler, grammar: str, seed: int, num_steps: int) -> Iterator[tuple[int, bytes]]:
    """Yield a token, -1 at first, and the mask after it, to the end of a text or the last step.

    The tokens are a function of the masks and the seed. A grammar that is refused, or exceeds the limits, has
    no further mask.
    """
    try:
        state, token_id = compiler.begin(grammar), -1
        for step in range(num_steps):
            mask = _mask(state)
            yield token_id, mask
            possible = [at for at in range(1, 8 * len(mask)) if mask[at >> 3] >> (at & 7) & 1]
            if not possible:
                return
            drawn = hashlib.sha256(f"{seed} {step}".encode()).digest()
            # Signs of the syntax half of the time: most texts are strings else, which never end.
            signs = [token for token in possible if token in _SIGNS] if drawn[0] % 2 else []
            token_id = (signs or possible)[int.from_bytes(drawn[1:5], "little") % len(signs or possible)]
            state.extend([token_id])
    except InvalidArgumentError:
        return


def _mask(state: GrammarState) -> bytes:
    mask = state.masks([()])[0]
    return mask or b""


def masks_sha256(compiler: GrammarCompiler) -> str:
    digest = hashlib.sha256()
    for grammar in GRAMMARS:
        digest.update(b"\n")
        for token_id, mask in walk(compiler, grammar, 0, NUM_STEPS):
            digest.update(b"%d " % token_id + mask)
    return digest.hexdigest()


def _spelt(token: bytes) -> str:
    """Return a token as byte-level tokenizers write it."""
    return "".join(_SPELLING[byte] for byte in token)
