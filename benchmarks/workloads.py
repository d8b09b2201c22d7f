"""Named sets of prompts, taken from Python's standard library and help topics.

The prompts are from files that the demo pair was not trained on."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path
from pydoc_data.topics import topics

_SKIPPED = {
    "site-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3", "encodings", "pydoc_data",
}  # fmt: skip
_MIN_CHARACTERS = 200


@dataclass(frozen=True)
class Document:
    """One source file or help topic; the demo pair was never trained on `is_held_out` ones."""

    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether the hash of the name falls into the held-out 5 %."""
        digest = hashlib.md5(self.name.encode(), usedforsecurity=False).hexdigest()
        return int(digest, 16) % 20 == 0


def documents(limit: int | None = None) -> list[Document]:
    """Return the documents: files sorted by path, then topics; at most `limit` when given."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[Document] = []
    for path in sorted(root.rglob("*.py"), key=str):
        inner = path.relative_to(root)
        if not _SKIPPED.intersection(inner.parts[:-1]):
            text = path.read_text(encoding="utf-8", errors="replace")
            if len(text) >= _MIN_CHARACTERS:
                found.append(Document(f"/{inner.as_posix()}", text))
    found += [Document(f"topics/{name}", text) for name, text in topics.items()]
    return found[:limit]


_MAX_CHARACTERS = 600
_MAX_PER_DOCUMENT = 6
_CONTEXT_LINES = 12
_REPEATED_LINES = 4


def prompts(name: str, count: int) -> list[str]:
    """Return the first `count` prompts of a workload, see `tasks`."""
    return [text for _, text in tasks(name, count)]


def tasks(name: str, count: int) -> list[tuple[str, str]]:
    """Return the first `count` prompts of a workload, each after the name of its category.

    Raises:
        ValueError: An unknown workload, or more prompts than it has.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload: got {name!r}, allowed: {', '.join(WORKLOADS)}")
    found = _workload(name)
    if not 1 <= count <= len(found):
        raise ValueError(f"prompts of {name}: got {count}, allowed: 1 to {len(found)}")
    return list(found[:count])


@cache
def _workload(name: str) -> tuple[tuple[str, str], ...]:
    if name == "mixed":
        sets = (_workload(part) for part in _MAKERS)
        return tuple(p for p in chain.from_iterable(zip_longest(*sets)) if p is not None)
    # Prompts are taken from the documents in turn, so that a short list already has many sources.
    per_document = [_spread(_MAKERS[name](document)) for document in _held_out()]
    rounds = chain.from_iterable(zip_longest(*per_document))
    return tuple((name, p) for p in dict.fromkeys(p for p in rounds if p is not None))


@cache
def _held_out() -> tuple[Document, ...]:
    held = [document for document in documents() if document.is_held_out]
    return tuple(sorted(held, key=lambda d: hashlib.sha256(d.name.encode()).digest()))


def _spread(found: Iterator[str]) -> list[str]:
    """Return at most `_MAX_PER_DOCUMENT` of the prompts, evenly spaced."""
    usable = [text for text in found if len(text) <= _MAX_CHARACTERS]
    step = max(1, len(usable) / _MAX_PER_DOCUMENT)
    return [usable[int(i * step)] for i in range(min(len(usable), _MAX_PER_DOCUMENT))]


def _code(document: Document) -> Iterator[str]:
    """Yield up to twelve lines before a function's one-line signature, and the signature."""
    if document.name.startswith("topics/"):
        return
    lines = document.text.splitlines()
    for node in ast.walk(ast.parse(document.text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno > 1:
            head = lines[node.lineno - 1]
            if head.endswith(":") and node.body[0].lineno > node.lineno:
                start = max(0, node.lineno - 1 - _CONTEXT_LINES)
                yield "\n".join([*lines[start : node.lineno - 1], head]).lstrip("\n")


def _prose(document: Document) -> Iterator[str]:
    """Yield the first twenty to forty words of a longer paragraph."""
    for text in _texts(document):
        for paragraph in re.split(r"\n\s*\n", text):
            words = list(re.finditer(r"\S+", paragraph))
            if len(words) >= 30 and ">>>" not in paragraph and "::" not in paragraph:
                yield paragraph[: words[min(39, len(words) * 2 // 3)].end()].lstrip()


def _texts(document: Document) -> Iterator[str]:
    if document.name.startswith("topics/"):
        yield document.text
        return
    for node in ast.walk(ast.parse(document.text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=True) or ""


def _repetitive(document: Document) -> Iterator[str]:
    """Yield four consecutive lines of the same shape, and the fifth up to the end of its first word."""
    lines = document.text.splitlines()
    shapes = [_shape(line) for line in lines]
    end = 0
    for i in range(len(lines) - _REPEATED_LINES):
        following = i + _REPEATED_LINES
        if i < end or not shapes[i] or len(set(shapes[i : following + 1])) > 1:
            continue
        end = following + 1
        first_word = re.match(r"\W*\w+", lines[following])
        assert first_word is not None, "a shape begins with a word"
        yield "\n".join([*lines[i:following], first_word.group()])


def _shape(line: str) -> str:
    """Return indentation, the text between the first two words, and the last character; "" for one word."""
    found = re.match(r"(\s*)\w+([^\w\s]+|\s+[^\w\s]+\s*|\s+)\w.*?(\W?)$", line)
    return "w".join(found.groups()) if found and found.group(2).strip() else ""


_MAKERS = {"code": _code, "prose": _prose, "repetitive": _repetitive}
WORKLOADS = (*_MAKERS, "mixed")
"""Names that `prompts` knows."""
