"""Tokens that a grammar forces, and proposals cut to what it allows."""

import pytest

from gammaray.types import DrafterKind, Proposal, SparseDistribution
from orchestrator.cycle.types import Match
from orchestrator.drafting.grammar import GrammarDrafter
from tests.support.cycle_helpers import make_session
from tests.support.processing_helpers import small_compiler

TOKENS = ("<eos>", "a", "b", "c", "ab", "bc")
END, A, B, C, AB, BC = range(6)
# One of two letters, then four forced ones.
GRAMMAR = 'start: ("a" | "b") "abca"'


def drafter(grammar: str = GRAMMAR) -> GrammarDrafter:
    return GrammarDrafter(small_compiler(TOKENS, len(TOKENS) + 2, (END,)).begin(grammar))


def after(*token_ids: int):
    session = make_session(eos=(END,))
    session.token_ids += token_ids
    return session


def match_of(*token_ids: int) -> Match:
    return Match(DrafterKind.SUFFIX, token_ids, 3, (0.5,) * len(token_ids))


def test_forced_tokens_are_certain_matches():
    grammar = drafter()
    assert grammar.look_up(after(), 9) is None
    found = grammar.look_up(after(A), 9)
    assert (found.kind, found.probabilities) == (DrafterKind.GRAMMAR, (1.0,) * len(found.token_ids))
    assert "".join(TOKENS[token_id] for token_id in found.token_ids).startswith("abc")
    assert grammar.look_up(after(A), 1).token_ids == found.token_ids[:1]
    assert drafter().look_up(after(A, A, B, C, A, END), 9) is None


@pytest.mark.parametrize(
    ("found", "kept"), [((B, A), 2), ((B, C, A), 1), ((B, A, B, C, A, END, A), 6), ((C,), 0), ((7, 2**40), 0)]
)
def test_matches_are_cut_and_completed_by_forced_tokens(found, kept):
    match = drafter().completed(after(), match_of(*found), 8)
    if kept == 0:
        assert match is None
        return
    assert match.token_ids[:kept] == found[:kept]
    assert match.probabilities == (0.5,) * kept + (1.0,) * (len(match.token_ids) - kept)
    text = "".join(TOKENS[token_id] for token_id in match.token_ids if token_id != END)
    assert "babca".startswith(text)
    # Only the end, and an `a` that may be a longer token, are not added.
    assert len(text) >= 4


def test_a_proposal_beyond_the_limits_ends_drafting_by_the_grammar_only(caplog):
    symbols = [f"s{number}" for number in range(70)]
    rules = "\n".join(f'{name}: "a" | {name} {name}' for name in symbols)
    grammar = f'start: "c" "ab" | "b" x\nx: {" | ".join(symbols)}\n{rules}'
    hostile, proposal = match_of(B, *(A,) * 30), Proposal((B, *(A,) * 30))
    for fails in ("completed", "cut"):
        made = drafter(grammar)
        assert made.look_up(after(C), 9) is not None
        made = drafter(grammar)
        if fails == "completed":
            assert made.completed(after(), hostile, 64) == hostile
        assert made.cut(after(), proposal) == proposal
        assert made.look_up(after(C), 9) is None
        assert made.completed(after(C), match_of(END), 9) == match_of(END)
        # The same for a completion that exceeds the limits itself.
        made = drafter(grammar)
        assert made.look_up(after(B, *(A,) * 30), 9) is None
        assert made.cut(after(B, *(A,) * 31), Proposal((A,))) == Proposal((A,))
    assert caplog.text.count("continues without drafting by its grammar") == 4


def test_completed_matches_are_within_the_depth():
    assert drafter().completed(after(), match_of(B), 2).token_ids in ((B, A), (B, AB))


def distributions(*token_ids: int) -> tuple[SparseDistribution, ...]:
    return tuple(SparseDistribution((token_id,), (2,), 1) for token_id in token_ids)


@pytest.mark.parametrize(("chain", "kept"), [((B, A, B), 3), ((B, C, A), 1), ((C, A), 0), ((), 0)])
def test_chains_are_cut_before_an_impossible_token_but_sampled_ones_after_it(chain, kept):
    assert drafter().cut(after(), Proposal(chain)) == Proposal(chain[:kept])
    sampled = Proposal(chain, None, distributions(*chain))
    left = chain[: kept + 1]
    assert drafter().cut(after(), sampled) == Proposal(left, None, distributions(*left))


def test_trees_are_not_cut():
    tree = Proposal((C, B, A), (-1, -1, 1))
    assert drafter().cut(after(), tree) == tree


def test_drafter_follows_its_session():
    grammar = drafter()
    assert grammar.cut(after(), Proposal((B, A, C))) == Proposal((B, A))
    assert grammar.cut(after(B, A), Proposal((B, C, A, END, A))) == Proposal((B, C, A, END))
