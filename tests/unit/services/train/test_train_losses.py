"""Losses and measures of drafters in training, against the closed forms on whole distributions."""

import pytest
import torch

from services.train.losses import coupled, loss_of, overlap

P = [0.4, 0.3, 0.15, 0.0, 0.1, 0.05, 0.0, 0.0]
Q = [0.25, 0.05, 0.2, 0.3, 0.0, 0.0, 0.12, 0.08]
TOP = [0, 1, 2]
"""What is stored; what else the two have is apart, so that the lower bounds are exact."""


def stored(p, q, top):
    """Return what the drafters' `common` returns of one prediction."""
    wanted = torch.tensor([[p[token] for token in top]])
    return wanted, torch.tensor([[q[token] for token in top]]).log()


def exact(p, q):
    """Return how often the two take the same token under shared Gumbel noise."""
    tokens = [token for token in range(len(p)) if p[token] and q[token]]
    pairs = list(zip(p, q, strict=True))
    return sum(1 / sum(max(a / p[token], b / q[token]) for a, b in pairs) for token in tokens)


@pytest.mark.parametrize("share", [coupled, overlap])
def test_id_without_a_row_counts_as_never_drafted(share):
    wanted, found = stored(P, Q, TOP)
    wanted[0, 1] = 0  # the drafter has no row for it, and `found` holds another row's value
    without = [Q[0], 0.0, Q[2], Q[1] + Q[3], *Q[4:]]  # all that a drafter gives is given to its rows
    expected = exact(P, without) if share is coupled else sum(map(min, P, without))
    found[0, 1] = -0.1
    assert share(wanted, found).item() == pytest.approx(expected, abs=1e-6)


def test_loss_is_the_share_that_is_rejected():
    divergence = loss_of("kl", *stored(P, Q, TOP)).item()
    expected = 1 - exact(P, Q) + 0.1 * divergence
    assert loss_of("coupled", *stored(P, Q, TOP)).item() == pytest.approx(expected, abs=1e-6)


def test_impossible_tokens_leave_gradients_finite():
    wanted = torch.tensor([[1.0, 0.0, 1e-38]])
    found = torch.tensor([[-200.0, -1e4, 0.0]], requires_grad=True)
    loss_of("coupled", wanted, found).sum().backward()
    assert found.grad.isfinite().all()
