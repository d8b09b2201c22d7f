"""Refuses the parts of Lark that cannot be served, as llguidance itself reads the text of a grammar.

Refused are intersections `&` and complements `~`, which llguidance compiles without limits; tokens by number
`<[...]>`, over which it rolls back to a wrong state (llguidance issue 364); and the attribute `temperature`,
which a matcher ignores. llguidance has no function that returns its parse, so it is asked by a *probe*: the
text with each refused part replaced by one that its lexer or parser rejects with an error of known form. No
text is compiled, as the probe ends in a statement that is wrong, and no error but that of this statement lets
a grammar pass.

Why the probe finds each refused part, whatever the text is:

- llguidance lexes the whole text before it parses, and parses all of it before it compiles.
- `;` begins no lexeme of Lark. Inside the lexemes that may contain it (strings, expressions, comments, JSON
  and special tokens such as `<|end|>`), `&`, `~` and `;` are members of the same character classes, and so
  is `<` in all but special tokens, which contain none. So the lexer is in the same state at each character
  of both texts, up to the first operator or token by number outside such a lexeme. There it fails at `;`.
- `~` before a number stays. It only repeats, since no complement has a number after it.
- The name of an attribute is a lexeme. The probe has another name of the same length instead, which is no
  attribute of llguidance. A rule of that name is renamed in all places.

`tests/unit/gammaray/grammar/test_syntax.py` compares all of this with llguidance.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gammaray.checks import check_encodable
from gammaray.errors import InvalidArgumentError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

REFUSED_ATTRIBUTES = ("temperature",)
"""Attributes of rules that a completion cannot follow."""

_UNKNOWN = {f"{name[:-1]}_": name for name in REFUSED_ATTRIBUTES}
_REJECTED = ";"
_END = "\n%declare\n"  # names are missing
_PASSED = "Expected at least one name after %declare"

_PART = re.compile(r"&|~(?![ \t]{0,64}[0-9])|<(?=\[)")
_ERROR = re.compile(r"(\d{1,9})\((\d{1,9})\): (lexer error|Unknown attribute: (\w{1,99})|.{0,500})")

_GRAMMAR = "strings, expressions, alternatives and repetition"


def check_syntax(grammar: str, tokenizer: LLTokenizer) -> None:
    """Raise InvalidArgumentError if a grammar has a part that cannot be served, in time linear in its length.

    A grammar without the character of such a part passes even if it is wrong: to compile it fails. One that
    has it and cannot be parsed is refused.
    """
    check_encodable("grammar", grammar)
    probe = _PART.sub(_REJECTED, grammar)
    for unknown, name in _UNKNOWN.items():
        probe = probe.replace(name, unknown)
    if probe == grammar:
        return
    error = _parse_error(probe + _END, tokenizer)
    found = _ERROR.match(error)
    what = error[:500] if found is None else found[3]
    if what == _PASSED or what.startswith(f"{_PASSED} "):
        return
    if found is not None and found[4] in _UNKNOWN:
        name = _UNKNOWN[found[4]]
        raise InvalidArgumentError(
            "grammar", f"the attribute {name} of a rule", f"rules without {name}, a setting of requests"
        )
    if found is not None and what == "lexer error":
        _refuse_part(grammar, int(found[1]), int(found[2]))
    raise InvalidArgumentError(
        "grammar", error.partition("\n")[0][:500], "a grammar that llguidance can parse"
    )


def _parse_error(text: str, tokenizer: LLTokenizer) -> str:
    from llguidance import LLMatcher  # clients do not need it

    # Not `validate_grammar`, which holds the GIL.
    error: str = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(text), log_level=0).get_error()
    return error


def _refuse_part(grammar: str, line: int, column: int) -> None:
    """Raise the error of the refused part at a place, if one is there. The column counts bytes."""
    start = 0
    for _ in range(line - 1):
        start = grammar.find("\n", start) + 1
    end = grammar.find("\n", start)
    bytes_of_line = grammar[start : None if end < 0 else end].encode()
    rest = bytes_of_line[column - 1 : column + 63].decode("utf-8", "replace")
    if rest[:1] in ("&", "~"):
        raise InvalidArgumentError("grammar", f"the operator {rest[0]}", _GRAMMAR)
    if rest[:2] == "<[":
        raise InvalidArgumentError("grammar", rest.partition(">")[0] + ">", "no tokens by number")
