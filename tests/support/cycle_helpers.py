"""Fakes around the cycle: plain classes that take functions and scripts, no gRPC, no Redis, no model."""

from collections.abc import Callable, Sequence

from gammaray.blocks import Shape, TokenLogprobs, Verdict
from gammaray.types import Proposal, SamplingParams, TokenOrigin, VerificationMethod
from orchestrator.cycle.run import run_cycle
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle
from orchestrator.text.detokenizer import Detokenizer

PROMPT = (0, 1, 2)
EOS = 25


class LetterTokenizer:
    """Token i is the i-th letter; token 25 ("z") is special."""

    has_exact_bytes = True

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("a") + token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes(t) for t in token_ids if not self.is_special(t)).decode()


class ScriptedTarget:
    """A target whose completion is `tokens`, the last one repeated; `refuse` raises for what it rejects."""

    def __init__(self, tokens: Sequence[int], refuse: Callable[[Proposal], None] = lambda _: None) -> None:
        self.tokens, self.refuse = tokens, refuse
        self.proposals: list[Proposal] = []

    def token_at(self, index: int) -> int:
        return self.tokens[min(index, len(self.tokens) - 1)]

    async def verify(self, session: Session, proposal: Proposal) -> Verdict:
        self.proposals.append(proposal)
        self.refuse(proposal)
        parents = proposal.parents or tuple(range(-1, len(proposal) - 1))
        path: list[int] = []
        while True:
            wanted = self.token_at(session.num_emitted + len(path))
            last = path[-1] if path else -1
            children = [node for node, parent in enumerate(parents) if parent == last]
            match = [node for node in children if proposal.token_ids[node] == wanted]
            if not match:
                origin = TokenOrigin.CORRECTION if children else TokenOrigin.BONUS
                logprobs: tuple[TokenLogprobs, ...] = ()
                if session.num_top_logprobs is not None:
                    logprobs = tuple(TokenLogprobs(-float(i)) for i in range(len(path) + 1))
                return Verdict(tuple(path), wanted, origin, len(path) + bool(children), logprobs)
            path.append(match[0])


class FunctionDrafter:
    """A drafter that is a function of session and gamma; counts its calls."""

    def __init__(self, function: Callable[[Session, int], Proposal]) -> None:
        self.function = function
        self.gammas: list[int] = []

    async def propose(self, session: Session, shape: Shape) -> Proposal:
        self.gammas.append(shape.depth)
        return self.function(session, shape.depth)


class ListStore:
    def __init__(self) -> None:
        self.token_ids: list[int] = []

    async def append(
        self, session: Session, token_ids: Sequence[int], origins: Sequence[TokenOrigin], logprobs=()
    ) -> None:
        self.token_ids += token_ids


class ConstantGamma:
    """Always the same shape, by default with room for trees; keeps the cycles that it observed."""

    def __init__(self, gamma: int, max_nodes: int | None = None) -> None:
        self.shape = Shape(gamma, 2 * gamma if max_nodes is None else max_nodes)
        self.cycles: list[Cycle] = []

    def next_shape(self) -> Shape:
        return self.shape

    def observe(self, cycle: Cycle) -> None:
        self.cycles.append(cycle)


def make_session(
    *,
    max_tokens: int = 100,
    stop: Sequence[str] = (),
    eos: Sequence[int] = (EOS,),
    stop_token_ids: Sequence[int] = (),
    method: VerificationMethod = VerificationMethod.COUPLED,
    temperature: float = 1.0,
    num_top_logprobs: int | None = None,
) -> Session:
    params = SamplingParams(temperature=temperature, seed=1)
    text, ends = Detokenizer(LetterTokenizer(), PROMPT, stop), (frozenset(eos), frozenset(stop_token_ids))
    return Session("s", PROMPT, params, method, max_tokens, text, *ends, num_top_logprobs)


def perfect_drafter(target: ScriptedTarget) -> FunctionDrafter:
    def propose(session: Session, gamma: int) -> Proposal:
        return Proposal(tuple(target.token_at(session.num_emitted + i) for i in range(gamma)))

    return FunctionDrafter(propose)


async def run_to_end(session: Session, drafter, target, gamma: int) -> list[Cycle]:
    """Run cycles until the completion ends; at most one per token that may be emitted."""
    controller = ConstantGamma(gamma)
    for _ in range(session.max_tokens):
        await run_cycle(session, drafter, target, controller)
        if session.finish_reason is not None:
            return controller.cycles
    raise AssertionError("the completion did not end")
