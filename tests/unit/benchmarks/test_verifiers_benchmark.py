"""The benchmark of verification methods: its figures against exact ones, tree shapes, a whole small run."""

import functools
import itertools
import json
import math

import pytest
import torch

from benchmarks.verification_rules import coupled_acceptance, specinfer_ranks, spectr_ranks
from benchmarks.verifiers import (
    CHAINS,
    Position,
    accepted_depths,
    main,
    record,
    tokens_per_cycle,
)

P, Q = (0.5, 0.2, 0.1, 0.2), (0.4, 0.3, 0.2, 0.1)
LEAF = ()


def position(token, draws=4000, p=P, q=Q, top_k=4) -> Position:
    rows = (torch.tensor(one, dtype=torch.float64).log() for one in (p, q))
    generator = torch.Generator().manual_seed(token)
    return record(*rows, token, top_k=top_k, draws=draws, generator=generator)


@pytest.mark.parametrize("token", range(4))
def test_recorded_position_has_the_closed_forms(token):
    found = position(token)
    assert (found.p, found.naive) == pytest.approx((P[token], Q[token]))
    assert found.draft == pytest.approx(Q[token], abs=2**-12)
    assert found.overlap == pytest.approx(0.8, abs=2**-11)
    assert found.coupled == pytest.approx(coupled_acceptance(P, Q, token), abs=1e-12)
    ranks = found.ranks["coupled"][0]
    assert ranks[0] == pytest.approx(found.coupled, abs=0.03)
    assert sum(ranks) == pytest.approx(1.0, abs=1e-12)
    assert found.ranks["specinfer"][1] == pytest.approx(
        [share / P[token] for share in specinfer_ranks(P, Q, token, 8)], abs=2e-3
    )
    assert found.ranks["spectr"][1] == pytest.approx(
        [share / P[token] for share in spectr_ranks(P, Q, token, 2)], abs=2e-3
    )


def test_recorded_ranks_without_replacement_have_the_golden_acceptance():
    ranks = [position(token).ranks["specinfer-without"][7] for token in range(4)]
    for count, expected in ((1, 0.8), (2, 0.926786), (3, 0.942381)):
        found = sum(P[token] * sum(ranks[token][:count]) for token in range(4))
        assert found == pytest.approx(expected, abs=4e-3)


def test_token_that_is_not_shipped_is_accepted_by_coupled_alone():
    found = position(3, top_k=2)
    assert found.draft == 0
    assert found.coupled > 0.3
    for method in ("specinfer", "specinfer-without", "spectr"):
        assert sum(map(sum, found.ranks[method])) == 0


def over_all_texts(survival_of, length):
    """Return the mean tokens of a cycle over the target's texts of this length."""
    positions = [position(token, draws=1) for token in range(4)]
    return sum(
        math.prod(P[token] for token in text) * (1 + sum(survival_of([positions[token] for token in text])))
        for text in itertools.product(range(4), repeat=length)
    )


@pytest.mark.parametrize(
    ("name", "alpha"), [("naive chain", 0.3), ("coupled chain", 0.770906877662812), ("rejection chain", 0.8)]
)
def test_chains_emit_what_theory_expects(name, alpha):
    assert over_all_texts(CHAINS[name], 2) == pytest.approx(1 + alpha + alpha**2, abs=2e-3)


def test_trees_emit_what_their_nodes_accept():
    found = over_all_texts(functools.partial(accepted_depths, ((LEAF,), LEAF), "spectr"), 2)
    first, second = (sum(spectr_ranks(P, Q, token, 2)[rank] for token in range(4)) for rank in (0, 1))
    assert found == pytest.approx(1 + first * 1.8 + second, abs=4e-3)


def test_cycles_follow_each_other():
    """Even positions are always accepted and odd ones never: cycles of one kind would be 1 or 2 tokens."""
    text = list(range(60))

    def survival_of(rest):
        return [1.0, 0.0] if rest[0] % 2 == 0 else [0.0, 0.0]

    assert tokens_per_cycle([text], survival_of) == 2
    assert tokens_per_cycle([text[1:]], survival_of) == pytest.approx((1 + 2 * 21) / 22)


@pytest.mark.slow
def test_small_run_writes_every_method(tmp_path):
    out = tmp_path / "result.json"
    options = ["--pairs", "synthetic", "demo", "--positions", "40", "--tokens", "20", "--draws", "2"]
    main([*options, "--temperatures", "1", "--out", str(out)])
    cases = json.loads(out.read_text())["cases"]
    assert [case["pair"] for case in cases] == ["synthetic 0.6", "synthetic 0.8", "synthetic 0.9", "demo"]
    for case in cases:
        tokens = {(row["method"], row["nodes"]): row["tokens"] for row in case["rows"]}
        for nodes in (4, 8, 16):
            assert 1 <= tokens["naive chain", nodes] <= nodes + 1
            assert tokens["block chain", nodes] >= tokens["rejection chain", nodes]
            assert tokens["SpecInfer", nodes] >= tokens["rejection chain", nodes] - 1e-9
            assert tokens["SpecTr", nodes] >= tokens["rejection chain", nodes] - 1e-9
    assert {row["method"] for row in cases[3]["rows"]} > {
        "deep coupled tree, as served",
        "block chain, as served",
    }
