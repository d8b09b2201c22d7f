"""Sessions whose blocks a scheduler serves directly: vLLM's, or the CPU engine's for comparison."""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gammaray.blocks import Shape, Verdict
from gammaray.errors import GammarayError
from gammaray.types import Proposal, SamplingParams, SparseDistribution, VerificationMethod
from services.scheduling.tasks import NeedTokens, ProposeTask, Release, Reply, SessionSpec, VerifyTask

NOTHING = Proposal()
GREEDY = SamplingParams(temperature=0, seed=0)
WEIGHT_BITS = 10
MAX_STEPS = 400
"""More than any block here takes."""

_names = itertools.count()
_request_ids = itertools.count(1)


@dataclass
class Session:
    """What an orchestrator knows of a session."""

    prompt: Sequence[int]
    params: SamplingParams = GREEDY
    method: VerificationMethod = VerificationMethod.COUPLED
    eos_token_ids: tuple[int, ...] = ()
    salt: str | None = None
    adapter: str = ""
    name: str = field(default_factory=lambda: f"session {next(_names)}")
    epoch: int = 1
    tokens: list[int] = field(init=False)
    held: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def spec(self) -> SessionSpec:
        return SessionSpec(
            self.params, self.method, len(self.prompt), self.eos_token_ids, self.salt, self.adapter
        )

    def fields(self, start: int) -> dict[str, Any]:
        """Return what every block has that brings the tokens from a position on."""
        return {
            "request_id": next(_request_ids),
            "session_id": self.name,
            "epoch": self.epoch,
            "base_position": len(self.tokens),
            "context_start": start,
            "context": self.tokens[start:],
            "spec": self.spec() if start == 0 else None,
            "deadline": math.inf,
            "deliver": lambda task, reply: None,
        }

    def block(self, proposal: Proposal | Sequence[int] = NOTHING, **changes: Any) -> VerifyTask:
        """Return the next block: the tokens that the worker lacks, and a proposal."""
        proposal = proposal if isinstance(proposal, Proposal) else Proposal(tuple(proposal))
        own = {"proposal": proposal, "num_top_logprobs": None}
        return VerifyTask(**{**self.fields(self.held), **own, **changes})

    def take(self, task: VerifyTask, reply: Reply) -> Verdict:
        verdict = reply.outcome
        assert isinstance(verdict, Verdict), verdict
        self.held = len(self.tokens)
        self.tokens += [task.proposal.token_ids[node] for node in verdict.accepted_path]
        self.tokens.append(verdict.next_token_id)
        return verdict


def answers(scheduler: Any, tasks: Sequence[VerifyTask | ProposeTask]) -> list[Reply]:
    """Submit blocks, step until each has its answer, and return these in the order of the blocks.

    A session's first block gets its compiled grammar, as a stream submits it.
    """
    for task in tasks:
        if task.spec is not None and task.spec.params.grammar and task.grammar is None:
            task.grammar = scheduler.queue.grammars.begin(task.spec.params.grammar, task.spec.eos_token_ids)
    scheduler.submit(tasks)
    replies: dict[int, Reply] = {}
    for _ in range(MAX_STEPS):
        replies |= {reply.request_id: reply for _, reply in scheduler.step() if not reply.is_ahead}
        if all(task.request_id in replies for task in tasks):
            return [replies[task.request_id] for task in tasks]
    raise AssertionError(f"{len(tasks) - len(replies)} blocks without an answer after {MAX_STEPS} steps")


def ask(scheduler: Any, session: Session, proposal: Proposal | Sequence[int] = NOTHING, **more: Any) -> Any:
    """Serve one block; return its verdict, which is committed, or what came instead of one."""
    task = session.block(proposal, **more)
    (reply,) = answers(scheduler, [task])
    if isinstance(reply.outcome, NeedTokens | GammarayError):
        return reply.outcome
    return session.take(task, reply)


Cycle = tuple[Session, int, tuple[int, ...], Verdict]


def run(
    scheduler: Any,
    sessions: Sequence[Session],
    num_tokens: int,
    block: Callable[[Session], Mapping[str, Any]] = lambda session: {},
    *,
    to_end: bool = False,
) -> list[Cycle]:
    """Serve blocks of all sessions in one batch until each has so many tokens, or with `to_end` its end.

    Returns:
        The cycles: session, position, proposal and verdict.
    """
    cycles: list[Cycle] = []
    while active := [
        one
        for one in sessions
        if len(one.output) < num_tokens and not (to_end and set(one.output) & set(one.eos_token_ids))
    ]:
        tasks = [one.block(**block(one)) for one in active]
        for one, task, reply in zip(active, tasks, answers(scheduler, tasks), strict=True):
            position, verdict = len(one.tokens), one.take(task, reply)
            cycles.append((one, position, task.proposal.token_ids, verdict))
    return cycles


