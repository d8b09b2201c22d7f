"""What outlives an owner: its advice to the next one, and the tokens as bytes."""

from types import SimpleNamespace

import pytest

from gammaray.blocks import TokenLogprobs
from gammaray.errors import CancelledError, FailedPreconditionError, UnavailableError
from gammaray.maths.acceptance import SpeculationCounters
from gammaray.types import Proposal, TokenOrigin
from orchestrator.cycle.handover import SessionHandover
from orchestrator.storage.token_records import TokenRecords
from orchestrator.workers.verifier import TRIES, FencedVerifier

ORIGINS = [TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION, TokenOrigin.BONUS]
SESSION = SimpleNamespace(session_id="s")
LOGPROBS = [
    TokenLogprobs(-0.25, ((5, -0.25), (6, -1.5))),
    TokenLogprobs(-2.0, ((1, -0.5),)),
    TokenLogprobs(0.0),
]


def counted():
    counters = SpeculationCounters()
    counters.observe(
        gamma=4, tested=3, accepted=2, emitted=3, draft_s=0.1, verify_s=0.2, draft_worker="host:1"
    )
    return counters


def test_heritage_there_and_back():
    handover = SessionHandover(counted(), 1.5, "host:2", "host:1")
    again = SessionHandover.from_bytes(handover.to_bytes())
    assert vars(again.counters) == vars(handover.counters)
    assert (again.elapsed_s, again.target, again.draft) == (1.5, "host:2", "host:1")


@pytest.mark.parametrize(
    "data",
    [b"", b"no json", b"[]", b"{}", b'{"counters": {}, "elapsed_s": 0, "target": "", "draft": ""}'],
)
def test_heritage_that_makes_no_sense_is_none(data):
    assert vars(SessionHandover.from_bytes(data).counters) == vars(SpeculationCounters())


def test_counters_catch_up_with_the_tokens():
    counters = counted()
    counters.catch_up([TokenOrigin.ACCEPTED] * 5 + [TokenOrigin.BONUS])
    assert (counters.accepted, counters.tested, counters.drafted, counters.emitted) == (5, 6, 7, 6)
    counters.catch_up([TokenOrigin.ACCEPTED])
    assert counters.accepted == 5


@pytest.mark.parametrize("num_top", [None, 0, 1, 2])
def test_records_there_and_back(num_top):
    records = TokenRecords(num_top)
    token_ids = [7, 0, 2**32 - 1]
    data = records.pack(token_ids, ORIGINS, () if num_top is None else LOGPROBS)
    assert len(data) == 3 * records.size
    expected = [None] * 3
    if num_top is not None:
        expected = [TokenLogprobs(entry.logprob, entry.top[:num_top]) for entry in LOGPROBS]
    assert records.unpack(data) == tuple(zip(token_ids, ORIGINS, expected, strict=True))
    assert records.unpack(data[:-1]) == records.unpack(data)[:2]  # a torn record


class Releasing:
    """Answers CANCELLED at first, as a worker does whose session was released."""

    def __init__(self, times: int = 1) -> None:
        self.calls, self.times = 0, times

    async def verify(self, session, draft):
        self.calls += 1
        if self.calls <= self.times:
            raise CancelledError("session s was released")
        return "verdict"


@pytest.mark.parametrize("times", [1, 2, TRIES - 1])
async def test_fenced_verifier_goes_on_when_the_session_is_its_own(times):
    renewed = []

    async def renew(session):
        renewed.append(session.session_id)

    assert await FencedVerifier(Releasing(times), renew).verify(SESSION, Proposal()) == "verdict"
    assert renewed == ["s"] * times


async def test_fenced_verifier_never_takes_a_workers_word_for_a_cancellation():
    async def renew(session):
        pass

    verifier = Releasing(1000)
    with pytest.raises(UnavailableError, match=r"session s: workers dropped it .* was released"):
        await FencedVerifier(verifier, renew).verify(SESSION, Proposal())
    assert verifier.calls == TRIES


@pytest.mark.parametrize(
    "error", [CancelledError("s was cancelled"), FailedPreconditionError("another owner")]
)
async def test_fenced_verifier_stops_when_it_is_not(error):
    async def renew(session):
        raise error

    verifier = Releasing()
    with pytest.raises(type(error), match=str(error)):
        await FencedVerifier(verifier, renew).verify(SESSION, Proposal())
    assert verifier.calls == 1
