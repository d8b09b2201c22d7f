"""The texts of prompts and of the demo pair's corpus: Python's own standard library and help topics."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

__all__ = ["Document", "documents"]

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
        """Whether the hash of the name falls in the held-out twentieth."""
        digest = hashlib.md5(self.name.encode(), usedforsecurity=False).hexdigest()
        return int(digest, 16) % 20 == 0


def documents(limit: int | None = None) -> list[Document]:
    """Return the documents: files in order of their path, then topics; at most `limit` when given."""
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
