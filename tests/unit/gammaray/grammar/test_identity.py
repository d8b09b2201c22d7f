"""The identity of the grammar library tells apart what computes other masks, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from gammaray.grammar.identity import (
    byte_compiler,
    digest_of,
    grammar_identity,
    masks_sha256,
)
from tests.support.grammar_versions import since_1_9


def test_identity_is_a_digest_and_the_library():
    assert re.fullmatch(r"[0-9a-f]{64}/llguidance-1\.\d+\.\d+", grammar_identity())
    assert digest_of(grammar_identity()) == grammar_identity()[:64]


def test_identity_is_the_same_in_another_process():
    command = "from gammaray.grammar.identity import grammar_identity; print(grammar_identity())"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    answer = subprocess.run(
        [sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == grammar_identity()


class Other:
    """A compiler that gives one mask another bit.

    Args:
        at: Number of that mask.
    """

    def __init__(self, at: int) -> None:
        self.left, self.compiler = at, byte_compiler()

    def begin(self, grammar):
        self.state = self.compiler.begin(grammar)
        return self

    def masks(self, paths):
        (mask,) = self.state.masks(paths)
        self.left -= 1
        return [mask if self.left else bytes([mask[0] ^ 1]) + mask[1:]]

    def extend(self, token_ids):
        self.state.extend(token_ids)


def test_one_mask_changes_the_digest():
    others = [Other(at) for at in (1, 100, 10**9)]
    assert [masks_sha256(one) == masks_sha256(byte_compiler()) for one in others] == [False, False, True]


class WithoutEscapes:
    """A compiler as that of llguidance 1.7."""

    def begin(self, grammar):
        return byte_compiler().begin(
            grammar.replace('"json_allow_general_unicode_escapes": true', '"lenient": false')
        )


@since_1_9
def test_library_without_escapes_of_printable_characters_has_another_digest():
    assert masks_sha256(WithoutEscapes()) != masks_sha256(byte_compiler())
