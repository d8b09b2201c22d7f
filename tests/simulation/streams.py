"""The clients' streams, and the tokens that they must receive."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gammaray.errors import GammarayError
from gammaray.types import GammaPolicy, GenerationRequest, SamplingParams
from tests.simulation.loop import Process
from tests.simulation.tiny_model import plain_tokens

NUM_CLIENTS, NUM_TOKENS = 3, 32
CLIENTS = tuple(f"client-{number}" for number in range(NUM_CLIENTS))
NUM_COMPLETIONS = 8
GAMMAS = GammaPolicy(), GammaPolicy(fixed=0), GammaPolicy(fixed=3), GammaPolicy(fixed=3, max_nodes=6)


@dataclass
class Stream:
    # The requests, one after another, with the tokens of plain decoding.
    turns: list[tuple[GenerationRequest, tuple[int, ...]]]
    turn: int = 0  # the turn that runs
    received: list[int] = field(default_factory=list)  # the tokens of the turn that the client has
    ended: str = ""  # how it ended: a finish reason, or an error's class; empty while it runs
    error: GammarayError | None = None
    process: Process | None = None  # the client's process
    attempts: int = 0  # how often a client process began the turn
    is_second: bool = False  # whether it began after another session of its name was deleted

    @property
    def name(self) -> str:
        return self.turns[0][0].session_id

    @property
    def expected(self) -> tuple[int, ...]:
        return self.turns[self.turn][1]

    @property
    def place(self) -> tuple[int, int]:
        """The turn, and how many tokens of it the client has."""
        return self.turn, len(self.received)

    @property
    def is_last(self) -> bool:
        return self.turn + 1 == len(self.turns)


def draw_stream(rng: random.Random, name: str, num_tokens: int = NUM_TOKENS) -> Stream:
    """Return a request out of some, whose expected tokens are computed once."""
    number = rng.randrange(NUM_COMPLETIONS)
    prompt = tuple(random_tokens(number))
    temperature, seed = (0.0, 0.7, 1.0)[number % 3], number + 1
    expected = plain_tokens(prompt, temperature, seed, num_tokens)
    params = SamplingParams(temperature=temperature, seed=seed)
    gamma = rng.choice(GAMMAS)
    request = GenerationRequest(
        prompt, sampling=params, max_tokens=num_tokens, ignore_eos=True, session_id=name, gamma=gamma
    )
    if rng.random() < 0.7:
        return Stream([(request, expected)])
    half = num_tokens // 2
    first = replace(request, max_tokens=half)
    second = replace(request, prompt=(5, 6, 7), max_tokens=half, turn=1)
    more = plain_tokens((*prompt, *expected[:half], 5, 6, 7), temperature, seed, half)
    return Stream([(first, expected[:half]), (second, more)])


def random_tokens(number: int) -> Sequence[int]:
    """Return prompt `number`; the first ones begin alike, so that workers share their caches."""
    common = [(7 * i) % 251 for i in range(20)]
    return [*common[: 20 if number < 4 else 3], *((number * 31 + i) % 251 for i in range(number + 1))]
