"""Measurements of pairs, as qualifying makes them."""

from gammaray.qualify.measured import Equality, ModelFacts, PairFacts, Run


def facts(name="m", **changed):
    known = {
        "architecture": "llama",
        "vocab_size": 100,
        "tokenizer_sha256": "same",
        "max_context": 512,
    }
    return ModelFacts(name=name, **known | changed)


def plain_run(temperature=0.0, ms=10.0):
    return Run(
        temperature=temperature,
        gamma=0,
        cycles=99,
        emitted=99,
        whole_cycles=99,
        whole_emitted=99,
        verify_ms=ms,
    )


def run(gamma, alpha=0.8, temperature=0.0, step_ms=1.0, verify_ms=10.0, cycles=1000):
    """A run of whole chains in which every token is accepted with probability alpha, to the letter."""
    survive = [round(cycles * alpha**place) for place in range(gamma + 1)]
    emitted = cycles + sum(survive[1:])
    return Run(
        temperature=temperature,
        gamma=gamma,
        cycles=cycles,
        emitted=emitted,
        whole_cycles=cycles,
        whole_emitted=emitted,
        tested=tuple(survive[:-1]),
        accepted=tuple(survive[1:]),
        verify_ms=verify_ms,
        draft_ms=gamma * step_ms,
        draft_step_ms=step_ms,
    )


def same(temperature=0.0, compared=8, equal=8, ties=0, first=""):
    return Equality(temperature=temperature, compared=compared, equal=equal, ties=ties, first=first)


def pair(runs=(), equality=None, target=None, draft=None):
    return PairFacts(
        target=target or facts("t"),
        draft=draft or facts("d"),
        runs=tuple(runs),
        equality=(same(),) if equality is None else tuple(equality),
    )
