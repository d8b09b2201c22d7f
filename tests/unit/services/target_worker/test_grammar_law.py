"""Structured output by enumeration: cycles under a grammar, then plain decoding, give the target's own
distribution, masked and renormalised at each token.

The masks are those of the code, for all rows of a block at once; the oracle lists the texts of the grammar.
"""

import itertools
import random

import pytest
import torch

from gammaray.blocks import Verdict
from gammaray.grammar.matcher import GrammarState
from gammaray.types import Proposal, SamplingParams, TokenOrigin, VerificationMethod
from services.engine.sampling.edits import LogitEdits
from services.verification.rules import cut_before
from tests.support.maths_helpers import (
    TinyModel,
    block_distribution,
    chain_proposals,
    completed,
    distance,
    matched_distribution,
    mixed,
    plain_distribution,
    quantised_drafter,
    rejection_distribution,
)
from tests.support.processing_helpers import AB_OR_BA, AB_TEXTS, listed, small_compiler, text_of

COUPLED, REJECTION, NAIVE, BLOCK = VerificationMethod
EXACT = 1e-12
EOS, B = 0, 2
TOKENS = ("<eos>", "a", "b", "ab", "ba", "c")
LONGEST = 6
START = (5,)


def begin() -> GrammarState:
    return small_compiler(TOKENS, len(TOKENS), (EOS,)).begin(AB_OR_BA)


def allowed(output: tuple[int, ...]) -> list[int]:
    return listed(AB_TEXTS, output, TOKENS)


class Masked(TinyModel):
    """A target under the grammar: its distributions by the list of texts, the rows of a block by the code."""

    def __init__(self, seed: int, num_committed: int = 0) -> None:
        super().__init__(len(TOKENS), seed)
        self.committed = START
        for _ in range(num_committed):
            self.committed += (allowed(self.committed[1:])[-1],)

    def logits(self, context: tuple[int, ...]) -> torch.Tensor:
        if EOS in context:  # whatever follows is dropped, so that one continuation is enough
            return torch.full((len(TOKENS),), -torch.inf).index_fill(0, torch.tensor(EOS), 0.0)
        return torch.tensor(super().distribution(context)).log()

    def distribution(self, context):
        context = tuple(context)
        output = context[len(START) :]
        logits = self.logits(context)
        possible = [] if EOS in output else allowed(output)
        if possible:
            mask = torch.full_like(logits, -torch.inf)
            mask[possible] = 0
            logits = logits + mask
        return logits.double().softmax(-1).tolist()

    def log_probs(self, contexts):
        made = self.edits()
        made.follow(list(self.committed))
        paths = [context[len(self.committed) :] for context in contexts]
        assert all(context[: len(self.committed)] == self.committed for context in contexts)
        rows = torch.stack([self.logits(context) for context in contexts])
        made.prepare(paths)
        return made.apply(rows, paths).double().log_softmax(-1)

    def edits(self) -> LogitEdits:
        params = SamplingParams(grammar=AB_OR_BA)
        return LogitEdits(params, [EOS], len(START), len(TOKENS), grammar=begin())


def cycle_of(method: VerificationMethod, target: Masked, proposal: Proposal):
    if method is REJECTION:
        return rejection_distribution(target, target.committed, proposal)
    if method is BLOCK:
        return block_distribution(target, target.committed, proposal)
    return matched_distribution(method, target, target.committed, proposal)


def assert_lossless(target: Masked, distribution) -> None:
    whole = completed(distribution, target, target.committed, LONGEST)
    expected = plain_distribution(target, target.committed, LONGEST)
    assert distance(whole, expected) < EXACT
    texts = {
        text_of((*target.committed[1:], *tokens), TOKENS).split(TOKENS[EOS])[0]
        for tokens, prob in whole.items()
        if prob > 0
    }
    assert texts <= set(AB_TEXTS)


def drafts(gamma: int, seed: int) -> list[tuple[int, ...]]:
    """Return some chains of possible tokens, and as many others: impossible ones and ends in the middle."""
    rng = random.Random(seed)
    every = list(itertools.product(range(len(TOKENS)), repeat=gamma))
    possible = [
        chain for chain in every if all(token_id in allowed(chain[:at]) for at, token_id in enumerate(chain))
    ]
    return [*rng.sample(possible, min(len(possible), 12)), *rng.sample(every, min(len(every), 12))]


