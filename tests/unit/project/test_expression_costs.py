"""Every regular expression of the product takes a time that grows like the length of its text, not faster.

`re` holds the GIL, so one expression that backtracks over a client's text stops all streams of a process. The
expressions are found in the source, and each is attacked with texts that are made of its own characters,
so that a new one is tested without an entry here.
"""

import ast
import importlib
import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from orchestrator.text.controls import any_of

ROOT = Path(__file__).parents[3]
OURS = ("gammaray", "orchestrator", "services")

METHODS = ("match", "fullmatch", "search", "split", "findall", "finditer", "sub", "subn")
"""Functions of `re` whose first argument is an expression, and methods of compiled ones."""

LENGTHS = (16, 20, 24, 28, 32, 64, 256, 1000, 8000)
"""Characters of the attacks; the short ones end before an exponential expression takes minutes."""

SLOW_S = 0.004
"""A quadratic expression takes 10 to 80 ms for the longest attack, a linear one less than 2 ms."""

MOST_GROWTH = 3.0
"""Of the CPU time when the text is doubled: 2 for a linear expression, 4 for a quadratic one."""

FORMER = (
    (r"<\[[^\]\n]*\]>", "search"),
    (r'"(?:\\.|[^"\\\x00-\x1f])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*', "sub"),
    (r"//.*@", "sub"),
    (r"got (?P<got>.*), allowed: (?P<allowed>.*)", "search"),
    (r"(a+)+b", "search"),
    (r"x(a|a)*b", "match"),
)
"""Expressions that the product had, and two that are worse."""

_CONTROLS = ("<|im_start|>", "<|im_end|>", "<|im", "<s>", "</s>", *(f"<|reserved_{n}|>" for n in range(256)))
MADE = {"orchestrator/text/controls.py": any_of(_CONTROLS, re.IGNORECASE, "(?!x)")}
"""Examples of the expressions that a module makes of data, by the module."""


@dataclass(frozen=True)
class Use:
    """An expression, and the method of `re.Pattern` by which it is used."""

    pattern: re.Pattern[str] | re.Pattern[bytes]
    method: str
    place: str


def uses_of(path: Path) -> Iterator[Use]:
    """Yield the uses in a module: those of `re` itself, and those of the names of compiled expressions."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    if not any(name.name == "re" for node in imports for name in node.names):
        return
    place = str(path.relative_to(ROOT))
    module = vars(importlib.import_module(place.removesuffix(".py").replace("/", ".")))
    named = {name: value for name, value in module.items() if isinstance(value, re.Pattern)}
    without_use, with_name = set(named), [node.value for node in tree.body if isinstance(node, ast.Assign)]
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(ast.Name("re"), "compile")) if node not in with_name:
                # Without a name in its module an expression is not tested, unless it is among these.
                yield from (Use(MADE[place], used, f"{place}:{node.lineno}") for used in ("search", "sub"))
            case ast.Call(ast.Attribute(ast.Name("re"), method), [pattern, *_], keywords) if (
                method in METHODS
            ):
                given = [pattern, *(one.value for one in keywords if one.arg == "flags")]
                made = re.compile(*(eval(ast.unparse(one), module) for one in given))
                yield Use(made, method, f"{place}:{node.lineno}")
            case ast.Call(ast.Attribute(ast.Name(name), method)) if name in named and method in METHODS:
                without_use.discard(name)
                yield Use(named[name], method, f"{place}:{node.lineno}")
    yield from (Use(named[name], method, place) for name in without_use for method in METHODS)


@cache
def every_use() -> tuple[Use, ...]:
    paths = sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))
    return tuple(use for path in paths if "_pb2" not in path.name for use in uses_of(path))


def attacks(pattern: str | bytes) -> Iterator[Callable[[int], str]]:
    """Yield makers of texts of some length: a beginning, a repeated piece, and an end that may not match."""
    pattern = pattern if isinstance(pattern, str) else pattern.decode("latin-1")
    words = [word for word in re.findall(r"[A-Za-z0-9_ ,:=/.-]{2,16}", pattern) if word.strip()][:6]
    chars = list(dict.fromkeys("a0 \n" + "".join(re.findall(r"[^?*+(){}|^$]", pattern))))[:24]
    pieces = [*words, *chars, *map("".join, itertools.permutations(chars, 2))]
    heads = ["", *words, *chars]
    for piece, tail in itertools.product(pieces, ("", "\x00")):
        yield lambda length, piece=piece, tail=tail: (piece * length)[:length] + tail
    for head, piece in itertools.product(heads, [*words, *chars]):
        yield lambda length, head=head, piece=piece: head + (piece * length)[:length] + "\x00"


def cpu_s(use: Use, text: str, tries: int = 1) -> float:
    run = getattr(use.pattern, use.method)
    given = text if isinstance(use.pattern.pattern, str) else text.encode("latin-1", "replace")
    arguments = (given[:0], given) if use.method in ("sub", "subn") else (given,)
    times = []
    for _ in range(tries):
        began = time.process_time()
        found = run(*arguments)
        if use.method == "finditer":
            list(found)
        times.append(time.process_time() - began)
    return min(times)


def slow_attack(use: Use) -> str | None:
    """Return the beginning of an attack under which the time grows faster than the text; None without one."""
    for attack in attacks(use.pattern.pattern):
        for length in LENGTHS:
            if cpu_s(use, attack(length)) < SLOW_S or cpu_s(use, attack(length), 3) < SLOW_S:
                continue
            if length < LENGTHS[-1]:
                return attack(24)
            once, twice = (cpu_s(use, attack(size * length), 3) for size in (1, 2))
            if twice > MOST_GROWTH * once:
                return attack(24)
    return None


@pytest.mark.slow
def test_the_attacks_find_expressions_that_backtrack():
    for pattern, method in FORMER:
        use = Use(re.compile(pattern, re.DOTALL | re.MULTILINE), method, "")
        assert slow_attack(use) is not None, pattern


def test_every_use_is_found():
    found = {use.place.partition(":")[0] for use in every_use()}
    assert {"gammaray/grammar/syntax.py", "orchestrator/api/http/json_text.py"} <= found
    assert len(every_use()) > 30


@pytest.mark.slow
@pytest.mark.nightly
def test_no_expression_backtracks_over_its_text():
    slow = {f"{use.place} {use.method}": slow_attack(use) for use in every_use()}
    assert {place: attack for place, attack in slow.items() if attack is not None} == {}
