"""Ways to draft for a stream: every drafter alone, and mixtures. None of them may change a token."""

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gammaray.types import GammaPolicy, SpeculationSummary

MISTAKE_EVERY = 24
"""A prediction lacks every so many tokens one of the completion: the completion deviates there."""


@dataclass(frozen=True)
class Way:
    name: str  # name in results
    drafters: tuple[str, ...]  # drafters of which each must have proposed in some cycle of a run
    options: Mapping[str, Any] = field(hash=False)  # options of each request
    # Send the expected completion, with tokens left out, as the request's prediction.
    has_prediction: bool = False
    keeps_outputs: bool = False  # let requests find outputs of earlier requests, which had the same tokens

    def request(self, expected: Sequence[int]) -> dict[str, Any]:
        """Return the options of one request, whose tokens are to be the expected ones.

        Without `keeps_outputs` each request has a salt of its own, so that it finds no earlier output and
        needs its drafters.
        """
        found = dict(self.options)
        found["cache_salt"] = f"kept: {self.name}" if self.keeps_outputs else secrets.token_hex(8)
        if self.has_prediction:
            found["prediction"] = [token for i, token in enumerate(expected, 1) if i % MISTAKE_EVERY]
        return found


def _mixtures(model: str) -> tuple[Way, ...]:
    """Return mixtures of a model, by its drafter's name, and the text drafters.

    With the adaptive gamma a model may propose in no cycle: outputs that repeat are found by look-ups.
    """
    return (
        Way(f"{model} + prediction", (model, "prediction"), {"gamma": 4}, has_prediction=True),
        Way(f"{model} + look-ups, adaptive", (), {}),
        Way(f"{model} + past outputs, adaptive", ("suffix",), {}, keeps_outputs=True),
    )


PAIR = (
    Way("model, chains", ("model",), {"drafter": "model", "gamma": 4}),
    Way("model, trees", ("model",), {"drafter": "model", "gamma": GammaPolicy(fixed=4, max_nodes=12)}),
    Way("suffix tree of past outputs", ("suffix",), {"drafter": "suffix", "gamma": 8}, keeps_outputs=True),
    Way("prediction", ("prediction",), {"drafter": "prediction", "gamma": 8}, has_prediction=True),
    *_mixtures("model"),
    Way("suffix tree of the session", ("suffix",), {"drafter": "suffix", "gamma": 8}),
)
"""With draft workers of the target's vocabulary."""

DRAFTER = (*PAIR[:2], *_mixtures("model"))
"""With draft workers whose model is parallel, or part of the target."""

HEAD = (
    Way("head, chains", ("head",), {"drafter": "head", "gamma": 4}),
    Way("head, trees", ("head",), {"drafter": "head", "gamma": GammaPolicy(fixed=4, max_nodes=12)}),
    *_mixtures("head"),
)
"""With a head in the target workers."""


def cycles_by_drafter(summary: SpeculationSummary) -> Counter[str]:
    """Return how many cycles of a completion each drafter proposed in."""
    kinds = ("model", "head", "suffix", "prediction", "grammar", "plain", "fallback")
    return Counter({kind: getattr(summary, f"{kind}_cycles") for kind in kinds})


def unused(ways: Iterable[Way], cycles: Mapping[str, Counter[str]]) -> list[str]:
    """Return the ways of which a drafter proposed in no cycle: nothing is known about it then."""
    pairs = [(way.name, drafter) for way in ways for drafter in way.drafters]
    missing = [(name, drafter) for name, drafter in pairs if not cycles.get(name, Counter())[drafter]]
    return [f"{name}: {drafter} proposed in no cycle" for name, drafter in missing]
