"""Which drafter pays on which device: `sizing` with the times of `hardware`, and the capacity of a target.

All drafters are sized with the same alpha unless told otherwise: alpha is a property of the pair and of the
text, and no arithmetic yields it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gammaray.checks import check_int, check_number
from gammaray.errors import InvalidArgumentError
from gammaray.maths.hardware import Device, Model, Placement
from gammaray.maths.sizing import Sizing

__all__ = ["Capacity", "Drafter", "Kind", "Load", "drafters_for"]

PARALLEL_BLOCK = 8
"""Tokens that one pass of a parallel draft proposes: the masks that published ones were trained with."""


class Kind(str, Enum):
    """How a drafter makes a proposal."""

    PLAIN = "plain"
    """One pass per proposed token."""
    PARALLEL = "parallel"
    """One pass per proposal (PARD, arXiv 2504.18583)."""
    EARLY_EXIT = "early-exit"
    """The target's first layers and its head, one pass per proposed token (LayerSkip, arXiv 2404.16710)."""
    HEAD = "head"
    """An EAGLE-3 head on the target's own device, one pass per proposed token, without a round trip."""
    TEXT = "text"
    """Look-ups in the text by the orchestrator: no pass, no device, no round trip."""


@dataclass(frozen=True)
class Drafter:
    """A drafter.

    Args:
        kind: How it makes a proposal.
        model: Its model; None for look-ups.
        weights: Weight type of the model.
    """

    kind: Kind
    model: Model | None = None
    weights: str = "bf16"

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.model is None:
            return "text look-ups"
        if self.kind is Kind.HEAD:
            return f"{self.model.name} {self.weights} in the target"
        return f"{self.kind.value} {self.model.name} {self.weights}"

    @property
    def is_local(self) -> bool:
        """Whether it needs no device of its own."""
        return self.kind in (Kind.HEAD, Kind.TEXT)