Propose = Callable[[Session], Proposal | Sequence[int]]


def generate(
    scheduler: Any, sessions: Sequence[Session], num_tokens: int, propose: Propose = lambda session: NOTHING
) -> list[list[int]]:
    """Return outputs of that length; proposals may run past it."""
    run(scheduler, sessions, num_tokens, lambda one: {"proposal": propose(one)})
    return [session.output[:num_tokens] for session in sessions]


def complete(
    scheduler: Any,
    sessions: Sequence[Session],
    num_tokens: int,
    block: Callable[[Session], Mapping[str, Any]] = lambda session: {},
) -> list[list[int]]:
    """Return outputs that end with their end or at that length."""
    run(scheduler, sessions, num_tokens, block, to_end=True)
    return [up_to_end(one)[:num_tokens] for one in sessions]


def up_to_end(session: Session) -> list[int]:
    ends = (at + 1 for at, token in enumerate(session.output) if token in session.eos_token_ids)
    return session.output[: next(ends, None)]


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 97) for _ in range(length)]


def proposer(expected: Mapping[str, Sequence[int]], rng: random.Random) -> Propose:
    """Return what proposes 0 to 8 of a session's expected tokens, one in four of them wrong."""

    def propose(session: Session) -> list[int]:
        own = expected[session.name][len(session.output) :][: rng.randrange(9)]
        return [token if rng.random() < 0.75 else rng.randrange(97) for token in own]

    return propose


def end(scheduler: Any, *sessions: Session, forgets: bool = False) -> None:
    scheduler.release([Release(session.name, 0, forgets) for session in sessions])
    scheduler.step()


def references(reference: Any, sessions: Sequence[Session], num_tokens: int) -> list[list[int]]:
    """Return another engine's tokens of sessions with the same prompts and parameters."""
    copies = [Session(each.prompt, each.params, eos_token_ids=each.eos_token_ids) for each in sessions]
    outputs = generate(reference, copies, num_tokens)
    end(reference, *copies)
    return outputs


def outcomes(replies: Sequence[Reply]) -> list[Any]:
    return [reply.outcome for reply in replies]


def drafted(likely: Sequence[int], rng: random.Random, vocab_size: int = 97) -> Proposal:
    """Return a chain drawn from the distributions that come with it, of which each has one likely token."""
    token_ids, distributions = [], []
    for token_id in likely:
        others = rng.sample([one for one in range(vocab_size) if one != token_id], 15)
        weights = [1 + rng.randrange(40) for _ in others]
        support, weights = (token_id, *others), [(1 << WEIGHT_BITS) - sum(weights), *weights]
        distributions.append(SparseDistribution(support, tuple(weights), WEIGHT_BITS))
        token_ids.append(rng.choices(support, weights)[0])
    return Proposal(tuple(token_ids), None, tuple(distributions))


def draft_task(session: Session, depth: int, max_nodes: int = 0, **changes: Any) -> ProposeTask:
    """Return a block that asks for a proposal after a session's tokens, all of which it brings."""
    return ProposeTask(**{**session.fields(0), "shape": Shape(depth, max_nodes), **changes})


def draft(scheduler: Any, sessions: Sequence[Session], depth: int) -> list[Any]:
    tasks = [draft_task(session, depth) for session in sessions]
    return [reply.outcome for reply in answers(scheduler, tasks)]


def answer(scheduler: Any, task: ProposeTask) -> Reply:
    for _ in range(MAX_STEPS):
        for answered, reply in scheduler.step():
            if answered is task:
                return reply
    raise AssertionError(f"no answer after {MAX_STEPS} steps")


def assert_alike(ours: Proposal, theirs: Proposal) -> None:
    """Check that proposals have the same tokens, and distributions that differ by rounding at most."""
    assert isinstance(ours, Proposal), ours
    assert ours.token_ids == theirs.token_ids
    assert (ours.draft_distributions is None) == (theirs.draft_distributions is None)
    for one, other in zip(ours.draft_distributions or (), theirs.draft_distributions or (), strict=True):
        assert _difference(one, other) <= 1


def _difference(one: SparseDistribution, other: SparseDistribution) -> int:
    weights = dict(zip(one.token_ids, one.weights, strict=True))
    others = dict(zip(other.token_ids, other.weights, strict=True))
    return max(abs(weights.get(key, 0) - others.get(key, 0)) for key in weights.keys() | others.keys())
