"""The identity of the grammar library tells apart what computes other masks, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from gammaray.grammar import identity
from gammaray.grammar.identity import GRAMMARS, byte_compiler, digest_of, grammar_identity, walk
from gammaray.grammar.matcher import GrammarCompiler
from tests.support.grammar_masks import difference
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


def test_walks_reach_beyond_the_first_mask():
    compiler = byte_compiler()
    walks = [list(walk(compiler, grammar, 0, identity.NUM_STEPS)) for grammar in GRAMMARS]
    assert sum(len(walked) > 1 for walked in walks) >= len(GRAMMARS) - 1, "1.7 refuses one"
    assert sum(len(walked) == identity.NUM_STEPS for walked in walks) > len(GRAMMARS) // 3
    assert all(any(mask) for walked in walks for _, mask in walked[:-1])


def test_one_mask_changes_the_digest(monkeypatch):
    own = identity._digest(byte_compiler())
    real = identity._mask
    seen = 0

    def mask(state):
        nonlocal seen
        seen += 1
        found = real(state)
        return found if seen != 100 else bytes([found[0] ^ 1]) + found[1:]

    monkeypatch.setattr(identity, "_mask", mask)
    assert identity._digest(byte_compiler()) != own
    assert seen > 100


@since_1_9
def test_library_without_escapes_of_printable_characters_has_another_digest(monkeypatch):
    own = identity._digest(byte_compiler())
    real = GrammarCompiler.__init__

    def older(self, *args):
        real(self, *args)
        self._knows_escapes = False

    monkeypatch.setattr(GrammarCompiler, "__init__", older)
    assert identity._digest(byte_compiler()) != own


MASKS = [[[-1, "0600"], [1, "0200"]]]


@pytest.mark.parametrize(
    ("one", "two", "how"),
    [
        (MASKS, MASKS, "equal"),
        (MASKS, [[[-1, "0600"], [1, "0a00"]]], "masks differ"),
        (MASKS, [MASKS[0][:1]], "masks differ"),
        (MASKS, "too big", "refused by one"),
        ("a", "b", "refused by both"),
        (MASKS, None, "in one file only"),
    ],
)
def test_comparison_of_masks_tells_how_they_differ(one, two, how):
    assert difference(one, two)[0] == how
