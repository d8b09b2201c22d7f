"""Muon: momentum whose update is replaced by the nearest orthogonal matrix (Jordan et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_WEIGHT_DECAY = 0.05
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """Return a matrix of the same shape, `[rows, columns]`, with singular values near 1 (Newton-Schulz)."""
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Muon for two-dimensional parameters, with Nesterov momentum and decoupled weight decay."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Apply one update to every parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"], group["momentum"])

    def _update(self, parameter: Tensor, lr: float, momentum: float) -> None:
        average = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 1 - momentum)
        update = orthogonalise(parameter.grad.lerp(average, momentum))
        # A tall matrix gets a larger step, so that the size of its output changes as much as a square one's.
        scale = max(1.0, parameter.size(0) / parameter.size(1)) ** 0.5
        parameter.mul_(1 - lr * _WEIGHT_DECAY).add_(update, alpha=-lr * scale)