@pytest.mark.slow
@pytest.mark.parametrize("method", VerificationMethod, ids=lambda method: method.value)
@pytest.mark.parametrize("gamma", [1, 3])
def test_chains_under_a_grammar_are_lossless(method, gamma):
    for number, tokens in enumerate(drafts(gamma, gamma)):
        target = Masked(number)
        assert_lossless(target, cycle_of(method, target, Proposal(tokens)))


@pytest.mark.parametrize("gamma", range(1, 4))
@pytest.mark.parametrize("drafter", ["masked", "free"])
@pytest.mark.parametrize("method", [REJECTION, BLOCK], ids=["rejection", "block"])
def test_sampled_drafts_are_lossless(method, gamma, drafter):
    for seed in range(2):
        target = Masked(seed)
        model = Masked(seed + 50) if drafter == "masked" else TinyModel(len(TOKENS), seed + 50)
        proposals = chain_proposals(quantised_drafter(model, 4, 4), START, gamma)
        parts = ((prob, cycle_of(method, target, proposal)) for prob, proposal in proposals)
        assert_lossless(target, mixed(parts))


class Beyond(Masked):
    """A target whose grammar exceeds its limits after a `b` of a proposal: it has no mask from there on."""

    def distribution(self, context):
        is_beyond = B in context[len(self.committed) :]
        return TinyModel.distribution(self, context) if is_beyond else super().distribution(context)

    def log_probs(self, contexts):
        rows = [self.distribution(context) for context in contexts]
        return torch.tensor(rows, dtype=torch.float64).log()


def cut(proposal: Proposal, distribution):
    """Return the distribution of the emitted tokens when verdicts end before the rows without a mask."""
    rows = {node + 1 for node in range(len(proposal)) if B in proposal.token_ids[: node + 1]}
    parts = []
    for (*path, last), prob in distribution.items():
        verdict = Verdict(tuple(range(len(path))), last, TokenOrigin.BONUS, len(path))
        left = cut_before(verdict, proposal, rows)
        kept = [proposal.token_ids[node] for node in left.accepted_path]
        assert left.num_tested >= len(kept)
        parts.append((prob, {(*kept, left.next_token_id): 1.0}))
    return mixed(iter(parts))


@pytest.mark.slow
@pytest.mark.parametrize("num_committed", [0, 1])
@pytest.mark.parametrize("method", VerificationMethod, ids=lambda method: method.value)
def test_verdicts_that_end_where_a_grammar_exceeds_its_limits_are_lossless(method, num_committed):
    errors = []
    for seed in range(3):
        target, beyond = Masked(seed, num_committed), Beyond(seed, num_committed)
        if method in (REJECTION, BLOCK):
            drafter = quantised_drafter(TinyModel(len(TOKENS), seed + 50), 6, 4)
            proposals = list(chain_proposals(drafter, target.committed, 3))
        else:
            proposals = [(1 / 216, Proposal(t)) for t in itertools.product(range(len(TOKENS)), repeat=3)]
        whole = [(prob, cycle_of(method, beyond, proposal), proposal) for prob, proposal in proposals]
        assert_lossless(target, mixed((prob, cut(proposal, found)) for prob, found, proposal in whole))
        uncut = completed(mixed((prob, found) for prob, found, _ in whole), target, target.committed, LONGEST)
        errors.append(distance(uncut, plain_distribution(target, target.committed, LONGEST)))
    assert max(errors) > 1e-3  # without the cut


TREES = [
    ((1, 3, 2, 4), (-1, -1, 0, 1)),
    ((3, 3, 0, 5, 2, 0), (-1, 0, 0, 1, 1, 3)),
    ((1, 2, 2, 5, 4, 0, 1), (-1, -1, 0, 2, 2, 3, 5)),
    ((4, 4, 5, 0, 0, 1), (-1, 0, 1, 2, 1, 4)),
]


@pytest.mark.parametrize(("tokens", "parents"), TREES)
@pytest.mark.parametrize("num_committed", [0, 1])
def test_trees_under_a_grammar_are_lossless(tokens, parents, num_committed):
    target = Masked(7, num_committed)
    assert_lossless(target, cycle_of(COUPLED, target, Proposal(tokens, parents)))
