"""Measurements of pairs, as qualifying makes them."""

from gammaray.qualify.measured import Depth, ModelFacts, PairFacts, QualifyTask, Trial


def facts(name="m", **changed):
    return ModelFacts(name=name, **{"vocab_size": 100, "max_context": 512, "kernel": "k"} | changed)


def depth(gamma, alpha=0.8, step_ms=1.0, verify_ms=10.0, plain_ms=10.0, rtt_ms=0.0):
    """Whole chains in which every token is accepted with probability alpha."""
    tokens = sum(alpha**place for place in range(gamma + 1))
    cycle_ms = gamma * step_ms + verify_ms + rtt_ms
    return Depth(
        gamma=gamma,
        tokens_per_cycle=tokens,
        draft_ms=gamma * step_ms,
        verify_ms=verify_ms,
        cycle_ms=cycle_ms,
        speedup=tokens * plain_ms / cycle_ms,
    )


def trial(*depths, temperature=0.0, **changed):
    known = {"compared": 8, "equal": 8, "ties": 0, "plain_ms": 10.0, "draft_step_ms": 1.0}
    known |= {"tested": (1000, 800), "accepted": (800, 640)}
    return Trial(temperature=temperature, depths=depths, **known | changed)


def pair(*trials, target=None, draft=None, **changed):
    return PairFacts(target=target or facts("t"), draft=draft or facts("d"), trials=trials, **changed)


def task(**changed):
    known = {"target": "t", "draft": ("d",), "tokens": 16, "gammas": (2,), "rtt_ms": 0.0, "min_speedup": 1.0}
    return QualifyTask(**known | {"temperatures": (0.0, 1.0)} | changed)