@dataclass(frozen=True)
class Load:
    """What does not depend on the drafter.

    Args:
        target: The target.
        alpha: Probability that one tested token of a model is accepted.
        text_alpha: The same for look-ups in the text.
        rtt_ms: Network time that a proposal of a draft worker adds to a cycle, in milliseconds.
        context: Tokens per session, prompt included.

    Raises:
        InvalidArgumentError: One is out of bounds, or the target's memory cannot hold its weights.
    """

    target: Placement
    alpha: float = 0.7
    text_alpha: float = 0.35
    rtt_ms: float = 0.5
    context: int = 1024

    def __post_init__(self) -> None:
        check_number("text_alpha", self.text_alpha, 0.0, 0.9999)
        check_int("context", self.context, 0, 2**24)
        if self.target.max_sessions(self.context) < 1:
            device = self.target.device
            raise InvalidArgumentError(
                "target",
                f"{self.target.weights_gb:.0f} GB of weights and {self.context} tokens of KV cache on "
                f"{self.target.devices} x {device.name}",
                f"what fits into {self.target.devices} x {device.memory_gb:g} GB",
            )

    def sizing(self, drafter: Drafter, device: Device, sessions: int = 1, drafters: int = 1) -> Sizing | None:
        """Return the cost model; None if the sessions do not fit into the memory of the drafters."""
        target_ms = self.target.pass_ms(sessions, self.context)
        free = self.target.free_tokens(sessions, self.context)
        plain = Sizing(self.alpha, target_ms, 0.0, self.rtt_ms, sessions, free, draft_price=0.0)
        if drafter.model is None:
            return replace(plain, alpha=self.text_alpha, rtt_ms=0.0)
        if drafter.kind is Kind.HEAD:
            return replace(plain, rtt_ms=0.0, **self._head_costs(drafter.model, drafter.weights, sessions))
        placement, each = Placement(drafter.model, drafter.weights, device), math.ceil(sessions / drafters)
        if placement.max_sessions(self.context) < each:
            return None
        return replace(
            plain,
            draft_ms=placement.pass_ms(each, self.context),
            draft_tokens=placement.free_tokens(each, self.context),
            draft_price=placement.price_per_h / self.target.price_per_h,
            block=PARALLEL_BLOCK if drafter.kind is Kind.PARALLEL else 1,
        )

    def _head_costs(self, head: Model, weights: str, sessions: int) -> dict[str, Any]:
        """Return what passes of a head cost, which runs on one of the target's devices."""
        placement = Placement(head, weights, self.target.device)
        return {
            "draft_ms": placement.pass_ms(sessions, self.context),
            "draft_tokens": placement.free_tokens(sessions, self.context),
        }

    def least_alpha(self, drafter: Drafter, device: Device) -> float | None:
        """Return the alpha, in hundredths, from which one stream is faster; None if it never is."""
        for hundredths in range(1, 100):
            alpha = hundredths / 100
            sizing = replace(self, alpha=alpha, text_alpha=alpha).sizing(drafter, device)
            if sizing is not None and sizing.choose(1).speedup > 1.0:
                return alpha
        return None

    def capacity(self, drafter: Drafter | None, device: Device, rate: float, max_drafters: int) -> Capacity:
        """Return the most sessions for the money at which each gets `rate` tokens per second.

        Args:
            drafter: The drafter; None: plain decoding.
            device: Its device.
            rate: Tokens per second of each session.
            max_drafters: Most drafters of the target.
        """
        check_number("rate", rate, 0.0, 1e6, open_low=True)
        if drafter is None or drafter.is_local:
            return self._capacity(drafter, device, rate, 0)
        options = [self._capacity(drafter, device, rate, number) for number in range(1, max_drafters + 1)]
        return max(options, key=lambda capacity: capacity.sessions_per_dollar)

    def _capacity(self, drafter: Drafter | None, device: Device, rate: float, drafters: int) -> Capacity:
        lookups = Drafter(Kind.TEXT)

        def gamma_of(sessions: int) -> int | None:
            """Return the gamma at which all sessions get the rate; None if they cannot."""
            sizing = self.sizing(drafter or lookups, device, sessions, max(1, drafters))
            if sizing is None:
                return None
            choice = sizing.choose(0 if drafter is None else max(1, drafters))
            return choice.gamma if choice.tokens_per_s >= rate * sessions else None

        sessions = _largest(
            lambda number: gamma_of(number) is not None, self.target.max_sessions(self.context)
        )
        price = self.target.price_per_h + drafters * device.price_per_h
        return Capacity(drafters, sessions, gamma_of(sessions) or 0 if sessions else 0, price)


@dataclass(frozen=True)
class Capacity:
    """How many sessions a target and its drafters serve at a given rate.

    Args:
        drafters: Draft workers per target worker.
        sessions: Concurrent sessions; 0: not even one gets the rate.
        gamma: Gamma at that load.
        price_per_h: Price of the target and its drafters, in US dollars per hour.
    """

    drafters: int
    sessions: int
    gamma: int
    price_per_h: float

    @property
    def sessions_per_dollar(self) -> float:
        """Sessions per US dollar and hour."""
        return self.sessions / self.price_per_h


def drafters_for(target: Model, draft: Model, exit_layers: int | None = None) -> list[Drafter]:
    """Return the drafters to compare for a target.

    Args:
        target: The target.
        draft: Draft model; its parallel variant is taken to have the same size.
        exit_layers: Layers of the early exit; None: a quarter of the target's, none if those are unknown.
    """
    kinds = [(Kind.PLAIN, draft), (Kind.PARALLEL, draft)]
    layers = exit_layers if exit_layers is not None else target.layers // 4
    if layers:
        kinds.append((Kind.EARLY_EXIT, target.first_layers(layers)))
    heads = []
    if (head := target.eagle_head()) is not None:
        heads = [Drafter(Kind.HEAD, head)]
    found = [Drafter(kind, model, weights) for kind, model in kinds for weights in ("bf16", "int8", "int4")]
    return [*found, *heads, Drafter(Kind.TEXT)]


def _largest(fits: Callable[[int], bool], bound: int) -> int:
    """Return the largest number up to `bound` that fits, 0 if none does; `fits` must be monotone."""
    low, high = 0, bound + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
